"""Result files: one JSON-lines file for each table or figure, in which a line is one run.

    {"run": "mlm-lln", "command": ..., "commit": ..., "seed": ..., "machine": ..., "settings": {...}, "summary": {...},
     "training": {"step": [...], "loss": [...]}, "evaluations": {...}, "heads": {...}}

`run` is the name by which a run is found, and a file has it once. `settings` is what was requested, `summary` what was
found in the end. `TABLES` are tables of what was measured on the way, by columns; a column with the same value in
all rows is that value alone. Measurements of time and memory have a table `rows`.
"""

import errno
import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from lln.instruments.records import read_records

Row = dict[str, Any]
PARTIAL = ".partial-"
TABLES = ("training", "evaluations", "heads", "rows")


@dataclass(frozen=True)
class Result:
    """What is kept of a run."""

    run: str
    origin: Mapping[str, Any]  # `lln.provenance.provenance`, and when a run was started and continued
    settings: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)  # by names of `TABLES`

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "Result":
        """The run of a line of a result file.

        Args:
            line: as `to_line` gives it.

        Returns:
            The run, with tables as rows.

        Raises:
            KeyError: the line has no run or no settings.

        Example:
            >>> Result.from_line({"run": "mlm-lln", "seed": 0, "settings": {"steps": 2}}).origin
            {'seed': 0}
        """
        tables = {name: unpack(line[name]) for name in TABLES if name in line}
        origin = {key: value for key, value in line.items() if key not in ("run", "settings", "summary", *TABLES)}
        return cls(line["run"], origin, line["settings"], line.get("summary", {}), tables)

    def to_line(self) -> dict[str, Any]:
        """The run as a line of a result file.

        Returns:
            What JSON can have, with tables as columns.

        Example:
            >>> Result("mlm-lln", {"seed": 0}, {"steps": 2}).to_line()
            {'run': 'mlm-lln', 'seed': 0, 'settings': {'steps': 2}}
        """
        line = {"run": self.run, **self.origin, "settings": dict(self.settings)}
        line |= {"summary": dict(self.summary)} if self.summary else {}
        return line | {name: pack(rows) for name, rows in self.tables.items()}

    @property
    def rows(self) -> Sequence[Row]:
        """The table `rows`; a KeyError if the run has none."""
        return self.tables["rows"]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric of training or of evaluations.

        Args:
            name: of a column; rows without it are left out.

        Returns:
            Two lists of the same length, empty if nothing has the metric.

        Example:
            >>> result = Result("mlm-lln", {"seed": 0}, tables={"training": [{"step": 1, "loss": 3.0}]})
            >>> result.curve("loss")
            ([1], [3.0])
        """
        lines = [row for table in ("training", "evaluations") for row in self.tables.get(table, ())]
        lines = [row for row in lines if row.get(name) is not None]
        return [row["step"] for row in lines], [row[name] for row in lines]

    def layers(self, name: str) -> dict[str, tuple[list[int], list[float]]]:
        """Steps and values of what was recorded of each layer, the mean over its heads.

        Args:
            name: of a column of the table `heads`.

        Returns:
            Two lists for each layer.

        Example:
            >>> heads = [{"layer": "0", "head": head, "step": 1, "alpha": head + 1.0} for head in (0, 1)]
            >>> Result("mlm-lln", {}, tables={"heads": heads}).layers("alpha")
            {'0': ([1], [1.5])}
        """
        found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in self.tables.get("heads", ()):
            if row.get(name) is not None:
                found[row["layer"]][row["step"]].append(row[name])
        return {
            layer: (sorted(steps), [fmean(steps[step]) for step in sorted(steps)]) for layer, steps in found.items()
        }


def pack(rows: Sequence[Row]) -> Any:
    """Rows as columns where all have the same keys, or else as they are; `unpack` gives the same rows again.

    Args:
        rows: of a table.

    Returns:
        What JSON can have: a column with the same value in all rows is that value alone.

    Example:
        >>> pack([{"step": 1, "kind": "lln"}, {"step": 2, "kind": "lln"}])
        {'step': [1, 2], 'kind': 'lln'}
    """
    names = list(rows[0]) if rows else []
    if not rows or any(list(row) != names for row in rows):
        return list(rows)
    columns = {name: [row[name] for row in rows] for name in names}
    packed = {name: values[0] if _is_constant(values) else values for name, values in columns.items()}
    return packed if any(isinstance(values, list) for values in packed.values()) else columns


def unpack(table: Any) -> list[Row]:
    """The rows of a table that `pack` made.

    Args:
        table: columns, or rows.

    Returns:
        The rows.

    Example:
        >>> unpack({"step": [1, 2], "kind": "lln"})
        [{'step': 1, 'kind': 'lln'}, {'step': 2, 'kind': 'lln'}]
    """
    if isinstance(table, list):
        return table
    count = max(len(values) for values in table.values() if isinstance(values, list))
    columns = [values if isinstance(values, list) else [values] * count for values in table.values()]
    return [dict(zip(table, row, strict=True)) for row in zip(*columns, strict=True)]


def _is_constant(values: Sequence[Any]) -> bool:
    first = values[0]
    return not isinstance(first, list) and all(type(x) is type(first) and x == first for x in values)


def read_results(path: Path, *, made_by: str) -> dict[str, Result]:
    """The runs of a result file by their names.

    Args:
        path: the file.
        made_by: the command that makes it, for the error.

    Returns:
        The runs, in the order of the file.

    Raises:
        ValueError: the file does not exist, or is damaged.

    Example:
        >>> runs = read_results(Path("table3.jsonl"), made_by="lln reproduce table3")  # doctest: +SKIP
        >>> runs["vision-softmax"].summary  # doctest: +SKIP
    """
    if not path.exists():
        raise ValueError(f"{path} is missing; `{made_by}` makes it")
    try:
        lines = read_records(path)
        results = [Result.from_line(line) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; restore it, or make it again with `{made_by}`") from error
    return {result.run: result for result in results}


def chosen_results(path: Path, names: Iterable[str], *, made_by: str) -> dict[str, Result]:
    """Some runs of a result file.

    Args:
        path: the file.
        names: of the runs.
        made_by: the command that makes it, for the error.

    Returns:
        The runs by their names, in the order of `names`.

    Raises:
        ValueError: the file does not exist, is damaged, or does not have one of the runs, which is named.

    Example:
        >>> path, command = Path("table2.jsonl"), "lln bench model --out table2.jsonl"
        >>> chosen_results(path, ["model"], made_by=command)["model"].rows  # doctest: +SKIP
    """
    found = read_results(path, made_by=made_by)
    for name in names:
        if name not in found:
            raise ValueError(f"{path} has no run {name}; `{made_by}` makes it")
    return {name: found[name] for name in names}


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Write a result file, which is whole at every moment.

    Args:
        path: the file, in a folder that exists.
        results: its runs.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> write_results(Path("table3.jsonl"), [Result("mlm-lln", {"seed": 0})])  # doctest: +SKIP
    """
    write_lines(path, (result.to_line() for result in results))


def add_result(path: Path, result: Result) -> None:
    """Put a run into a result file, in the place of an earlier one of the same name; several processes may do so.

    Args:
        path: the file; it and its folder are made if they do not exist.
        result: the run.

    Raises:
        ValueError: the file is damaged.
        OSError: it cannot be written.

    Example:
        >>> add_result(Path("table3.jsonl"), Result("mlm-lln", {"command": "lln train mlm"}))  # doctest: +SKIP
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        found = read_results(path, made_by=str(result.origin["command"])) if path.exists() else {}
        write_results(path, (found | {result.run: result}).values())


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file, which is whole at every moment.

    Args:
        path: the file, in a folder that exists.
        rows: its lines.

    Raises:
        OSError: the file cannot be written.
        TypeError: JSON does not have a value.

    Example:
        >>> write_lines(Path("metrics.jsonl"), [{"step": 1, "loss": 3.0}])  # doctest: +SKIP
    """
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under another name, flush it to the disk and rename it, so that no reader gets half of it.

    Args:
        path: the file, in a folder that exists.
        content: all of it.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> write_whole(Path("table3.md"), "| run | loss |")  # doctest: +SKIP
    """
    partial = path.with_name(PARTIAL + path.name)
    write_flushed(partial, content.encode() if isinstance(content, str) else content)
    partial.replace(path)
    flush_folder(path.parent)


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk.

    Args:
        path: the file, in a folder that exists.
        content: all of it.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> write_flushed(Path("weights.bin"), b"...")  # doctest: +SKIP
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make what was renamed in a folder survive a loss of power.

    Args:
        folder: one that exists.

    Raises:
        OSError: it cannot be opened or flushed.

    Example:
        >>> flush_folder(Path("results"))  # doctest: +SKIP
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: Path, option: str = "--out") -> None:
    """Check before work begins that a result can be written to the file `path`; its folder is made.

    Args:
        path: the file.
        option: by which it was given, for the error.

    Raises:
        ValueError: there is a folder of this name.
        OSError: the file cannot be written.

    Example:
        >>> check_writable(Path("results/table3.jsonl"))  # doctest: +SKIP
    """
    if path.is_dir():
        raise ValueError(f"{option} must be a file, and {path} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}; choose another {option}") from error


def machines(results: Iterable[Result]) -> str:
    """Machines, commits and seeds behind some runs, for the foot of a picture or table.

    Args:
        results: runs with an origin as `lln.provenance.provenance` gives it.

    Returns:
        A line.

    Raises:
        KeyError: a run has no machine, commit or seed.

    Example:
        >>> machine = {"cores": 2, "processor": "Xeon"}
        >>> machines([Result("mlm-lln", {"machine": machine, "commit": "1a2b3c", "seed": 0})])
        '2 cores of Xeon, commit 1a2b3c, seed 0'
    """
    results = list(results)
    machines = sorted({f"{x.origin['machine']['cores']} cores of {x.origin['machine']['processor']}" for x in results})
    commits = sorted({str(x.origin["commit"]) for x in results})
    seeds = sorted({x.origin["seed"] for x in results})
    return (
        f"{', '.join(machines)}, commit {', '.join(commits)}, "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
