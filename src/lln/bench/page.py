"""The tables of docs/speed.md, made from recorded results: `python -m lln.bench.page docs/speed.md results`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lln.bench.goals import ATTENTION_GOALS, DECODE_GOALS, check, grid_of
from lln.bench.record import load
from lln.bench.table_2 import table_2_grids
from lln.bench.tables import attention_grids, decode_grids
from lln.report.tables import Table

BEGIN, END = "<!-- tables: begin, made by python -m lln.bench.page docs/speed.md results -->", "<!-- tables: end -->"


def markdown(results: Path) -> str:
    """All records of a folder that there are, each with its machine, commit and command."""
    parts = []
    if (record := _load(results / "attention.json")) is not None:
        parts.append(_part("Attention, float32", record, attention_grids(record)))
    for stem, title in (
        ("attention-causal", "Causal attention, float32"),
        ("attention-bfloat16", "Attention, bfloat16"),
    ):
        if (record := _load(results / f"{stem}.json")) is not None:
            shown = [grid for grid in attention_grids(record) if "median time" in grid.title or "SDPA" in grid.title]
            parts.append(_part(title, record, shown))
    if (record := _load(results / "decode.json")) is not None:
        parts.append(_part("One more token", record, decode_grids(record)))
    if (record := _load(results / "model.json")) is not None:
        parts.append(_part("Table 2: a training step of RoBERTa-base", record, table_2_grids(record)))
    goals = goals_grid(results)
    if goals.rows:
        parts.insert(0, f"### Goals\n\n{goals.markdown()}")
    return "\n".join(parts) or "Nothing has been measured yet.\n"


def goals_grid(results: Path) -> Table:
    """Every goal of the library, with what was measured."""
    rows = []
    for stem, goals in (("attention", ATTENTION_GOALS), ("decode", DECODE_GOALS)):
        if (record := _load(results / f"{stem}.json")) is not None:
            _, *more = grid_of(check(goals, record))
            rows += more
    return Table("Two threads, float32, batch 1, 12 heads of 64", ["goal", "measured", ""], rows)


def update(text: str, results: Path) -> str:
    """`text` with what is between its two marks made anew."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the text must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{markdown(results)}\n{END}{after}"


def _part(title: str, record: Mapping[str, Any], grids: list[Table]) -> str:
    machine = f"{record['machine']['processor']}, {record['threads']} threads, torch {record['torch']}"
    kernel = record["kernel"].get("explained") or "no compiled kernel"
    head = f"`{record['command']}` on {machine}, commit {record['commit']}; {kernel}."
    noisy = "" if all(run["quiet"] for run in record["noise"]) else " Other programs were running: times are too long."
    return f"### {title}\n\n{head}{noisy}\n\n" + "\n".join(grid.markdown() for grid in grids)


def _load(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    record = load(path)
    if "setting" not in record:
        raise ValueError(f"{path} was recorded by an older version; measure it anew with lln bench --fresh")
    return record


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(update(page.read_text(encoding="utf-8"), Path(sys.argv[2])), encoding="utf-8")
