"""What fine-tuning starts from: a pre-training run of ours, a Hugging Face encoder, or one that was linearised."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaForSequenceClassification,
)
from transformers.utils import logging

import lln.hf
from lln.provenance import read_json
from lln.tasks.config import check_attention
from lln.tasks.data.tokenizer import load_tokenizer
from lln.tasks.mlm import roberta_config
from lln.tasks.presets import SAME, GlueConfig, MlmConfig, is_hugging_face
from lln.tasks.run import CONFIG, RESTORE

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
)


def find_start(folder: str) -> "Start":
    """What a folder holds; refuses what is neither a finished pre-training run nor a Hugging Face encoder."""
    if not folder:
        raise ValueError(
            "give what to start from: --from FOLDER, a run of `lln train mlm`, a Hugging Face encoder, or what "
            "`lln linearize` wrote"
        )
    if is_hugging_face(folder):
        return HuggingFaceModel(folder)
    return PretrainingRun(folder, pretraining(folder))


def pretraining(folder: str) -> MlmConfig:
    """The settings of the finished pre-training run in a folder."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is neither a run folder nor a Hugging Face model: it has no {CONFIG}")
    settings = read_json(path, RESTORE[CONFIG])
    if settings.pop("experiment", None) != "mlm":
        raise ValueError(
            f"{folder} is neither a pre-training run, which `lln train mlm` makes, nor a Hugging Face model, whose "
            f"{CONFIG} has a model_type"
        )
    if not (path.parent / "summary.json").exists():
        raise ValueError(f"the pre-training run {folder} is not finished; repeat its command first")
    try:
        return MlmConfig(**settings | {"betas": tuple(settings.get("betas", MlmConfig.betas))})
    except (TypeError, ValueError) as error:  # of a setting that is unknown or refused
        raise ValueError(f"{path} is not of this version of lln: {error}; repeat the run with it") from error


@dataclass(frozen=True)
class PretrainingRun:
    """A finished run of `lln train mlm`."""

    folder: str
    before: MlmConfig

    @property
    def attention(self) -> str:
        return self.before.attention

    @property
    def options(self) -> Mapping[str, Any]:
        return self.before.options

    @property
    def length(self) -> int:
        """The most tokens that it takes."""
        return self.before.length

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(f"{self.folder}/model", None, vocab_size=self.before.vocab_size, data_dir=None)

    def check(self, attention: str, options: Mapping[str, Any]) -> None:
        """Refuse a mechanism that it cannot be given."""
        sizes = {"heads": self.before.heads, "width": self.before.width, "tokens": self.before.length + 2}
        check_attention(attention, options, **sizes)

    def build(self, config: GlueConfig, labels: int) -> PreTrainedModel:
        """The encoder under a new head, with so many labels; one is a number to predict."""
        settings = roberta_config(self.before, self.tokenizer())
        settings.num_labels = labels
        settings.hidden_dropout_prob = config.dropout
        settings.attention_probs_dropout_prob = config.attention_dropout
        torch.manual_seed(config.seed)
        model = RobertaForSequenceClassification(settings)  # type: ignore[no-untyped-call]
        lln.hf.convert(model, config.attention, **config.options)
        weights = safetensors.torch.load_file(Path(self.folder) / "model" / "model.safetensors")
        encoder = {name: tensor for name, tensor in weights.items() if name.startswith("roberta.")}
        missing, unknown = model.load_state_dict(encoder, strict=False)
        # Another attention than before may have parameters of its own, which are initialised.
        missing = [name for name in missing if not name.startswith("classifier.") and ".mechanism." not in name]
        unknown = [name for name in unknown if ".mechanism." not in name]
        if missing or unknown:
            raise ValueError(f"{self.folder} holds other weights than its config has: {', '.join(missing + unknown)}")
        return model


class HuggingFaceModel:
    """A folder with an encoder as transformers saves it; with its mechanism if `lln` has converted it."""

    def __init__(self, folder: str) -> None:
        try:
            self.config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} holds no Hugging Face model that can be read: {error}") from error
        config = self.config
        if config.is_encoder_decoder or type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise ValueError(f"{folder} holds a {config.model_type} model, which has no form that classifies texts")
        self.folder = folder
        saved = getattr(config, "lln_attention", None)
        self.is_linear = saved is not None
        self.attention: str = saved["attention"] if saved else "softmax"
        self.options: Mapping[str, Any] = saved["options"] if saved else {}
        # RoBERTa's positions begin after that of padding.
        before = config.pad_token_id + 1 if "roberta" in config.model_type else 0
        self.length = (getattr(config, "max_position_embeddings", None) or 1 << 30) - before

    def tokenizer(self) -> PreTrainedTokenizerFast:
        if not any((Path(self.folder) / name).is_file() for name in TOKENIZER_FILES):  # transformers makes an empty one
            raise ValueError(f"{self.folder} has no tokenizer: it holds none of {', '.join(TOKENIZER_FILES)}")
        found = load_tokenizer(self.folder, None, vocab_size=0, data_dir=None)
        if found.pad_token_id is None:
            raise ValueError(f"the tokenizer of {self.folder} has no token for padding; give it one and save it again")
        return found

    def check(self, attention: str, options: Mapping[str, Any]) -> None:
        if not self.is_linear:
            heads, width = self.config.num_attention_heads, self.config.hidden_size
            check_attention(attention, options, heads=heads, width=width, tokens=min(self.length, 512))
        elif (attention, dict(options)) != (self.attention, dict(self.options)):
            raise ValueError(
                f"{self.folder} was trained with {self.attention} attention; leave --attention and --option out, or "
                "start from the softmax model that it was made from"
            )

    def build(self, config: GlueConfig, labels: int) -> PreTrainedModel:
        dropout = {
            "hidden_dropout_prob": config.dropout,
            "dropout": config.dropout,
            "attention_probs_dropout_prob": config.attention_dropout,
            "attention_dropout": config.attention_dropout,
        }
        given = {name: value for name, value in dropout.items() if hasattr(self.config, name)}
        options = given | {"num_labels": labels, "dtype": torch.float32}
        torch.manual_seed(config.seed)
        with _no_messages():
            if self.is_linear:
                model: PreTrainedModel = lln.hf.from_pretrained(
                    self.folder, AutoModelForSequenceClassification, **options
                )
            else:
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    self.folder, output_loading_info=True, **options
                )
                encoder = f"{model.base_model_prefix}."
                missing = [x for x in report["missing_keys"] if x.startswith(encoder) and "pooler" not in x]
                if missing:
                    raise ValueError(f"{self.folder} lacks weights of its encoder: {', '.join(sorted(missing)[:5])}")
                if config.attention != "softmax":
                    lln.hf.convert(model, config.attention, **config.options)
        model.config.problem_type = "regression" if labels == 1 else "single_label_classification"
        return model


Start = PretrainingRun | HuggingFaceModel


def resolved(config: GlueConfig, start: Start) -> dict[str, Any]:
    """Attention and options of a run that begins at `start`; refuses settings that do not go with it."""
    if config.attention == SAME and config.options:
        raise ValueError(f"options of the mechanism come with attention={SAME!r} from {config.start}; name it too")
    if config.max_length > start.length:
        raise ValueError(f"max_length {config.max_length} is more than the {start.length} tokens of {config.start}")
    same = config.attention == SAME
    attention = start.attention if same else config.attention
    options = dict(start.options if same else config.options)
    start.check(attention, options)
    return {"attention": attention, "options": options}


@contextmanager
def _no_messages() -> Iterator[None]:
    """Without transformers' list of the weights of a head that is initialised, and without its progress bar."""
    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
