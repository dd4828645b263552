"""The paper's figures, each as PNG, SVG and CSV: what `lln figure` calls.

Figures 2, 5, 6 and 7 are measured when asked for, 1, 8, 9 and 10 are drawn from recorded training runs.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lln.provenance import commit
from lln.report.plot import Row, Setup, save, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED, RECORDED = (2, 5, 6, 7), (1, 8, 9, 10)
# Matrices are explicit: at 4096 tokens one of them takes 128 MB, and below 16 there is nothing to take statistics of.
TOKENS, HEAD_DIMS = (16, 4096), (4, 1024)

OnStep = Callable[[int, int], None]


class MeasuredFigure(Protocol):
    """What a module `lln.report.figure_N` has that measures."""

    def count(self, setup: Setup) -> int: ...
    def measure(self, setup: Setup) -> Iterator[Row]: ...
    def draw(self, setup: Setup, rows: list[Row]) -> "Figure": ...


class RecordedFigure(Protocol):
    """What a module `lln.report.figure_N` has that shows recorded runs."""

    def read(self, results: Path) -> tuple[list[Row], str]: ...
    def draw(self, rows: list[Row], footer: str) -> "Figure": ...


def figure(
    number: int,
    *,
    out: str | os.PathLike[str],
    results: str | os.PathLike[str] = "results",
    head_dim: int = 64,
    tokens: int = 1024,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> tuple[Path, Path, Path]:
    """Draw a figure of the paper: `figure-N.png`, `.svg` and `.csv` in the directory `out`, which is made.

    Figures that are measured take `head_dim`, `tokens` and `seed`; the others read what `lln reproduce` left in
    `results`.

    The same arguments give the same files, at one commit and on one machine. `on_step(done, total)` is called after
    each measurement; without it a progress bar is shown if standard error is a terminal.
    """
    if number not in MEASURED + RECORDED or isinstance(number, bool):
        numbers = ", ".join(map(str, sorted(MEASURED + RECORDED)))
        raise ValueError(f"there is no figure {number!r}; number must be one of {numbers}")
    _check("tokens", tokens, *TOKENS)
    _check("head_dim", head_dim, *HEAD_DIMS)
    _check("seed", seed, 0, 2**31)
    directory = Path(out)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"out must be a directory, and {directory} is a file; name the directory that it is in")
    if number in RECORDED:
        return _recorded(number, directory, Path(results))
    setup = Setup(number=number, head_dim=head_dim, tokens=tokens, seed=seed, commit=commit())
    with style():  # first, so that a missing matplotlib is found out before anything is measured
        module = cast(MeasuredFigure, import_module(f"lln.report.figure_{number}"))
        directory.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        total = module.count(setup)
        with _progress(number, total) if on_step is None else _given(on_step) as step:
            for row in module.measure(setup):
                rows.append(row)
                step(len(rows), total)
        assert len(rows) == total, (len(rows), total)
        return save(module.draw(setup, rows), rows, directory, f"figure-{number}")


def _recorded(number: int, directory: Path, results: Path) -> tuple[Path, Path, Path]:
    if not results.is_dir():
        raise ValueError(
            f"there is no folder {results} with recorded runs; `lln reproduce` makes them, or say results="
        )
    with style():
        module = cast(RecordedFigure, import_module(f"lln.report.figure_{number}"))
        rows, origin = module.read(results)
        directory.mkdir(parents=True, exist_ok=True)
        drawn = module.draw(rows, f"lln figure {number}  ·  {origin}")
        return save(drawn, rows, directory, f"figure-{number}")


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an int from {low} to {high}, got {value!r}")


@contextmanager
def _given(on_step: OnStep) -> Iterator[OnStep]:
    yield on_step


@contextmanager
def _progress(number: int, total: int) -> Iterator[OnStep]:
    """A bar on standard error that vanishes when done, if somebody can see it and rich is there."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield lambda done, total: None
        return
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"figure {number}", total=total)
        yield lambda done, total: bar.update(task, completed=done)
