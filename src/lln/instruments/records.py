"""Records on disk: JSON lines that survive a crash, and tables made of them.

A record is one line, a flat JSON object. What cannot be measured is null, so that any JSON reader takes it.
"""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]
BEGINNING = b'{"step": '  # of every line that a recorder writes


class RecordFile:
    """Appends records to a file. When `append` returns they are on the disk: a crash loses what was being written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _make_ready(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, records: list[Record]) -> None:
        self._file.write("".join(json.dumps(clean(record), allow_nan=False) + "\n" for record in records))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file; a last line that was cut off by a crash is left out.

    Args:
        path: a file that a `Recorder` has written.

    Returns:
        One dict for each step, layer and head; `pandas.DataFrame(read_records(path))` is a table of them.

    Raises:
        ValueError: a line is no record; it is named.
        FileNotFoundError: there is no such file.

    Example:
        >>> records = read_records("run/records.jsonl")  # doctest: +SKIP
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break  # no newline behind it: torn
            raise ValueError(f"{path}, line {number} is not a record: {line[:80]!r}") from error
    return records


def write_table(records: list[Record], path: str | os.PathLike[str]) -> Path:
    """Write records as CSV, one column for each key; empty where a value is missing.

    Args:
        records: what `read_records` or `Recorder.table` returns.
        path: the file, whose folder is made.

    Returns:
        The path.

    Example:
        >>> write_table(read_records("run/records.jsonl"), "run/heads.csv")  # doctest: +SKIP
    """
    columns = list(dict.fromkeys(key for record in records for key in record))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(clean(record) for record in records)
    return path


def clean(record: Record) -> Record:
    """Null for what JSON has no number for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _make_ready(path: Path) -> None:
    """Let new records start on a line: remove a last line that a crash has torn. Refuse a file of something else."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        start = content.rfind(b"\n") + 1
        first, last = content.split(b"\n", 1)[0], content[start:]
        torn = bool(last) and _parse(last) is None
        begun = torn and start == 0 and (last.startswith(BEGINNING) or BEGINNING.startswith(last))
        if content and not begun and "step" not in (_parse(first) or {}):
            raise ValueError(f"{path} is not a file of records, its first line is {first[:80]!r}; give another path")
        if torn:
            file.truncate(start)
        elif last:
            file.write(b"\n")


def _parse(line: bytes) -> Record | None:
    """The JSON object on a line, if there is one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
