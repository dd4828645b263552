"""The settings of each experiment, with the presets `laptop` and `paper`. The flags of `lln train` are made of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from lln.tasks.config import TrainConfig, setting

GLUE_TASKS = ("mnli", "qnli", "qqp", "sst2", "cola", "mrpc", "rte", "stsb", "imdb")
SAME = "same"
# What the preset `pretrained` gives each task: about the same time for all, a few minutes of a core.
PRETRAINED: dict[str, dict[str, Any]] = {
    "mnli": {"train_examples": 8000, "epochs": 1.0},
    "qnli": {"train_examples": 4000, "epochs": 1.0},
    "qqp": {"train_examples": 4000, "epochs": 1.0},
    "sst2": {"train_examples": 8000, "epochs": 1.0},
    "cola": {"train_examples": 8000, "epochs": 2.0},
    "mrpc": {"train_examples": 8000, "epochs": 2.0},
    "rte": {"train_examples": 8000, "epochs": 3.0},
    "stsb": {"train_examples": 8000, "epochs": 3.0},
    "imdb": {"train_examples": 1000, "epochs": 1.0, "max_length": 512, "eval_examples": 1000, "batch_size": 16},
}


@dataclass(frozen=True, kw_only=True)
class MlmConfig(TrainConfig):
    """Pre-training. Preset `paper`: RoBERTa-base as fairseq's recipe trains it on WikiText-103, in fp16."""

    source: str = setting(
        "auto",
        "Text: stdlib, wikitext-2, wikipedia (joined with +), a file, a folder, hub:NAME. auto: both of the data "
        "folder, stdlib without one.",
    )
    tokenizer: str = setting("trained", "trained (on the text), roberta-bpe, or a folder with a saved tokenizer.")
    vocab_size: int = setting(8192, "Tokens of a trained tokenizer.")
    length: int = setting(128, "Tokens in an example.")
    pack: bool = setting(
        False,
        "Keep documents apart: an example holds several, or parts of them, none of which attends to another, and "
        "positions start again with each. Left out, examples are cut from the joined text.",
    )
    mask_probability: float = setting(0.15, "Share of the tokens that are to be predicted.")
    eval_examples: int | None = setting(None, "Validate on the first so many examples; left out, on all.")
    layers: int = setting(12, "Layers.")
    width: int = setting(768, "Width of the model.")
    heads: int = setting(12, "Attention heads.")
    feedforward: int = setting(3072, "Width of the feed-forward layers.")
    dropout: float = setting(0.1, "Dropout of activations.")
    attention_dropout: float = setting(0.1, "Dropout of attention weights; of value rows where there are no weights.")
    initial_std: float = setting(0.02, "Standard deviation of the first weights.")
    local_start: float = setting(
        0.0,
        "0: positions, queries and keys start at random. Above: so that tokens attend to their neighbours, positions "
        "as sinusoids, so many times as wide as embeddings of tokens, and query and key matrices near the identity.",
    )
    sequence_parallel: int = setting(
        1,
        "Processes that share each sequence (lln and lln_diag; no records of heads). A run may be continued with "
        "another number.",
    )

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "laptop": {
            "vocab_size": 4096,
            "layers": 2,
            "width": 128,
            "heads": 2,
            "feedforward": 512,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            # As wide as RoBERTa-base's 0.02 makes queries and keys.
            "initial_std": 0.05,
            "local_start": 2.0,
            "steps": 3000,
            "batch_size": 16,
            "learning_rate": 2e-3,
            "eval_every": 250,
            "eval_examples": 400,
            "save_every": 250,
        },
        "paper": {
            "steps": 125_000,
            "batch_size": 2048,
            "gradient_accumulation": 128,
            "learning_rate": 5e-4,
            "warmup_steps": 10_000.0,
            "clip": 0.0,
            "precision": "fp16",
            "source": "hub:Salesforce/wikitext:wikitext-103-raw-v1",
            "tokenizer": "roberta-bpe",
            "length": 512,
            "log_every": 100,
            "eval_every": 1000,
            "save_every": 1000,
            "record_every": 1000,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "length", "layers", "width", "heads", "feedforward", "sequence_parallel")
        if self.sequence_parallel > 1 and self.attention not in ("lln", "lln_diag"):
            raise ValueError(f"sequence_parallel is for lln and lln_diag; {self.attention} needs whole sequences")

    def settings(self) -> dict[str, Any]:
        # Without `pack` where it is off, so that runs from before there was such a setting can be continued, and
        # without `sequence_parallel`, which changes no result.
        left_out = ("sequence_parallel",) if self.pack else ("pack", "sequence_parallel")
        return {name: value for name, value in super().settings().items() if name not in left_out}


@dataclass(frozen=True, kw_only=True)
class GlueConfig(TrainConfig):
    """Fine-tuning. Preset `laptop`: after pre-training with the preset of that name; `pretrained`: from a Hugging Face
    model, also linearised, with sizes for each task, `PRETRAINED`; `paper`: ten epochs as in fairseq's recipe for
    RoBERTa-base. Where a Hugging Face model is started from, `laptop` means `pretrained`.
    """

    OTHER_ATTENTIONS: ClassVar[tuple[str, ...]] = (SAME,)
    PRESET_OPTIONS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {}  # a pre-trained model has its own
    TASK_PRESETS: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {
        "pretrained": PRETRAINED,
        "paper": {"qqp": {"warmup_steps": 0.25}},  # the recipe's only exception
    }

    attention: str = setting(SAME, "Mechanism; same: what the start has, options included.")
    task: str = setting("sst2", f"Task: {', '.join(GLUE_TASKS)}.")
    start: str = setting(
        "",
        "Folder to start from: a run of `lln train mlm`, a Hugging Face encoder, or what `lln linearize` wrote.",
        flag="--from",
    )
    max_length: int = setting(128, "Longer examples are cut to so many tokens.")
    train_examples: int | None = setting(None, "Train on so many examples, drawn by the seed; left out, on all.")
    eval_examples: int | None = setting(
        None, "Validate on so many examples, the same for every seed; left out, on all."
    )
    rates: tuple[float, ...] = setting(
        (),
        "Learning rate to try on a tenth of the training data that is held out; give several, and the best is used. "
        "--learning-rate instead tries none.",
        flag="--rate",
    )
    trial_share: float = setting(1.0, "Share of the steps in which a rate is tried.")
    group_lengths: bool = setting(False, "Batches of examples of similar lengths: less padding.")
    dropout: float = setting(0.1, "Dropout of activations.")
    attention_dropout: float = setting(0.1, "Dropout of attention weights; of value rows where there are no weights.")

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "laptop": {
            "epochs": 1.0,
            "train_examples": 12_000,
            "learning_rate": 1e-3,
            "attention_dropout": 0.0,
            "save_every": 200,
            "record_every": 0,
        },
        "pretrained": {
            "epochs": 1.0,
            "rates": (1e-4, 2e-4),  # at 5e-4 the training loss of all-MiniLM-L6-v2 on MNLI stays at ln 3
            "trial_share": 0.4,  # with 0.2, trials on QNLI end at chance and choose between rates at random
            "group_lengths": True,
            "attention_dropout": 0.0,
            "precision": "bf16",
            "save_every": 200,
            "record_every": 0,
        },
        "paper": {
            "epochs": 10.0,
            "learning_rate": 1e-5,
            "weight_decay": 0.1,
            "clip": 0.0,
            "precision": "fp16",
            "log_every": 100,
            "eval_every": 2000,
            "save_every": 1000,
            "record_every": 0,
        },
    }

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        if name == "laptop" and is_hugging_face(changes.get("start", "")):
            name = "pretrained"
        if name == "pretrained" and "learning_rate" in changes:
            changes = {"rates": ()} | changes
        return super().preset(name, **changes)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("task", *GLUE_TASKS)
        self._at_least(1, *(name for name in ("train_examples", "eval_examples") if getattr(self, name) is not None))
        if not all(rate > 0 for rate in self.rates):
            raise ValueError(f"rates must be above 0, got {', '.join(map(str, self.rates))}")
        if not 0 < self.trial_share <= 1:
            raise ValueError(f"trial_share must be above 0 and at most 1, got {self.trial_share}")


def is_hugging_face(folder: str) -> bool:
    """Whether a folder holds a model as Hugging Face saves it, and no run of `lln train`."""
    path = Path(folder) / "config.json"
    try:
        return bool(folder) and "model_type" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TrainConfig):
    """Images. Preset `paper`: twelve layers, 128 wide, a hundred epochs; what the paper does not state is that of the
    Dogs vs Cats example of the code base it names: 224 pixels, patches of 32, eight heads, Adam at 3e-5.
    """

    source: str = setting("auto", "dogs-vs-cats, or generated (drawn here). auto: the first if there is a data folder.")
    image_size: int = setting(224, "Pixels a side.")
    patch_size: int = setting(32, "Pixels a side of the patch that is one token.")
    layers: int = setting(12, "Layers.")
    width: int = setting(128, "Width of the model.")
    heads: int = setting(8, "Attention heads.")
    feedforward: int = setting(512, "Width of the feed-forward layers.")
    dropout: float = setting(0.0, "Dropout of activations.")
    generated_examples: int = setting(16_000, "Images drawn to train on; an eighth more to validate.")

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "laptop": {
            "epochs": 4.0,
            "batch_size": 64,
            "learning_rate": 1e-3,
            "decay": "cosine",
            "weight_decay": 0.05,
            "image_size": 64,
            "patch_size": 8,
            "layers": 4,
            "width": 64,
            "heads": 2,
            "feedforward": 256,
            "eval_every": 350,
            "save_every": 100,
            "record_every": 50,
        },
        "paper": {
            "epochs": 100.0,
            "batch_size": 64,
            "learning_rate": 3e-5,
            "warmup_steps": 0.0,
            "decay": "constant",
            "weight_decay": 0.0,
            "betas": (0.9, 0.999),
            "epsilon": 1e-8,
            "clip": 0.0,
            "eval_every": 350,
            "save_every": 350,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "image_size", "patch_size", "layers", "width", "heads", "feedforward", "generated_examples")
        self._one_of("source", "auto", "dogs-vs-cats", "generated")
        if self.image_size % self.patch_size:
            raise ValueError(f"patches of {self.patch_size} pixels do not fill an image of {self.image_size}")
