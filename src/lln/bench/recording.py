"""Measured rows with their origin in a result file that grows row by row: a run can be stopped and continued."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.bench.measure import noise
from lln.provenance import provenance
from lln.results import Result, Row, add_result, check_writable, read_results

# What must be the same for rows of two runs to stand in one line, and how to call it.
SAME = {
    "seed": "seed",
    "commit": "commit",
    "machine": "machine",
    "threads": "number of threads",
    "torch": "version of torch",
    "kernel": "kernel",
}


class Recording:
    """The rows of a run. Those with a `path` are written to that result file after each row that is added."""

    def __init__(
        self,
        path: Path | None,
        run: str,
        *,
        command: str,
        settings: Mapping[str, Any],
        seed: int = 0,
        kernel: Mapping[str, Any] | None = None,
        fresh: bool = False,
    ) -> None:
        """Continue the line of `run` in the file at `path`, or begin it.

        Args:
            path: the result file; None keeps the rows in memory.
            run: the name of the run in the file.
            command: what was requested.
            settings: what all rows have in common.
            seed: of what is drawn at random.
            kernel: what computes LLN attention here.
            fresh: begin the line again if there is one.

        Raises:
            ValueError: the line was measured with something else, so that rows from here cannot stand beside its own.
            OSError: the file cannot be written.

        Example:
            >>> recording = Recording(None, "decode", command="lln bench decode", settings={"heads": 12})
            >>> recording.add({"tokens": 1024, "milliseconds": 1.5})
        """
        self.path = path
        self.noise = noise()
        self.rows: list[Row] = []
        origin = provenance(seed=seed, command=command)
        origin |= {"kernel": dict(kernel)} if kernel else {}
        before: list[Any] = []
        if path is not None:
            check_writable(path)
            found = read_results(path, made_by=f"{command} --out {path}") if path.exists() else {}
            if run in found and not fresh:
                self._check_same(found[run], origin, settings)
                self.rows = list(found[run].rows)
                before = found[run].origin["noise"]
        self.result = Result(run, origin | {"noise": [*before, self.noise]}, settings, {}, {"rows": self.rows})

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def drop(self, rows: Sequence[Row]) -> None:
        """Take out rows that will be measured again."""
        self.rows[:] = [row for row in self.rows if row not in rows]

    def drop_incomplete(self, names: Sequence[str], *cell: str) -> None:
        """Keep only cells of which all mechanisms were measured, because they are measured side by side."""
        found: dict[tuple[Any, ...], set[str]] = {}
        for row in self.rows:
            found.setdefault(tuple(row[key] for key in cell), set()).add(row["mechanism"])
        self.drop([row for row in self.rows if not found[tuple(row[key] for key in cell)] >= set(names)])

    def write(self) -> None:
        if self.path is not None:
            add_result(self.path, self.result)

    def _check_same(self, before: Result, origin: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        pairs = [(what, before.origin.get(key), origin.get(key)) for key, what in SAME.items()]
        for what, then, now in [("setting", before.settings, settings), *pairs]:
            if then != now:
                raise ValueError(
                    f"{self.path} was measured with another {what} ({then}, here it is {now}); name another --out, or "
                    "measure all of it again with --fresh"
                )
