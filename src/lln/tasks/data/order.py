"""Chance that depends only on (seed, epoch, index), and epochs laid end to end.

The state of a global generator at some step depends on all that ran before. Here a draw depends on what it is for, so
a resumed run, or one spread over several processes, reads exactly the same examples in the same order.
"""

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

Order = np.ndarray[Any, np.dtype[np.int64]]


def draws(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one example in one epoch: a counter-based one, as that is the quickest to make."""
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, index, 0], dtype=np.uint64)))


class Examples(Protocol):
    def __len__(self) -> int: ...

    def example(self, index: int, epoch: int) -> Any:
        """Example `index` as it is in `epoch`: masked, augmented, or always the same."""


class Unrolled(torch.utils.data.Dataset[Any]):
    """`epochs` passes over the examples as one data set, each pass in an order of its own.

    Position p is example order(p // size)[p % size] in epoch p // size. Read it with a sequential sampler: order and
    chance are then functions of the position alone, and skipping the first k positions is all that resuming takes.
    """

    def __init__(self, examples: Examples, *, epochs: int, seed: int, lengths_alike: int = 0) -> None:
        """`lengths_alike` is the size of batches that shall hold examples of similar lengths; 0: any order."""
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {epochs}")
        self.examples = examples
        self.epochs = epochs
        self.seed = seed
        self._batch = lengths_alike
        # One order at a time is in use, two while an epoch ends.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return len(self.examples) * self.epochs

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of {len(self)}")
        epoch, place = divmod(position, len(self.examples))
        return self.examples.example(int(self._order(epoch)[place]), epoch)

    def _shuffle(self, epoch: int) -> Order:
        size = len(self.examples)
        chance = draws(self.seed, epoch, size)  # `size` is no example's index
        order = chance.permutation(size)
        return order if not self._batch else _alike(order, self.examples, self._batch, chance)


class Shared(torch.utils.data.Dataset[Any]):
    """Batches that several processes share: each of `batch_size` positions comes `sharers` times in a row.

    accelerate deals batches out to processes in turn, so that processes beside each other get the same.
    """

    def __init__(self, data: Unrolled, *, batch_size: int, sharers: int) -> None:
        self.data, self.batch_size, self.sharers = data, batch_size, sharers

    def __len__(self) -> int:
        return len(self.data) // self.batch_size * self.batch_size * self.sharers

    def __getitem__(self, position: int) -> Any:
        batch, place = divmod(position, self.batch_size)
        return self.data[batch // self.sharers * self.batch_size + place]


def _alike(order: Order, examples: Any, batch: int, chance: np.random.Generator) -> Order:
    """An order in which batches hold examples of similar lengths: less padding.

    Examples are sorted in groups of fifty batches, and the batches are shuffled; one that is not full stays last.
    """
    lengths = np.asarray(examples.lengths)
    group = 50 * batch
    parts = [order[start : start + group] for start in range(0, len(order), group)]
    ordered = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
    full = len(ordered) // batch * batch
    batches = ordered[:full].reshape(-1, batch)
    return np.concatenate([batches[chance.permutation(len(batches))].reshape(-1), ordered[full:]])
