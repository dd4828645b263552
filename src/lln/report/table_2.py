"""Table 2: time and memory of a training step of RoBERTa-base, the published rows beside ours."""

from pathlib import Path

from lln.bench.record import load
from lln.bench.table_2 import table_2_grids
from lln.report.tables import Table

RECORD = "model.json"


def make(results: Path) -> Table:
    path = results / RECORD
    if not path.is_file():
        raise ValueError(f"{path} is missing; `lln bench model --out {path}` makes it")
    record = load(path)
    time, memory = table_2_grids(record)
    rows = [
        [f"{attention}, {quantity}", *rest]
        for quantity, part in zip(("time [s]", "memory [GB]"), (time, memory), strict=True)
        for attention, *rest in part.rows
    ]
    title = "Table 2: a training step of RoBERTa-base, batch 1, over the number of tokens; ~ predicted"
    return Table(title, ["", *time.columns[1:]], rows, (*memory.notes, f"commit {record['commit']}"))
