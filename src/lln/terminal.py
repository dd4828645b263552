"""Terminal output of everything that prints: one console, one table printer, one progress bar.

Much of what is printed is not ours: paths, options, names of models, contents of files, exceptions. So text is printed
as it is, without reading markup or emoji codes in it, and without breaking a line, so that a path can be copied.
Results go to standard output; progress and errors go to standard error.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table as RichTable
from rich.text import Text

FILE_WIDTH = 400  # of what is written to a file or a pipe, where nothing has to break a table
COLORS = {"met": "green", "missed": "red"}  # of cells that hold nothing but this


class TableLike(Protocol):
    """What can be printed; `lln.report.table.Table` is one."""

    @property
    def title(self) -> str: ...
    @property
    def columns(self) -> Sequence[str]: ...
    @property
    def rows(self) -> Sequence[Sequence[str]]: ...
    @property
    def notes(self) -> Sequence[str]: ...


def plain_console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True, width=width)


console, errors = plain_console(), plain_console(stderr=True)


def print_error(message: object) -> None:
    errors.print(Text.assemble(("Error:", "red"), f" {message}"))


def print_table(table: TableLike, *, as_json: bool = False) -> None:
    """Print a table: the first column to the left, the others to the right, the notes below.

    Args:
        table: the table.
        as_json: print one line of JSON instead, an object with `title`, `columns`, `rows` and `notes`.

    Example:
        >>> from lln.report.table import Table
        >>> print_table(Table("Title", ["name", "ms"], [["lln", "1.5"]]), as_json=True)
        {"title": "Title", "columns": ["name", "ms"], "rows": [["lln", "1.5"]], "notes": []}
    """
    if as_json:
        content = {"title": table.title, "columns": list(table.columns), "rows": [list(row) for row in table.rows]}
        console.print(json.dumps(content | {"notes": list(table.notes)}))
        return
    shown = RichTable(title=table.title, title_justify="left")
    for number, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell, COLORS.get(cell, "")) for cell in row))
    console.print(shown)
    for note in table.notes:
        console.print(note, soft_wrap=False)


def print_tables(tables: Iterable[TableLike], *, as_json: bool = False) -> None:
    for table in tables:
        print_table(table, as_json=as_json)


class Progress:
    """A bar with the time left, on standard error; nothing where that is not a terminal, or if `quiet`.

    Example:
        >>> with Progress("tokenising", total=2) as bar:
        ...     bar.advance()
        ...     bar.update(2, "almost done")
    """

    def __init__(self, label: str, total: float, *, completed: int = 0, quiet: bool = False) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        target = plain_console(stderr=True)
        self.is_shown = target.is_terminal and not quiet
        self._bar = RichProgress(*columns, console=target, transient=True, disable=not self.is_shown)
        self._task = self._bar.add_task(label, total=total, completed=completed, text="")

    def advance(self, steps: float = 1) -> None:
        self._bar.advance(self._task, steps)

    def update(self, completed: float | None = None, text: str | None = None) -> None:
        """Set how much is done and the text beside the bar; None leaves either as it is."""
        self._bar.update(self._task, completed=completed)
        if text is not None:
            self._bar.update(self._task, text=text)

    def print(self, message: str) -> None:
        """Print a line above the bar, or on standard error where there is none."""
        self._bar.console.print(message)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        sys.stderr.flush()
