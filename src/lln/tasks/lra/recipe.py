"""How a task is learned: the budgets of the presets, one run, and what is kept of it.

All methods of a task have the same budget: steps, examples in a step and their order, learning rate, seed of weights.

`paper` is the public configuration of the Skyformer comparison, which the paper says it used: AdamW without weight
decay, betas 0.9 and 0.999, a linear warm-up and decay, 50,000 steps. Not as there: numbers are float32 (there float16
around attention), gradients are clipped by their norm (there by value), and the model after the last step is tested
(there the one that was best on validation data).

`laptop` is for two cores: shorter runs with a higher learning rate and no dropout, on inputs of the same length. Its
model differs in retrieval alone: means over the tokens are standardised, without which LLN+Diag learned nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lln.provenance import provenance, read_json
from lln.tasks.config import TrainConfig, check_attention, setting
from lln.tasks.evaluation import Batch
from lln.tasks.lra.data import load
from lln.tasks.lra.examples import SPLITS, Data, collate, task_named
from lln.tasks.lra.model import OPTIONS, Classifier, Shape
from lln.tasks.run import RunFolder, write_json
from lln.tasks.trainer import fit

RESULT = "result.json"

_ADAM = {"weight_decay": 0.0, "betas": (0.9, 0.999), "epsilon": 1e-6, "record_every": 0}
_PAPER = _ADAM | {"steps": 50_000, "log_every": 100, "save_every": 500}
_LAPTOP = _ADAM | {"warmup_steps": 0.1, "dropout": 0.0, "log_every": 20, "save_every": 100}
BUDGETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "text": _PAPER | {"batch_size": 32, "learning_rate": 1e-4, "warmup_steps": 80},
        "listops": _PAPER | {"batch_size": 32, "learning_rate": 1e-4, "warmup_steps": 1000},
        "retrieval": _PAPER | {"batch_size": 16, "learning_rate": 2e-4, "warmup_steps": 800},
        "pathfinder": _PAPER | {"batch_size": 128, "learning_rate": 2e-4, "warmup_steps": 312},
        "image": _PAPER | {"batch_size": 256, "learning_rate": 1e-4, "warmup_steps": 175},
    },
    "laptop": {
        "text": _LAPTOP | {"steps": 700, "batch_size": 16, "learning_rate": 5e-4},
        "listops": _LAPTOP | {"steps": 700, "batch_size": 16, "learning_rate": 3e-3, "examples": 12_000},
        "retrieval": _LAPTOP | {"steps": 400, "batch_size": 16, "learning_rate": 1e-3, "standardise": True},
        "pathfinder": _LAPTOP | {"steps": 300, "batch_size": 16, "learning_rate": 1e-3, "examples": 16_000},
        "image": _LAPTOP | {"steps": 800, "batch_size": 16, "learning_rate": 1e-3},
    },
}


@dataclass(frozen=True, kw_only=True)
class LraConfig(TrainConfig):
    """Settings of a run on one task of the Long Range Arena."""

    task: str = setting("listops", "Task: text, listops, retrieval, pathfinder, image.")
    dropout: float = setting(0.1, "Dropout of activations.")
    standardise: bool = setting(False, "Standardise the mean over the tokens before deciding; not as published.")
    examples: int | None = setting(None, "Training examples of a generated task; left out, as published.")
    dashes: int | None = setting(None, "Dashes of a path (pathfinder): 6, 9 or 14; left out, 14.")
    evaluate_on: str = setting("test", "Split for the accuracy: test, or valid to try settings out.")

    def __post_init__(self) -> None:
        super().__post_init__()
        task_named(self.task)
        if self.evaluate_on not in SPLITS[1:]:
            raise ValueError(f"evaluate_on must be {' or '.join(SPLITS[1:])}, got {self.evaluate_on!r}")

    @property
    def method(self) -> str:
        """The mechanism, with those options that are not the comparison's."""
        usual = OPTIONS.get(self.attention, {})
        options = [f"{key}={value}" for key, value in self.options.items() if usual.get(key) != value]
        return ":".join([self.attention, *options])

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return "-".join([self.task, self.method.replace(":", "-"), f"seed{self.seed}"])


def recipe(
    preset: str, task: str, attention: str, *, seed: int = 0, options: Mapping[str, Any] | None = None, **changes: Any
) -> LraConfig:
    """The settings of a run. `options` are added to those of the comparison."""
    if preset not in BUDGETS:
        raise ValueError(f"there is no preset {preset!r}; there are: {', '.join(BUDGETS)}")
    length = task_named(task).length
    values = BUDGETS[preset][task] | changes
    own = OPTIONS.get(attention, {}) | dict(options or {})
    config = LraConfig(task=task, attention=attention, options=own, seed=seed, **values)
    check_attention(attention, own, heads=Shape.heads, width=Shape.width, tokens=length)
    return config


def read_data(config: LraConfig, data_dir: Path | None) -> Data:
    return load(config.task, data_dir=data_dir, examples=config.examples, dashes=config.dashes)


def build(config: LraConfig) -> Classifier:
    """The model of a run. Whatever the mechanism draws, all else starts from the same weights for a seed."""
    shape, task = Shape(dropout=config.dropout, standardise=config.standardise), task_named(config.task)
    torch.manual_seed(config.seed)
    plain = Classifier(task, "softmax", shape=shape)
    torch.manual_seed(config.seed)
    model = Classifier(task, config.attention, options=config.options, shape=shape)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


def train(config: LraConfig, *, out: Path, data_dir: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """One run in the folder `out`, begun, continued, or done already; returns its result, which is also written."""
    with RunFolder(out, config.settings(), say=_nothing if quiet else print) as run:
        if (out / RESULT).exists():
            return read_result(out)
        data = read_data(config, data_dir)
        tested = data.splits[config.evaluate_on]
        summary = run.summary or fit(
            build(config),
            run=run,
            config=config,
            train_data=data.splits["train"],
            eval_data=tested.by_length(),
            collate=collate,
            tokens=_kept,
            label=config.name,
            quiet=quiet,
        )
        lines = run.metrics()
        result = {
            "task": config.task,
            "attention": config.attention,
            "options": dict(config.options),
            "seed": config.seed,
            "accuracy": summary["eval_accuracy"],
            "evaluated_on": config.evaluate_on,
            "evaluated_examples": len(tested),
            "source": data.source,
            "steps": summary["steps"],
            "train_examples": len(data.splits["train"]),
            "seconds": summary["seconds"],
            "parameters": summary["parameters"],
            "loss": [[line["step"], round(line["loss"], 5)] for line in lines if "loss" in line],
            "evaluations": [line for line in lines if "eval_accuracy" in line],
            "settings": config.settings(),
            "provenance": provenance(seed=config.seed, command=f"lln lra run (one run of it, {config.name})"),
        }
        write_json(out / RESULT, result)
    return result


def read_result(folder: Path) -> dict[str, Any]:
    remedy = "remove it, and the command of the run writes it anew"
    result: dict[str, Any] = read_json(folder / RESULT, remedy)
    return result


def _kept(batch: Batch) -> int:
    return int((batch["tokens"] != 0).sum())


def _nothing(message: str) -> None:
    pass
