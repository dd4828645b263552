"""Masked language modelling: RoBERTa pre-trained from nothing, with any attention (the paper's figures 1 and 8)."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, RobertaConfig
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention

from lln.hf import convert
from lln.hf.convert import PLAIN
from lln.tasks.config import check_attention
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.masking import IGNORED, MaskedDataset
from lln.tasks.data.text import default_source, read_documents
from lln.tasks.data.tokenizer import load_tokenizer, pack
from lln.tasks.evaluation import Batch, Scores
from lln.tasks.presets import MlmConfig
from lln.tasks.run import open_run, processes
from lln.tasks.trainer import Summary, fit

__all__ = ["MlmConfig", "RobertaForMaskedLM", "build_model", "roberta_config", "scores", "start_local", "train"]


class RobertaForMaskedLM(transformers.RobertaForMaskedLM):  # type: ignore[no-untyped-call]
    """The same model, name and weights; with labels it computes logits of the labelled positions alone.

    The vocabulary makes the last layer the most expensive one, and six of seven positions have no label.
    `logits` is then (labels, vocabulary).

    `seq_idx` (batch, tokens), the number of each token's document, keeps documents apart. Converted models do so by
    themselves; the attention of transformers gets a mask for pairs of tokens.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if seq_idx is not None and self.config._attn_implementation in PLAIN:
            attention_mask = (seq_idx[:, :, None] == seq_idx[:, None, :])[:, None]
        elif seq_idx is not None:
            kwargs["seq_idx"] = seq_idx
        if labels is None:
            return super().forward(input_ids, attention_mask, **kwargs)
        hidden = self.roberta(input_ids, attention_mask, **kwargs)[0]
        labelled = labels != IGNORED
        logits = self.lm_head(hidden[labelled])
        total = cross_entropy(logits.float(), labels[labelled], reduction="sum")
        count = labelled.sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


def scores(outputs: Mapping[str, Tensor], batch: Batch) -> Scores:
    labels = batch["labels"][batch["labels"] != IGNORED]
    correct = (outputs["logits"].argmax(dim=-1) == labels).sum()
    return {"loss": (float(outputs["loss"]) * len(labels), len(labels)), "accuracy": (float(correct), len(labels))}


def roberta_config(config: MlmConfig, tokenizer: PreTrainedTokenizerFast) -> RobertaConfig:
    return RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feedforward,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        initializer_range=config.initial_std,
        max_position_embeddings=config.length + 2,  # RoBERTa counts from 2
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def build_model(config: MlmConfig, tokenizer: PreTrainedTokenizerFast) -> RobertaForMaskedLM:
    torch.manual_seed(config.seed)
    model = RobertaForMaskedLM(roberta_config(config, tokenizer))  # type: ignore[no-untyped-call]
    if config.local_start:
        start_local(model, config.local_start)
    return convert(model, config.attention, **config.options)


@torch.no_grad()
def start_local(model: RobertaForMaskedLM, scale: float) -> None:
    """Let every token attend to its neighbours from the first step on.

    From a random start a model must learn which tokens are neighbours before anything else: for millions of tokens the
    loss stays that of a bag of words. With sinusoids for positions, and queries and
    keys that are nearly what they are made from, near positions have high scores (Trockman and Kolter: Mimetic
    Initialization of Self-Attention Layers). All of it is learned further.
    """
    embeddings = model.roberta.embeddings
    positions = embeddings.position_embeddings.weight
    count, width = positions.shape
    frequencies = 10_000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(count)[:, None] * frequencies
    sinusoids = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)  # of variance one half
    positions.copy_(sinusoids * 2**0.5 * scale * model.config.initializer_range)
    positions[embeddings.padding_idx] = 0
    for module in model.modules():
        if isinstance(module, RobertaSelfAttention):
            module.query.weight += torch.eye(width)
            module.key.weight += torch.eye(width)


def train(config: MlmConfig, *, out: Path | None = None, data_dir: Path | None = None, quiet: bool = False) -> Summary:
    """Pre-train, or continue to, or do nothing if the run is finished; returns its summary."""
    data = find_data(data_dir)
    if config.source == "auto":
        config = dataclasses.replace(config, source=default_source(data))
    sizes = {"heads": config.heads, "width": config.width, "tokens": config.length + 2}
    check_attention(config.attention, config.options, **sizes)
    with open_run("mlm", config, out, quiet=quiet) as run:
        if run.summary is not None:
            return run.summary
        with processes().main_process_first():  # the others find the cache filled
            read = partial(read_documents, config.source, data_dir=data)
            documents = read("train")
            tokenizer = load_tokenizer(config.tokenizer, lambda: documents, vocab_size=config.vocab_size, data_dir=data)
            cut = partial(pack, tokenizer=tokenizer, length=config.length, separate=config.pack)
            blocks, held_out = cut(documents), cut(read("validation"))
        if config.eval_examples is not None:
            held_out = held_out.select(range(min(config.eval_examples, len(held_out))))
        options: dict[str, Any] = {"probability": config.mask_probability, "separate": config.pack}
        mask: Any = partial(MaskedDataset, tokenizer=tokenizer, seed=config.seed, **options)
        return fit(
            build_model(config, tokenizer),
            run=run,
            config=config,
            train_data=mask(blocks),
            eval_data=mask(held_out),
            score=scores,
            processing=tokenizer,
            label=f"mlm {config.attention}",
            quiet=quiet,
            sequence_parallel=config.sequence_parallel,
        )
