"""Settings of a run: frozen dataclasses whose fields are also the flags of `lln train` and `lln linearize`.

Presets mean the same everywhere. `laptop`, the default: for two cores, minutes to half an hour a run. `paper`: the
published settings. `quick` and `pretrained`, where there are such, are described in the help of their command.
"""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from lln import zoo
from lln.zoo.registry import check_options

DECAYS = ("linear", "cosine", "constant")
PRECISIONS = ("fp32", "bf16", "fp16")


def setting(default: Any, help: str, *, flag: str | None = None) -> Any:
    """A field of a config, with the help text of its flag, and the flag's name if it is not the field's."""
    metadata = {"help": help, "flag": flag}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a mechanism from `name=value`; a value that Python does not read as one is a string."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option takes name=value, as block_size=64; got {text!r}")
        if name in options:
            raise ValueError(f"--option {name} is given twice")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            options[name] = value
    return options


def check_attention(attention: str, options: Mapping[str, Any], *, heads: int, width: int, tokens: int) -> None:
    """Refuse options that a mechanism cannot work with in a model of these sizes, by building it and running it once.

    This takes milliseconds: it comes before a folder is made and data are read.
    """
    if width % heads:
        raise ValueError(f"a width of {width} does not divide into {heads} heads")
    sizes = {"num_heads": heads, "head_dim": width // heads, "max_len": tokens}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            zoo.build(attention, **sizes, **options)(*torch.ones(3, 1, heads, 2, width // heads))
        except Exception as error:  # whatever a mechanism raises, the options are what differs from run to run
            given = ", ".join(f"{name}={value}" for name, value in options.items()) or "none"
            raise ValueError(f"{attention} cannot be built with these options ({given}): {error}") from error


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings with presets.

    `PRESETS` has the values of each preset, `TASK_PRESETS` further ones for the tasks of an experiment with several,
    and `PRESET_OPTIONS` the options that a preset gives a mechanism unless they are given.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    TASK_PRESETS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {}
    PRESET_OPTIONS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The settings of a preset, with changes.

        Args:
            name: one of `PRESETS`.
            changes: fields that differ from the preset.

        Returns:
            The settings.

        Raises:
            ValueError: there is no such preset, or a value cannot be.

        Example:
            >>> MlmConfig.preset("laptop", attention="lln", steps=100).batch_size
            16
        """
        if name not in cls.PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are: {', '.join(cls.PRESETS)}")
        task = changes.get("task", getattr(cls, "task", ""))
        values = cls.PRESETS[name] | cls.TASK_PRESETS.get(name, {}).get(task, {}) | changes
        usual = cls.PRESET_OPTIONS.get(name, {}).get(values.get("attention", getattr(cls, "attention", "")), {})
        given = values.get("options", {})
        if "combine" not in given:  # another way to combine has other options
            values["options"] = {**usual, **given}
        # A change of the one replaces the preset's other.
        if hasattr(cls, "epochs") and ("steps" in changes) != ("epochs" in changes):
            values["epochs" if "steps" in changes else "steps"] = None
        return cls(**values)

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def _above_0(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def _one_of(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")

    def settings(self) -> dict[str, Any]:
        """All settings, as JSON has them."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in dataclasses.asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """What every experiment has."""

    OTHER_ATTENTIONS: ClassVar[tuple[str, ...]] = ()  # names beside those of the zoo
    # What a preset gives a mechanism unless options are given. In a small model from a random start the far part of
    # LLN+Diag is noise at first, and the plain average gives it too much weight: its heads learn the share instead.
    PRESET_OPTIONS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {
        "laptop": {"lln_diag": {"combine": "ratio", "share": 0.1}}
    }

    attention: str = setting("lln_diag", "Mechanism, as `lln zoo` lists them.")
    options: Mapping[str, Any] = setting({}, "Option of the mechanism, as block_size=64; may be given several times.")
    seed: int = setting(0, "Seed of weights, data order, masking, augmentation and dropout.")
    steps: int | None = setting(None, "Optimiser steps; left out, `epochs` counts.")
    epochs: float | None = setting(None, "Passes over the training data; left out, `steps` counts.")
    batch_size: int = setting(32, "Examples in a step, over all processes and pieces.")
    gradient_accumulation: int = setting(1, "Pieces that each process works through for one step.")
    learning_rate: float = setting(1e-3, "Highest learning rate.")
    warmup_steps: float = setting(
        0.06, "Steps until the learning rate is at its highest; below 1 a share of all steps."
    )
    decay: str = setting("linear", f"Course of the learning rate after that: {', '.join(DECAYS)}.")
    weight_decay: float = setting(0.01, "Weight decay of AdamW.")
    betas: tuple[float, float] = setting((0.9, 0.98), "Betas of AdamW.")
    epsilon: float = setting(1e-6, "Epsilon of AdamW.")
    clip: float = setting(1.0, "Largest norm of the gradient; 0 for no limit.")
    precision: str = setting(
        "fp32", f"Number format: {', '.join(PRECISIONS)}; the last two by autocast, fp16 with a loss scale."
    )
    loss_scale: float = setting(2.0**16, "First loss scale (fp16).")
    scale_window: int = setting(2000, "Steps without overflow after which the loss scale doubles (fp16).")
    log_every: int = setting(10, "Steps between lines of metrics.jsonl.")
    eval_every: int = setting(0, "Steps between evaluations; 0: at the end alone.")
    save_every: int = setting(100, "Steps between checkpoints; there is always one at the end.")
    keep_checkpoints: int = setting(2, "How many of the newest checkpoints are kept.")
    record_every: int = setting(100, "Steps between records of what the heads do; 0 for none.")

    def __post_init__(self) -> None:
        self._at_least(1, "batch_size", "gradient_accumulation", "log_every", "save_every", "scale_window")
        self._at_least(0, "seed", "eval_every", "record_every", "weight_decay", "clip", "warmup_steps")
        # With one alone, a checkpoint that turns out damaged would leave nothing to go back to.
        self._at_least(2, "keep_checkpoints")
        self._above_0("learning_rate", "loss_scale")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give steps or epochs, one of them: got steps={self.steps} and epochs={self.epochs}")
        if not (self.steps or self.epochs or 0) > 0:
            raise ValueError(f"there must be something to train: got steps={self.steps} and epochs={self.epochs}")
        self._one_of("decay", *DECAYS)
        self._one_of("precision", *PRECISIONS)
        if self.attention not in self.OTHER_ATTENTIONS:
            check_options(self.attention, self.options)  # also refuses a name that does not exist
