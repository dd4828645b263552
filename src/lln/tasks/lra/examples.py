"""Examples of a task in memory, and the batches made from them.

An example is one sequence of symbols (two in retrieval) and a label. Symbols are bytes 0 to 255, held end to end in one
array; a batch holds symbol + 1, so that 0 is padding and nothing else.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = 0
SPLITS = ("train", "valid", "test")

Splits = Mapping[str, "Examples"]


@dataclass(frozen=True)
class Sequences:
    """Sequences of different lengths, end to end: the i-th is symbols[starts[i] : starts[i + 1]]."""

    symbols: NDArray[np.uint8]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Iterable[bytes], *, length: int) -> "Sequences":
        """Sequences of bytes, cut to `length`."""
        parts = [sequence[:length] for sequence in sequences]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), dtype=np.uint8), starts)

    @classmethod
    def rows(cls, matrix: NDArray[np.uint8]) -> "Sequences":
        """The rows of a matrix."""
        count, length = matrix.shape
        return cls(np.ascontiguousarray(matrix).reshape(-1), np.arange(count + 1, dtype=np.int64) * length)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return self.symbols[self.starts[index] : self.starts[index + 1]]

    def part(self, start: int, stop: int) -> "Sequences":
        starts = self.starts[start : stop + 1]
        return Sequences(self.symbols[starts[0] : starts[-1]], starts - starts[0])

    def take(self, indices: Iterable[int]) -> "Sequences":
        parts = [self[index] for index in indices]
        return Sequences(np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64))


@dataclass(frozen=True)
class Examples:
    """Inputs, one `Sequences` for each tower, and labels."""

    inputs: tuple[Sequences, ...]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert all(len(sequences) == len(self.labels) for sequences in self.inputs)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The longest input of each example: what it costs."""
        longest: NDArray[np.int64] = np.max([sequences.lengths for sequences in self.inputs], axis=0)
        return longest

    def part(self, start: int, stop: int) -> "Examples":
        return Examples(tuple(sequences.part(start, stop) for sequences in self.inputs), self.labels[start:stop])

    def by_length(self) -> "Examples":
        """The same, the longest first: batches of them hold hardly any padding.

        If they grew, none would fit into the pieces of memory that those before it had left, and a process would keep
        them all.
        """
        order = (-self.lengths).argsort(kind="stable")
        return Examples(tuple(sequences.take(order) for sequences in self.inputs), self.labels[order])

    def example(self, index: int, epoch: int = 0) -> dict[str, Any]:
        """The inputs and the label of an example, the same in every epoch."""
        inputs = {f"input_{tower}": sequences[index] for tower, sequences in enumerate(self.inputs)}
        return {**inputs, "labels": int(self.labels[index])}

    def batch(self, indices: Iterable[int]) -> dict[str, Tensor]:
        return collate([self.example(index) for index in indices])


def collate(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """`tokens` (B, towers, N), padded with 0 to the longest of them, and `labels` (B)."""
    rows = [[value for name, value in example.items() if name != "labels"] for example in examples]
    longest = max(1, max(len(symbols) for row in rows for symbols in row))
    tokens = np.full((len(rows), len(rows[0]), longest), PADDING, dtype=np.int64)
    for into, row in zip(tokens, rows, strict=True):
        for tower, symbols in zip(into, row, strict=True):
            tower[: len(symbols)] = symbols
            tower[: len(symbols)] += 1
    return {"tokens": torch.from_numpy(tokens), "labels": torch.tensor([example["labels"] for example in examples])}
