"""The tables of a page, made from recorded results: `python -m lln.report.page docs/results.md results`.

A page says `<!-- table 1: begin -->` and `<!-- table 1: end -->` where it wants a table; what is between is replaced.
`<!-- table 1 of FOLDER: begin -->` makes it from what is recorded in a folder of the results.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import cast

from lln.report.tables import NAMES, TableModule

MARKS = re.compile(
    r"<!-- table (?P<which>(?P<name>\w+)(?: of (?P<folder>[\w-]+))?): begin -->\n.*?<!-- table (?P=which): end -->",
    re.DOTALL,
)


def update(text: str, results: Path) -> str:
    """`text` with the tables between its marks made anew."""
    if not MARKS.search(text):
        raise ValueError("the page has no place for a table: <!-- table 1: begin --> and <!-- table 1: end -->")
    return MARKS.sub(lambda found: _filled(found, results), text)


def _filled(mark: re.Match[str], results: Path) -> str:
    which, name, folder = mark["which"], mark["name"], results / (mark["folder"] or "")
    if name not in NAMES:
        raise ValueError(f"there is no table {name}; there are: {', '.join(NAMES)}")
    made = cast(TableModule, import_module(f"lln.report.table_{name}")).make(folder)
    return f"<!-- table {which}: begin -->\n\n{made.markdown()}\n<!-- table {which}: end -->"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(update(page.read_text(encoding="utf-8"), Path(sys.argv[2])), encoding="utf-8")
