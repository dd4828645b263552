"""Settings of `lln linearize`; the fields are also the flags of the command."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lln.tasks.config import Settings, setting
from lln.zoo.registry import check_options

# The options of a mechanism where none are given.
BEST: dict[str, dict[str, Any]] = {
    "lln": {"statistics": "learned", "form": "decomposed", "projection": True, "signed": True},
    "lln_diag": {
        "statistics": "learned",
        "form": "decomposed",
        "projection": True,
        "signed": True,
        "near": "window",
    },
}
# Least features of a head before signs. On all-MiniLM-L6-v2, with heads of 32, 64 instead of 32 lower the divergence of
# aligned weights by a third, on passages of its training text that nothing was fitted to.
LEAST_FEATURES = 64


@dataclass(frozen=True, kw_only=True)
class LinearizeConfig(Settings):
    """How a pretrained model is made linear."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "laptop": {},  # meant for half an hour on two cores with 22 million parameters; its time was not measured
        "quick": {"tokens": 60_000, "align_steps": 30, "join_steps": 10, "distil_steps": 60, "eval_passages": 40},
    }

    attention: str = setting("lln_diag", "Mechanism, as `lln zoo` lists them.")
    options: Mapping[str, Any] = setting({}, "Option of the mechanism, as block_size=64; may be given several times.")
    length: int = setting(512, "Most tokens in a training example, at most the model's positions.")
    tokens: int = setting(2_000_000, "Tokens of text to learn from; each is seen as often as the steps need.")
    examples: int | None = setting(
        None, "With --task: learn from so many training examples, drawn by the seed; left out, from all."
    )
    eval_examples: int | None = setting(
        None, "With --task: measure on so many examples, the same for every seed; left out, on all."
    )
    batch_tokens: int = setting(2048, "Tokens in a step.")
    calibration_tokens: int = setting(8192, "Tokens from which centres and spreads are measured.")
    align_steps: int = setting(300, "Steps in which the far branch alone learns softmax attention's weights.")
    join_steps: int = setting(60, "Steps in which the shares of the two branches are learned.")
    distil_steps: int = setting(600, "Steps in which the whole model learns to do what it did before.")
    # Of 1e-2, 3e-2 and 1e-1, 3e-2 left the least divergence after 100 steps, in three layers of all-MiniLM-L6-v2 on
    # passages of Wikipedia that nothing was fitted to.
    align_rate: float = setting(3e-2, "Learning rate of projections, spreads and centres in the first stage.")
    join_rate: float = setting(1e-2, "Learning rate of the shares.")
    # Of 1e-4 and 3e-4, and of 1e-4 and 3e-3 for the mechanisms, these kept most after 60 steps on all-MiniLM-L6-v2, on
    # passages of its training text that nothing was fitted to.
    distil_rate: float = setting(1e-4, "Learning rate of the whole model.")
    distil_feature_rate: float = setting(3e-3, "Learning rate of the mechanisms while the whole model is trained.")
    precision: str = setting(
        "fp32", "Number format while a model is trained: fp32, or bf16 by autocast; measurements are in fp32."
    )
    rows: int = setting(64, "Queries of a sequence whose weights are compared: memory stays linear in the length.")
    lora_rank: int = setting(0, "Rank of LoRA matrices that are trained instead of all weights (needs peft); 0: all.")
    steps: int | None = setting(None, "0: stop after calibration, without training. Left out: all stages.")
    eval_passages: int = setting(100, "Held-out passages at each length that the report measures.")
    cost_tokens: int = setting(16_384, "Longest input at which time and memory of a layer are measured; 0: none.")
    seed: int = setting(0, "Seed of everything that is drawn at random.")
    save_seconds: float = setting(120.0, "Seconds between checkpoints.")

    def __post_init__(self) -> None:
        self._at_least(1, "length", "tokens", "batch_tokens", "calibration_tokens", "rows", "eval_passages")
        self._at_least(0, "align_steps", "join_steps", "distil_steps", "lora_rank", "cost_tokens", "seed")
        self._at_least(8, "length")
        self._at_least(2, *(name for name in ("examples", "eval_examples") if getattr(self, name) is not None))
        self._above_0("align_rate", "join_rate", "distil_rate", "distil_feature_rate")
        self._one_of("precision", "fp32", "bf16")
        if self.steps not in (None, 0):
            raise ValueError(f"steps must be 0 (calibration alone) or left out, got {self.steps}")
        check_options(self.attention, self.all_options())  # also refuses a name that does not exist

    def all_options(self, head_dim: int | None = None, *, is_causal: bool | None = None) -> dict[str, Any]:
        """The options of the mechanism: the given ones, and the best ones for the rest.

        The number of features follows from `head_dim`, and how branches are combined from `is_causal`, once they are
        known.
        """
        options = BEST.get(self.attention, {}) | dict(self.options)
        if self.attention == "lln_diag" and is_causal is not None and options["statistics"] == "learned":
            options = {"combine": "gate" if is_causal else "replace"} | options
        if head_dim is not None and options.get("projection") and head_dim < LEAST_FEATURES:
            options = {"feature_dim": LEAST_FEATURES} | options
        return options

    def stage_steps(self) -> dict[str, int]:
        """The steps of each stage after calibration.

        Returns:
            align, join and distil; all 0 with `steps=0`.

        Example:
            >>> LinearizeConfig(align_steps=5, join_steps=2, distil_steps=9).stage_steps()
            {'align': 5, 'join': 2, 'distil': 9}
        """
        if self.steps == 0:
            return {"align": 0, "join": 0, "distil": 0}
        return {"align": self.align_steps, "join": self.join_steps, "distil": self.distil_steps}

    def settings(self) -> dict[str, Any]:
        """All settings, as JSON has them.

        Returns:
            The fields by their names, with all options of the mechanism.
        """
        return super().settings() | {"options": self.all_options()}
