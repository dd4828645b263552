"""A progress bar for long work on data, on standard error and only when somebody can see it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Advance(Protocol):
    def __call__(self, steps: float = 1) -> None: ...


@contextmanager
def progress(label: str, total: float) -> Iterator[Advance]:
    """Hands out the function that moves the bar by a number of steps."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=total)
        yield lambda steps=1: bar.advance(task, steps)
