"""What a linear model has kept of the model it was made from, on text that it has not learned from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import PreTrainedModel

from lln.instruments import entropy, spectral_gap
from lln.instruments.bias import bias
from lln.instruments.inspect import most_tokens
from lln.linearize.data import Batch, ExampleSource, Source, first_of
from lln.linearize.losses import attend, logits_loss
from lln.linearize.teacher import Observation, converted_modules, is_classifier, make_teacher, observing
from lln.mechanism import JoinedBranches, Mechanism
from lln.tasks.metrics import measure
from lln.terminal import Progress

UNLIMITED = 1 << 30  # tokens of a tokenizer that does not say how many a model takes
ABLATIONS = ("both", "far", "near", "none")
Pairs = Sequence[tuple[str, str, float]]  # two sentences, and how alike they are


@torch.no_grad()
def outputs(model: PreTrainedModel, batches: list[Batch]) -> tuple[Tensor, Tensor | None]:
    """The mean of the last hidden states of each passage, of length 1, (P, width), and a classifier's logits (P, C)."""
    embeddings, logits = [], []
    for batch in batches:
        found = model(**batch, output_hidden_states=True)
        embeddings.append(mean_embedding(found.hidden_states[-1].float(), batch.get("attention_mask")))
        if is_classifier(model):
            logits.append(found.logits.float())
    return torch.cat(embeddings), torch.cat(logits) if logits else None


def mean_embedding(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of hidden states (B, N, width) over the tokens that are no padding, of length 1."""
    if mask is None:
        return normalize(hidden.mean(dim=1), dim=-1)
    real = mask[..., None].to(hidden.dtype)
    return normalize((hidden * real).sum(dim=1) / real.sum(dim=1), dim=-1)


@torch.no_grad()
def language_loss(model: PreTrainedModel, batches: list[Batch]) -> float:
    """The mean cross entropy of the next token, in nats."""
    total, count = 0.0, 0
    for batch in batches:
        tokens = batch["input_ids"]
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        total += float(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
        count += tokens[:, 1:].numel()
    return total / count


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of two vectors; equal values share their ranks."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    return float(spearmanr(x.numpy(), y.numpy()).statistic)


def similarities(x: Tensor) -> Tensor:
    """The cosines of all pairs of different rows."""
    index = torch.triu_indices(len(x), len(x), offset=1)
    cosines: Tensor = (x @ x.mT)[index[0], index[1]]
    return cosines


@torch.no_grad()
def pair_correlation(
    model: PreTrainedModel, tokenizer: Any, pairs: Pairs, batch: int = 32, *, quiet: bool = False
) -> float:
    """Spearman's correlation of the scores of pairs of sentences with the cosines of their mean embeddings."""
    cosines = []
    longest = most_tokens(model.config, min(tokenizer.model_max_length, UNLIMITED))
    with Progress("pairs of sentences", len(pairs), quiet=quiet) as bar:
        for start in range(0, len(pairs), batch):
            some = pairs[start : start + batch]
            found = []
            for side in (0, 1):
                texts = [pair[side] for pair in some]
                given = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
                hidden = model(**given, output_hidden_states=True).hidden_states[-1]
                found.append(mean_embedding(hidden, given["attention_mask"]))
            cosines.append((found[0] * found[1]).sum(dim=-1))
            bar.advance(len(some))
    return rank_correlation(torch.cat(cosines), torch.tensor([pair[2] for pair in pairs]))


class Kept:
    """Compares students with the teacher at each length; what the teacher gives is computed once."""

    def __init__(self, teacher: PreTrainedModel, source: Source, *, is_language_model: bool) -> None:
        self.teacher, self.source, self.is_language_model = teacher, source, is_language_model
        self._wanted: dict[int, Any] = {}

    def measure(self, student: PreTrainedModel, lengths: tuple[int, ...] | None = None) -> list[dict[str, float]]:
        """A row for each length: cosine and rank correlation (encoders), or losses and perplexities (decoders)."""
        student.train(False)
        return [self._row(student, length) for length in lengths or self.source.lengths]

    def _row(self, student: PreTrainedModel, length: int) -> dict[str, float]:
        batches = self.source.held_out(length)
        ours: Any = language_loss if self.is_language_model else outputs
        if length not in self._wanted:
            self._wanted[length] = ours(self.teacher, batches)
        wanted, found = self._wanted[length], ours(student, batches)
        row: dict[str, float] = {"length": length, "passages": sum(len(next(iter(x.values()))) for x in batches)}
        if self.is_language_model:
            return row | {
                "softmax_loss": wanted,
                "loss": found,
                "softmax_perplexity": _exp(wanted),
                "perplexity": _exp(found),
                "perplexity_ratio": _exp(found - wanted),
            }
        row["cosine"] = float((wanted[0] * found[0]).sum(dim=-1).mean())
        if len(wanted[0]) > 2:
            row["rank_correlation"] = rank_correlation(similarities(wanted[0]), similarities(found[0]))
        if wanted[1] is not None:
            row["divergence"] = float(logits_loss(found[1], wanted[1]))
        return row


@torch.no_grad()
def label_scores(model: PreTrainedModel, source: ExampleSource, what: str, *, quiet: bool = False) -> dict[str, float]:
    """The metrics of a classifier on the labels of all held-out examples.

    In float32 however it was trained: two attentions that are equal but for rounding predict other classes for some
    examples in bfloat16.
    """
    logits, labels = [], []
    with Progress(what, source.held_out_examples, quiet=quiet) as bar:
        for batch in source.labelled():
            labels.append(batch.pop("labels"))
            logits.append(model(**batch).logits.float())
            bar.advance(len(labels[-1]))
    predicted, wanted = torch.cat(logits), torch.cat(labels)
    if predicted.shape[1] == 1:
        names = ["spearman", "pearson"]
    else:
        names = ["accuracy"] if predicted.shape[1] > 2 else ["accuracy", "f1", "matthews"]
    return measure(names, predicted.numpy(), wanted.numpy())


def _exp(x: float) -> float:
    """Infinity where math.exp would raise."""
    return float(torch.tensor(x, dtype=torch.float64).exp())


@contextmanager
def ablated(model: PreTrainedModel, branches: str) -> Iterator[None]:
    """While it lasts, all layers have both branches, the far or the near one alone, or none: an output of zeros."""
    mechanisms = [x.mechanism for x in converted_modules(model).values()]
    hooks = []
    try:
        for mechanism in mechanisms:
            if branches == "none":
                hooks.append(mechanism.register_forward_hook(lambda _, inputs, output: torch.zeros_like(output)))
            elif isinstance(mechanism, JoinedBranches):
                mechanism.branches = branches  # type: ignore[assignment]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for mechanism in mechanisms:
            if isinstance(mechanism, JoinedBranches):
                mechanism.branches = "both"


def ablation(kept: Kept, student: PreTrainedModel) -> list[dict[str, Any]]:
    """What is kept at the greatest length with both branches, one of them, or none."""
    has_near = any(isinstance(x.mechanism, JoinedBranches) for x in converted_modules(student).values())
    found = []
    for branches in ABLATIONS if has_near else ("both", "none"):
        with ablated(student, branches):
            [row] = kept.measure(student, kept.source.lengths[-1:])
        found.append({"branches": branches if has_near or branches == "none" else "far"} | row)
    return found


@torch.no_grad()
def head_table(teacher: PreTrainedModel, student: PreTrainedModel, batch: Batch) -> list[dict[str, Any]]:
    """Temperature, entropy, gap and bias of each head before and after, on what the teacher's layers see.

    An attention is linear in its values, so its matrix is what it makes of the identity. Rows of a mechanism without
    such a matrix say what was before alone.
    """
    with observing(teacher) as found:
        teacher(**first_of(batch))
    rows: list[dict[str, Any]] = []
    modules = {"before": converted_modules(teacher), "after": converted_modules(student)}
    for layer, (name, [seen]) in enumerate(found.items()):
        heads: list[dict[str, Any]] = [{"layer": layer, "head": head} for head in range(seen.query.shape[1])]
        for when, by_name in modules.items():
            for row, numbers in zip(heads, _numbers_of_heads(by_name[name].mechanism, seen), strict=False):
                row |= {f"{what}_{when}": x for what, x in numbers.items()}
        rows += heads
    return rows


def _numbers_of_heads(mechanism: Mechanism, seen: Observation) -> list[dict[str, float]]:
    """None where a mechanism has no attention matrix: its weights have signs, or it mixes the features of values."""
    tokens = seen.key.shape[2]
    identity = torch.eye(tokens).expand(1, seen.key.shape[1], tokens, tokens)
    try:
        matrices = attend(mechanism, seen._replace(value=identity))[0]
        return [head_numbers(matrix, seen.is_causal) for matrix in matrices]
    except ValueError:
        return []


def head_numbers(matrix: Tensor, is_causal: bool) -> dict[str, float]:
    logs = matrix.double().clamp(min=1e-30).log()
    allowed = torch.ones_like(matrix, dtype=torch.bool).tril() if is_causal else torch.ones_like(matrix).bool()
    spread = torch.stack([row[may].std(correction=0) for row, may in zip(logs, allowed, strict=True)][1:]).mean()
    return {
        "temperature": 1.0 / max(float(spread), 1e-9),
        "entropy": float(entropy(matrix[None, None]).mean()),
        "gap": float(spectral_gap(matrix[None, None]).mean()),
        "bias": float(bias(matrix[None, None]).mean()),
    }


__all__ = ["Kept", "ablated", "ablation", "head_table", "label_scores", "language_loss", "make_teacher", "outputs"]
