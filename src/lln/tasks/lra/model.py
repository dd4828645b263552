"""The small encoder of the Skyformer comparison, which the paper's tables 4 and 5 are made with, for any mechanism.

Two layers, 64 wide, two heads of 32, 128 in the feed-forward, learned positions, layer norm before each block and at
the end, the mean over the tokens, and a perceptron on it; two documents x and y go through the same encoder, and the
perceptron gets [x, y, x y, x - y]. Not as there: the mean is over the kept tokens (there padding counts as zeros), and
no mechanism drops attention weights (there softmax attention does, at 0.1).

`Shape(standardise=True)` is ours, for short trainings: documents share most of the mean over their tokens, and the
rest, in which they differ, is too little for the perceptron to find in a few hundred steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lln import zoo
from lln.tasks.lra.examples import PADDING
from lln.tasks.lra.task import Task

INIT_STD = 0.02  # of embeddings
SIMILAR = 0.8  # rows are encoded together with a longest one if they have at least this share of its length


@dataclass(frozen=True)
class Shape:
    """The size of the encoder and what it has; the defaults are those of the comparison."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    feedforward: int = 128
    dropout: float = 0.1
    standardise: bool = False  # each feature of the mean over the tokens, by its moments over the training examples


def build_attention(name: str, *, shape: Shape, max_len: int, **options: Any) -> zoo.Mechanism:
    """A mechanism of the zoo, or `softmax_explicit`, which holds the whole matrix as the paper's baseline does."""
    sizes = {"num_heads": shape.heads, "head_dim": shape.width // shape.heads, "max_len": max_len}
    if name == ExplicitSoftmax.name:
        return ExplicitSoftmax(**sizes, **options)
    return zoo.build(name, **sizes, **options)


class ExplicitSoftmax(zoo.PeerMechanism):
    """Softmax attention with its N x N matrix in memory, as it was before torch had a fused form."""

    name = "softmax_explicit"
    description = zoo.describe("softmax")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        assert not is_causal, "the encoder attends to all tokens"
        scores = query @ key.mT * self.head_dim**-0.5
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, :], torch.finfo(scores.dtype).min)
        return torch.softmax(scores, dim=-1) @ value


class Layer(nn.Module):
    def __init__(self, attention: zoo.Mechanism, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.attention = attention
        self.dropout = nn.Dropout(shape.dropout)
        self.feedforward = nn.Sequential(
            nn.Linear(width, shape.feedforward),
            nn.GELU(),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.feedforward, width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        normed, heads = self.norm_attention(x), (*x.shape[:2], self.heads, -1)
        query, key, value = (
            project(normed).view(heads).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        mixed = self.attention(query, key, value, key_padding_mask=keep)
        x = x + self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.feedforward(self.norm_feedforward(x))
        return out


class Classifier(nn.Module):
    """Tokens (B, towers, N), 0 for padding, to a loss and logits (B, classes)."""

    def __init__(
        self, task: Task, attention: str, *, options: Mapping[str, Any] | None = None, shape: Shape | None = None
    ) -> None:
        super().__init__()
        shape = shape or Shape()
        if shape.width % shape.heads:
            raise ValueError(f"a width of {shape.width} does not divide into {shape.heads} heads")
        self.task = task
        self.embedding = nn.Embedding(task.vocabulary, shape.width)
        self.positions = nn.Embedding(task.length, shape.width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=INIT_STD)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(
            Layer(build_attention(attention, shape=shape, max_len=task.length, **(options or {})), shape)
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.standard = nn.BatchNorm1d(shape.width, affine=False) if shape.standardise else nn.Identity()
        self.head = nn.Sequential(
            nn.Linear(shape.width * (1 if task.towers == 1 else 4), shape.feedforward),
            nn.ReLU(),
            nn.Linear(shape.feedforward, task.classes),
        )

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if tokens.shape[1] != self.task.towers or tokens.shape[2] > self.task.length:
            raise ValueError(
                f"{self.task.name} takes tokens (batch, {self.task.towers}, at most {self.task.length}), "
                f"got {tuple(tokens.shape)}"
            )
        pooled = self.standard(self.pool(tokens.flatten(0, 1))).view(*tokens.shape[:2], -1)
        features = pooled[:, 0]
        if self.task.towers == 2:
            x, y = pooled.unbind(1)
            features = torch.cat((x, y, x * y, x - y), dim=-1)
        logits = self.head(features)
        outputs = {"logits": logits}
        if labels is not None:
            outputs["loss"] = cross_entropy(logits, labels)
        return outputs

    def pool(self, tokens: Tensor) -> Tensor:
        """The mean (B, width) over the kept tokens of each row of `tokens` (B, N).

        Rows are encoded in groups of similar length, each no longer than its longest row: what is left out is padding,
        which no result depends on and would cost quadratic attention many times more.
        """
        keep = tokens != PADDING
        if bool(keep.all()):
            return self.encode(tokens, None).mean(dim=1)
        lengths = keep.sum(dim=1)
        order = lengths.argsort(descending=True)
        means = []
        for rows in torch.split(order, _similar(lengths[order].tolist())):
            longest = max(1, int(lengths[rows[0]]))
            kept = keep[rows, :longest]
            states = self.encode(tokens[rows, :longest], kept).masked_fill(~kept[..., None], 0.0)
            means.append(states.sum(dim=1) / lengths[rows].clamp(min=1)[:, None])
        return torch.cat(means)[order.argsort()]

    def encode(self, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """States (B, N, width)."""
        states = self.dropout(self.embedding(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            states = layer(states, keep)
        out: Tensor = self.norm(states)
        return out


def _similar(lengths: Sequence[int]) -> list[int]:
    """The sizes of groups of similar `lengths`, which are in descending order."""
    sizes: list[int] = []
    longest = 0
    for length in lengths:
        if sizes and length >= SIMILAR * longest:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = length
    return sizes
