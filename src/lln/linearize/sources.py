"""What a model is made linear on: text, images or examples, split into what is learned from and measured on."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lln.instruments.inspect import most_tokens
from lln.linearize.config import LinearizeConfig
from lln.linearize.data import ExampleSource, ImageSource, Source, TextSource, check_tokenizer
from lln.linearize.teacher import is_classifier
from lln.tasks.data.folder import digest, hashed_share
from lln.tasks.glue import Sentences, drawn, split_rows

HELD_OUT = 0.05  # of the documents, chosen by a hash of their text


def make_source(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Sequence[str] | Tensor | Dataset,
    held_out: Sequence[str] | Tensor | Dataset | None,
    config: LinearizeConfig,
    *,
    quiet: bool = False,
) -> Source:
    """Batches of text, images or examples for a model."""
    if isinstance(texts, Tensor):
        images, rest = (texts, torch.as_tensor(held_out)) if held_out is not None else split_images(texts)
        size = max(1, config.batch_tokens // 64)
        return ImageSource(images, rest[: config.eval_passages], batch=size, calibration=4 * size, seed=config.seed)
    if isinstance(texts, str):
        raise TypeError("texts must be a list of documents, got one string; put it into a list")
    if tokenizer is None:
        raise ValueError("text needs the tokenizer of the model")
    check_tokenizer(model, tokenizer)
    if isinstance(texts, Dataset):
        return example_source(model, tokenizer, texts, held_out, config)
    documents = [text for text in texts if text.strip()]
    if not documents:
        raise ValueError("there is no text to learn from: all documents are empty")
    if held_out is None:
        documents, held_out = split_documents(documents)
    measured = set(held_out)
    documents = [x for x in documents if x not in measured]
    return TextSource(
        documents,
        list(held_out),
        tokenizer,
        length=most_tokens(model.config, config.length),
        tokens=config.tokens,
        batch_tokens=config.batch_tokens,
        calibration_tokens=config.calibration_tokens,
        passages=config.eval_passages,
        seed=config.seed,
        quiet=quiet,
    )


def example_source(
    model: PreTrainedModel, tokenizer: Any, rows: Dataset, held_out: Any, config: LinearizeConfig
) -> ExampleSource:
    """Examples of a classifier; refuses those that are not its task's."""
    if not is_classifier(model):
        raise ValueError(
            f"examples with labels are for a model that was fine-tuned to classify, not {type(model).__name__}; give "
            "text, or the fine-tuned model"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError("examples are read in batches, and the tokenizer has no token for padding; give it one")
    if held_out is None:
        rows, held_out = split_rows(rows)
    classes = getattr(rows.features["label"], "num_classes", 1)
    if classes != model.config.num_labels:
        raise ValueError(
            f"the examples have {classes} classes and the model predicts {model.config.num_labels} (1: a number); give "
            "the examples that it was fine-tuned on"
        )
    tokenised = partial(
        Sentences,
        tokenizer=tokenizer,
        max_length=most_tokens(model.config, config.length),
        token_types=getattr(model.config, "type_vocab_size", 1) > 1,
    )
    return ExampleSource(
        tokenised(drawn(rows, config.examples, config.seed)),
        tokenised(drawn(held_out, config.eval_examples, 0)),
        int(tokenizer.pad_token_id),
        batch_tokens=config.batch_tokens,
        calibration_tokens=config.calibration_tokens,
        passages=config.eval_passages,
        seed=config.seed,
    )


def split_documents(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Documents to learn from and others to measure on, by a hash of their text; of a single one, its last tenth."""
    ranked = sorted(set(documents), key=hashed_share)  # equal documents are on the same side
    if len(ranked) == 1:
        cut = max(1, len(ranked[0]) * 9 // 10)
        return [ranked[0][:cut]], [ranked[0][cut:]]
    chosen = set(ranked[: max(1, round(HELD_OUT * len(ranked)))])
    return [x for x in documents if x not in chosen], [x for x in documents if x in chosen]


def split_images(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images to learn from and others to measure on, both in the order of a hash: files are often sorted by class."""
    hashes = [digest([image.numpy().tobytes()]) for image in images]
    ranked = sorted(set(hashes))  # equal images are on the same side
    chosen = set(ranked[: max(1, round(HELD_OUT * len(ranked)))])
    order = sorted(range(len(images)), key=hashes.__getitem__)
    learned, measured = ([i for i in order if (hashes[i] in chosen) == side] for side in (False, True))
    return images[learned], images[measured]
