"""Settings of a run on a task of the Long Range Arena.

All methods of a task have the same steps, examples in a step and their order, learning rate, and seed of weights.

`paper` is the public configuration of the Skyformer comparison, which the paper states it used: AdamW without weight
decay, betas 0.9 and 0.999, a linear warm-up and decay, 50,000 steps. Not as there: numbers are float32 (there float16
around attention), gradients are clipped by their norm (there by value), and the model after the last step is tested
(there the one that was best on validation data).

`laptop`: shorter runs with a higher learning rate and no dropout, on inputs of the same length. Its model differs in
retrieval alone: means over the tokens are standardised, without which LLN+Diag learned nothing. Mechanisms have the
options of the comparison in both presets: the learned share of LLN+Diag that other experiments have in `laptop` is
worse on two of the tasks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from lln.tasks.config import TrainConfig, setting
from lln.tasks.lra.examples import SPLITS
from lln.tasks.lra.registry import TASKS, task_named

_ADAM = {"weight_decay": 0.0, "betas": (0.9, 0.999), "epsilon": 1e-6, "record_every": 0}
# Options of the comparison's public configuration. Skyformer's 128 landmarks are 64 queries and 64 keys.
OPTIONS: dict[str, dict[str, Any]] = {
    "reformer": {"rounds": 2, "shared_qk": True},
    "performer": {"num_features": 128},
    "skyformer": {"num_landmarks": 64},
    "nystrom": {"num_landmarks": 128},
}


@dataclass(frozen=True, kw_only=True)
class LraConfig(TrainConfig):
    """Settings of a run on one task of the Long Range Arena."""

    task: str = setting("listops", f"Task: {', '.join(TASKS)}.")
    dropout: float = setting(0.1, "Dropout of activations.")
    standardise: bool = setting(False, "Standardise the mean over the tokens before deciding; not as published.")
    examples: int | None = setting(None, "Training examples of a generated task; left out, as published.")
    dashes: int | None = setting(None, "Dashes of a path (pathfinder): 6, 9 or 14; left out, 14.")
    evaluate_on: str = setting("test", "Split for the accuracy: test, or valid to try settings out.")

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "laptop": _ADAM | {"warmup_steps": 0.1, "dropout": 0.0, "log_every": 20, "save_every": 100},
        "paper": _ADAM | {"steps": 50_000, "log_every": 100, "save_every": 500},
    }
    TASK_PRESETS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {
        preset: {name: dict(task.presets[preset]) for name, task in TASKS.items()} for preset in PRESETS
    }
    PRESET_OPTIONS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = dict.fromkeys(PRESETS, OPTIONS)

    def __post_init__(self) -> None:
        super().__post_init__()
        task_named(self.task)
        self._one_of("evaluate_on", *SPLITS[1:])
