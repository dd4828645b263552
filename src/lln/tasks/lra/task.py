"""What a task of the Long Range Arena is: sizes, presets, how its examples are had and shown.

A file of this folder defines one as `TASK`, and `lln.tasks.lra.registry` lists it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lln.tasks.lra.examples import SPLITS, Examples, Splits


@dataclass(frozen=True)
class Generator:
    """Examples that are made."""

    make: Callable[..., Examples]  # make(count, seed=..., workers=...), and dashes=... if there are any
    examples: int  # to train on, as published
    held_out: Callable[[int], int]  # validation and test examples each, for a number of training examples
    dashes: tuple[int, ...] = ()  # choices, the first by default (pathfinder)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the task is, how large it is as published, and where its examples come from.

    `read(folder)` returns the source, as results name it, and the splits. A task with both `read` and `generator` is
    read where the data folder has the folder `published`, and generated elsewhere.
    """

    name: str
    title: str  # as in the tables
    length: int  # of the longest input; longer ones are cut
    symbols: int
    classes: int
    about: str
    presets: Mapping[str, Mapping[str, Any]]  # for each preset what differs from task to task
    towers: int = 1  # sequences in an example
    read: Callable[[Path], tuple[str, Splits]] | None = None
    files: str = ""  # what `read` expects in the data folder
    published: str = ""
    generator: Generator | None = None
    answers: tuple[str, ...] = ()  # what the labels mean
    is_picture: bool = False  # 32 x 32 pixels
    decode: Callable[[NDArray[np.uint8]], str] = field(default=lambda x: bytes(x).decode("utf-8", "replace"))

    @property
    def vocabulary(self) -> int:
        """The number of tokens: the symbols and padding."""
        return self.symbols + 1


@dataclass(frozen=True)
class Data:
    """The splits of a task and where they come from, as results name it."""

    task: Task
    source: str
    splits: Splits

    def __post_init__(self) -> None:
        assert tuple(self.splits) == SPLITS
        for name, examples in self.splits.items():
            if not len(examples):
                raise ValueError(f"{self.task.name} ({self.source}) has no {name} examples")
            low, high = examples.labels.min(), examples.labels.max()
            if low < 0 or high >= self.task.classes:
                raise ValueError(
                    f"{self.task.name} ({self.source}) has {name} labels from {low} to {high}; "
                    f"expected 0 to {self.task.classes - 1}"
                )


def hold_out(train: Examples, test: Examples, count: int) -> Splits:
    """Splits in which the first `count` training examples, at most half of them, are for validation."""
    count = min(count, len(train) // 2)
    return {"train": train.part(count, len(train)), "valid": train.part(0, count), "test": test}
