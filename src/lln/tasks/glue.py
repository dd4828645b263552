"""GLUE: a pre-trained run fine-tuned to classify sentences and pairs of sentences (the paper's table 1)."""

import dataclasses
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, RobertaForSequenceClassification

from lln.hf import convert
from lln.provenance import read_json
from lln.tasks.config import check_attention
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.glue import TASKS, read_glue
from lln.tasks.data.order import draws
from lln.tasks.data.tokenizer import load_tokenizer
from lln.tasks.mlm import roberta_config
from lln.tasks.presets import SAME, GlueConfig, MlmConfig
from lln.tasks.run import CONFIG, RESTORE, open_run, processes
from lln.tasks.trainer import Summary, fit

__all__ = ["GlueConfig", "build_model", "pretraining", "train"]

MULTIPLE = 8  # batches are padded to so many tokens, or a multiple: fewer shapes, and no odd ones


class Sentences:
    """Tokenised examples: {"input_ids", "labels"}; the same in every epoch."""

    def __init__(self, rows: Any, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
        second = None if rows["text_b"][0] is None else list(rows["text_b"])
        encoded = tokenizer(list(rows["text_a"]), second, truncation=True, max_length=max_length)
        self._tokens = [torch.tensor(ids) for ids in encoded["input_ids"]]
        self._labels = torch.tensor(rows["label"])

    def __len__(self) -> int:
        return len(self._tokens)

    def example(self, index: int, epoch: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


def pad(examples: list[dict[str, torch.Tensor]], padding: int) -> dict[str, torch.Tensor]:
    """A batch, padded on the right, with the mask that tells padding."""
    tokens = [example["input_ids"] for example in examples]
    lengths = torch.tensor([len(ids) for ids in tokens])
    width = -(-int(lengths.max()) // MULTIPLE) * MULTIPLE
    input_ids = pad_sequence(tokens, batch_first=True, padding_value=padding)
    input_ids = torch.nn.functional.pad(input_ids, (0, width - input_ids.shape[1]), value=padding)
    return {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


def pretraining(start: str) -> MlmConfig:
    """The settings of the finished pre-training run in the folder `start`."""
    if not start:
        raise ValueError("say which pre-training run to start from: --from FOLDER, made by `lln train mlm`")
    folder = Path(start)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no run folder: it has no {CONFIG}")
    settings = read_json(folder / CONFIG, RESTORE[CONFIG])
    if settings.pop("experiment", None) != "mlm":
        raise ValueError(f"{folder} is no pre-training run; make one with `lln train mlm`")
    if not (folder / "summary.json").exists():
        raise ValueError(f"the pre-training run {folder} is not finished; repeat its command first")
    try:
        return MlmConfig(**settings | {"betas": tuple(settings.get("betas", MlmConfig.betas))})
    except (TypeError, ValueError) as error:  # of a setting that is unknown or refused
        raise ValueError(f"{folder / CONFIG} is not of this version of lln: {error}; repeat the run with it") from error


def build_model(
    config: GlueConfig, before: MlmConfig, tokenizer: PreTrainedTokenizerFast
) -> RobertaForSequenceClassification:
    """The pre-trained encoder under a new classifier."""
    settings = roberta_config(before, tokenizer)
    settings.num_labels = len(TASKS[config.task].labels)
    settings.hidden_dropout_prob = config.dropout
    settings.attention_probs_dropout_prob = config.attention_dropout
    torch.manual_seed(config.seed)
    model = RobertaForSequenceClassification(settings)  # type: ignore[no-untyped-call]
    convert(model, config.attention, **config.options)
    weights = safetensors.torch.load_file(Path(config.start) / "model" / "model.safetensors")
    encoder = {name: tensor for name, tensor in weights.items() if name.startswith("roberta.")}
    missing, unknown = model.load_state_dict(encoder, strict=False)
    # Another attention than before may have parameters of its own, which start anew.
    missing = [name for name in missing if not name.startswith("classifier.") and ".mechanism." not in name]
    unknown = [name for name in unknown if ".mechanism." not in name]
    if missing or unknown:
        raise ValueError(f"{config.start} holds other weights than its config says: {', '.join([*missing, *unknown])}")
    return model


def train(config: GlueConfig, *, out: Path | None = None, data_dir: Path | None = None, quiet: bool = False) -> Summary:
    """Fine-tune, or continue to, or do nothing if the run is finished; returns its summary."""
    before = pretraining(config.start)
    if config.attention == SAME:
        if config.options:
            raise ValueError(f"options of the mechanism come with attention={SAME!r} from {config.start}; name it too")
        config = dataclasses.replace(config, attention=before.attention, options=before.options)
    if config.max_length > before.length:
        raise ValueError(f"max_length {config.max_length} is more than the {before.length} tokens of {config.start}")
    sizes = {"heads": before.heads, "width": before.width, "tokens": before.length + 2}
    check_attention(config.attention, config.options, **sizes)
    data = find_data(data_dir)
    with open_run("glue", config, out, name=f"glue-{config.task}", quiet=quiet) as run:
        if run.summary is not None:
            return run.summary
        tokenizer = load_tokenizer(f"{config.start}/model", None, vocab_size=before.vocab_size, data_dir=data)
        with processes().main_process_first():
            rows = read_glue(config.task, "train", data)
            held_out = read_glue(config.task, "validation", data)
        if config.train_examples is not None and config.train_examples < len(rows):
            rows = rows.select(draws(config.seed, 0, 0).permutation(len(rows))[: config.train_examples])
        padding = tokenizer.pad_token_id
        return fit(
            build_model(config, before, tokenizer),
            run=run,
            config=config,
            train_data=Sentences(rows, tokenizer, config.max_length),
            eval_data=Sentences(held_out, tokenizer, config.max_length),
            collate=lambda examples: pad(examples, padding),
            processing=tokenizer,
            label=f"{config.task} {config.attention}",
            quiet=quiet,
        )
