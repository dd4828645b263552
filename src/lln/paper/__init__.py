"""The paper's tables and figures, and three tables of our own: one module each, with the published numbers beside ours.

The attributes of a module define what it is:

    make(results, file)             a table, from what is recorded in the folder `results`
    read(results), draw(...)        a figure of recorded runs
    count, measure, draw            a figure that is measured when it is requested
    JOBS                            the runs behind it, which `lln reproduce NAME` starts
    MADE_BY                         of a table that is measured and not trained: the command that does

A new one is a module of this folder and its name in `NAMES`.
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lln.provenance import commit
from lln.report.plot import Row, Setup, save, style
from lln.report.table import Table

NAMES = (
    "table1",
    "table2",
    "table3",
    "table4",
    "table5",
    "mlm",
    "ablation",
    "linearized",
    "figure1",
    "figure2",
    "figure5",
    "figure6",
    "figure7",
    "figure8",
    "figure9",
    "figure10",
)
# Matrices are explicit: at 4096 tokens one of them takes 128 MB, and below 16 there is nothing to take statistics of.
TOKENS, HEAD_DIMS = (16, 4096), (4, 1024)


def load(name: str) -> Any:
    """The module of a table or figure.

    Args:
        name: one of `NAMES`.

    Returns:
        The module, see above.

    Raises:
        ValueError: there is no such table or figure.

    Example:
        >>> load("table5").JOBS[0].name
        'text-softmax-seed0'
    """
    if name not in NAMES:
        raise ValueError(f"there is no {name!r}; there are: {', '.join(NAMES)}")
    return import_module(f"lln.paper.{name}")


def tables() -> list[str]:
    """The names of what is a table.

    Returns:
        Names, in the order of `NAMES`.

    Example:
        >>> "table1" in tables()
        True
    """
    return [name for name in NAMES if hasattr(load(name), "make")]


def table(
    name: str, *, out: str | os.PathLike[str], results: str | os.PathLike[str] = "results"
) -> tuple[Table, Path, Path]:
    """Make a table from recorded results.

    Args:
        name: one of `tables()`.
        out: the folder for NAME.md and NAME.png, which is made.
        results: the folder with result files.

    Returns:
        The table, and the two files.

    Raises:
        ValueError: there is no such table, or no result file for it.

    Example:
        >>> print(table("table3", out="tables")[0].markdown())  # doctest: +SKIP
    """
    module, folder, out = load(name), _results(results), _folder(out)
    if not hasattr(module, "make"):
        raise ValueError(f"{name} is a figure; tables are: {', '.join(tables())}")
    made: Table = module.make(folder)
    out.mkdir(parents=True, exist_ok=True)
    markdown, picture = out / f"{name}.md", out / f"{name}.png"
    markdown.write_text(made.markdown(), encoding="utf-8")
    made.picture(picture)
    return made, markdown, picture


def figure(
    name: str,
    *,
    out: str | os.PathLike[str],
    results: str | os.PathLike[str] = "results",
    head_dim: int = 64,
    tokens: int = 1024,
    seed: int = 0,
    on_step: Callable[[int, int], object] = lambda done, total: None,
) -> tuple[Path, Path, Path]:
    """Draw a figure. The same arguments give the same files, at one commit and on one machine.

    Args:
        name: one of `NAMES` that is no table.
        out: the folder for NAME.png, NAME.svg and NAME.csv, which is made.
        results: the folder with result files, for figures of recorded runs.
        head_dim: of figures that are measured, the head dimension.
        tokens: of figures that are measured, the number of queries and keys.
        seed: of figures that are measured, the seed of what is drawn at random.
        on_step: called as `on_step(done, total)` after each measurement.

    Returns:
        The three files.

    Raises:
        ValueError: there is no such figure, a number is out of range, or there are no results.

    Example:
        >>> figure("figure2", out="figures")  # doctest: +SKIP
        (PosixPath('figures/figure2.png'), PosixPath('figures/figure2.svg'), PosixPath('figures/figure2.csv'))
    """
    module, out = load(name), _folder(out)
    if hasattr(module, "make"):
        raise ValueError(f"{name} is a table; figures are: {', '.join(x for x in NAMES if x not in tables())}")
    for option, value, (low, high) in (
        ("tokens", tokens, TOKENS),
        ("head_dim", head_dim, HEAD_DIMS),
        ("seed", seed, (0, 2**31)),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{option} must be an int from {low} to {high}, got {value!r}")
    with style():  # first, so that a missing matplotlib is found out before anything is measured
        if hasattr(module, "read"):
            rows, origin = module.read(_results(results))
            drawn = module.draw(rows, f"lln show {name}  ·  {origin}")
        else:
            setup = Setup(name=name, head_dim=head_dim, tokens=tokens, seed=seed, commit=commit())
            rows = _measure(module, setup, on_step)
            drawn = module.draw(setup, rows)
        out.mkdir(parents=True, exist_ok=True)
        return save(drawn, rows, out, name)


def _measure(module: Any, setup: Setup, on_step: Callable[[int, int], object]) -> list[Row]:
    rows: list[Row] = []
    total = module.count(setup)
    for row in module.measure(setup):
        rows.append(row)
        on_step(len(rows), total)
    assert len(rows) == total, (len(rows), total)
    return rows


def _folder(out: str | os.PathLike[str]) -> Path:
    """Refuse what cannot become a folder, before anything is measured."""
    place = next(path for path in (Path(out), *Path(out).absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"out must be a folder, and {place} is a file; name the folder that it is in")
    return Path(out)


def _results(results: str | os.PathLike[str]) -> Path:
    if not Path(results).is_dir():
        raise ValueError(
            f"there is no folder {results} with results; make them with `lln reproduce`, or give --results"
        )
    return Path(results)
