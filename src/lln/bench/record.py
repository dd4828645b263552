"""Measured rows with their origin in a JSON file that grows row by row, so that a run can be stopped and continued."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.bench.measure import noise
from lln.provenance import provenance, read_json

Row = dict[str, Any]

# What must be the same for rows of two runs to stand in one file, and how to call it.
SAME = {
    "setting": "setting",
    "seed": "seed",
    "commit": "commit",
    "machine": "machine",
    "threads": "number of threads",
    "torch": "version of torch",
    "kernel": "kernel",
}


class Record:
    """The rows of a run, written to `path` (if there is one) after each that is added."""

    def __init__(
        self,
        path: Path | None,
        *,
        command: str,
        setting: Mapping[str, Any],
        seed: int = 0,
        kernel: Mapping[str, Any] | None = None,
        fresh: bool = False,
    ) -> None:
        """Continue the file at `path`, or begin it anew if it does not exist or if `fresh`.

        A ValueError says what a file was measured with, if rows from here cannot be put beside its own.
        """
        self.path = path
        self.noise = noise()
        self.content: dict[str, Any] = provenance(seed=seed, command=command)
        self.content |= {"setting": dict(setting), "kernel": dict(kernel or {}), "noise": [], "rows": []}
        if path is not None:
            check_file(path)
            if path.exists() and not fresh:
                self._continue(load(path))
        self.content["noise"].append(self.noise)

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.content["rows"]
        return rows

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def drop(self, rows: Sequence[Row]) -> None:
        """Take out rows that will be measured again."""
        self.content["rows"] = [row for row in self.rows if row not in rows]

    def write(self) -> None:
        if self.path is not None:
            write_whole(self.path, json.dumps(self.content, indent=1) + "\n")

    def _continue(self, before: dict[str, Any]) -> None:
        for key, words in SAME.items():
            if before.get(key) != self.content[key]:
                raise ValueError(
                    f"{self.path} was measured with another {words} ({before.get(key)}, here it is "
                    f"{self.content[key]}); name another --out, or measure all of it anew with --fresh"
                )
        self.content = before


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a record."""
    content: dict[str, Any] = read_json(Path(path), "measure it anew with the option --fresh of its command")
    return content


def check_file(path: Path) -> None:
    """Find out before measuring whether the result can be written to `path`."""
    if path.is_dir():
        raise ValueError(f"--out must be a file, and {path} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half-written."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
