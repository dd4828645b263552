"""`lln docs`: the pages of the documentation that hold what is made from results."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lln.cli.options import Results
from lln.terminal import console

PAGES = ("results.md", "speed.md", "long-range-arena.md", "zoo.md", "linearize.md")


def add_commands(app: typer.Typer) -> None:
    app.command("docs")(make_docs)


def make_docs(
    docs: Annotated[Path, typer.Argument(help="Folder with the pages.")] = Path("docs"),
    results: Results = Path("results"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing, and fail if a page is stale.")] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Also draw all pictures of recorded runs and measurements.")
    ] = False,
) -> None:
    """Bring all tables in the documentation up to date with the result files."""
    pages = rendered_pages(docs, results)
    stale = [path for path, new in pages.items() if path.read_text(encoding="utf-8") != new]
    if check:
        if stale:
            raise ValueError(f"stale: {', '.join(map(str, stale))}; `lln docs` makes them anew")
        return
    for path, new in pages.items():
        path.write_text(new, encoding="utf-8")
    if pictures:
        for path in draw_pictures(docs / "images", results):
            console.print(str(path))
    console.print(f"{len(PAGES)} pages, {len(stale)} of them changed")


def rendered_pages(docs: Path, results: Path) -> dict[Path, str]:
    """The pages as they are when they are up to date."""
    from lln.report.page import update

    return {docs / name: update((docs / name).read_text(encoding="utf-8"), parts(results)) for name in PAGES}


def parts(results: Path) -> dict[str, Callable[[str], str]]:
    """What pages may hold, by name: every table, the measurements of speed, and the list of mechanisms."""
    from lln import paper
    from lln.paper import speed
    from lln.zoo import table as zoo_table

    def table(name: str, file: str) -> str:
        return str(paper.load(name).make(results, file).markdown())

    made: dict[str, Callable[[str], str]] = {name: partial(table, name) for name in paper.tables()}
    return made | {"speed": lambda file: speed.make(results), "zoo": lambda file: zoo_table.markdown()}


def draw_pictures(folder: Path, results: Path) -> list[Path]:
    """Draw figures of recorded runs, and measurements of speed, as PNG into the folder."""
    from shutil import copy
    from tempfile import TemporaryDirectory

    from lln import paper
    from lln.paper import table2
    from lln.report.speed_pictures import draw_attention, draw_decode
    from lln.results import read_results

    with TemporaryDirectory() as scratch:
        work = Path(scratch)
        drawn = [
            paper.figure(name, out=work, results=results)
            for name in paper.NAMES
            if name.startswith("figure") and hasattr(paper.load(name), "read")
        ]
        for file, draw in (("attention", draw_attention), ("decode", draw_decode), ("table2", table2.draw)):
            found = read_results(results / f"{file}.jsonl", made_by="lln bench")
            drawn += [draw(result, work) for result in found.values()]
        return [Path(copy(path, folder / path.name)) for path, *_ in drawn]
