"""`lln docs`: the pages of the documentation that hold what is made from results."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.options import Results
from lln.terminal import console

# Relative to the folder of the documentation.
PAGES = (
    "results.md",
    "speed.md",
    "speed-tables.md",
    "developers.md",
    "gpu.md",
    "long-range-arena.md",
    "zoo.md",
    "linearize.md",
    "../README.md",
)
DRAWN = Path("images/drawn.csv")  # a digest of what each picture shows, which is drawn when it changes


def add_commands(app: typer.Typer) -> None:
    app.command("docs")(make_docs)


def make_docs(
    docs: Annotated[Path, typer.Argument(help="Folder with the pages.")] = Path("docs"),
    results: Results = Path("results"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing, and fail if a page is stale.")] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Draw all pictures of recorded results, not only those that changed.")
    ] = False,
) -> None:
    """Bring all tables and pictures in the documentation, and in the README, up to date with the result files."""
    pages = rendered_pages(docs, results)
    stale = [path for path, new in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != new]
    if check:
        if stale:
            raise ValueError(f"stale: {', '.join(map(str, stale))}; `lln docs` updates them")
        return
    (docs / "images").mkdir(exist_ok=True)
    drawn = {} if pictures else digests(docs / DRAWN)
    for picture in recorded_pictures(results):
        if drawn.get(picture.name) != picture.digest:
            console.print(str(picture.draw_into(docs / "images")))
    for path, new in pages.items():
        path.write_text(new, encoding="utf-8")
    console.print(f"{len(pages)} files, {len(stale)} of them changed")


def rendered_pages(docs: Path, results: Path) -> dict[Path, str]:
    """The pages, and what the pictures were drawn from, as they are when they are up to date."""
    from lln.report.page import update
    from lln.report.plot import Row, csv_text

    pages = {docs / name: update((docs / name).read_text(encoding="utf-8"), parts(results)) for name in PAGES}
    drawn: list[Row] = [{"picture": picture.name, "digest": picture.digest} for picture in recorded_pictures(results)]
    return pages | {docs / DRAWN: csv_text(drawn)}


def parts(results: Path) -> dict[str, Callable[[str], str]]:
    """What pages may hold, by name: every table, the measurements of speed, and the list of mechanisms."""
    from lln import paper
    from lln.paper import headline, speed
    from lln.zoo import table as zoo_table

    def table(name: str, file: str) -> str:
        return str(paper.load(name).make(results, file).markdown())

    made: dict[str, Callable[[str], str]] = {name: partial(table, name) for name in paper.tables()}
    return made | {
        "speed": lambda file: speed.make(results),
        "summary": lambda file: speed.summary(results),
        "goals": lambda file: speed.goals(results),
        "kernels": lambda file: speed.kernels(results),
        "headline": lambda file: headline.make(results).markdown(),
        "zoo": lambda file: zoo_table.markdown(),
    }


@dataclass(frozen=True)
class Picture:
    """A picture of recorded results."""

    name: str
    shown: Any  # numbers, and where they come from
    draw: Callable[[Path], tuple[Path, ...]]  # into a folder; the PNG is the first of the files

    @property
    def digest(self) -> str:
        return sha256(json.dumps(self.shown, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def draw_into(self, folder: Path) -> Path:
        """Only the PNG."""
        from shutil import copy
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as scratch:
            path, *_ = self.draw(Path(scratch))
            return Path(copy(path, folder / path.name))


def recorded_pictures(results: Path) -> Iterator[Picture]:
    """The picture of the README, figures of recorded runs, and measurements of speed."""
    from lln import paper
    from lln.paper import headline, table2
    from lln.report.plot import save_png
    from lln.report.speed_pictures import draw_attention, draw_decode
    from lln.results import read_results

    def draw_figure(name: str, folder: Path) -> tuple[Path, ...]:
        return paper.figure(name, out=folder, results=results)

    yield Picture(
        "headline",
        headline.picture_rows(results),
        lambda folder: (save_png(headline.draw(results), folder / "headline.png"),),
    )
    for name in paper.NAMES:
        if name.startswith("figure") and hasattr(module := paper.load(name), "read"):
            yield Picture(name, module.read(results), partial(draw_figure, name))
    for file, draw in (("attention", draw_attention), ("decode", draw_decode), ("table2", table2.draw)):
        for name, result in read_results(results / f"{file}.jsonl", made_by="lln bench").items():
            yield Picture(name, (result.rows, result.settings, result.origin), partial(draw, result))


def digests(path: Path) -> dict[str, str]:
    """What each picture was drawn from when it was drawn."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["picture"]: row["digest"] for row in csv.DictReader(file)}
