"""Text files line by line, plain or gzipped: every error names the file, the line and what was expected.

A byte order mark at the start and Windows line ends are taken off. Anything but UTF-8 is refused.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.tasks.data.folder import require

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) from line 1 on, without line ends. A name that ends in .gz is read as gzip."""
    number = 0
    require(path, "a text file")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: expected a text file")
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw
                yield number, line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: expected UTF-8 text ({error})") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}, after line {number}: damaged or truncated gzip ({error})") from error


def read_jsonl(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for each line of a JSON lines file; every object must hold `fields` of these types.

    Empty lines are passed over.
    """
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); expected {_expected(fields)}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a JSON {type(row).__name__}; expected {_expected(fields)}")
        for name, kind in fields.items():
            if name not in row:
                raise ValueError(f"{path}, line {number}: no {name!r} in {sorted(row)}; expected {_expected(fields)}")
            if not isinstance(row[name], kind) or isinstance(row[name], bool):
                found = type(row[name]).__name__
                raise ValueError(f"{path}, line {number}: {name!r} is a {found}; expected {_kind(kind)}")
            if isinstance(row[name], str) and not _is_unicode(row[name]):
                raise ValueError(f"{path}, line {number}: {name!r} holds half a surrogate pair; expected Unicode text")
        yield number, row


def read_table(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row) for each line of a tab-separated file without quoting, whose first line names the columns.

    `columns` must be among them, in any order.
    """
    header: list[str] | None = None
    for number, line in read_lines(path):
        cells = line.split("\t")
        if header is None:
            header = cells
            if missing := [name for name in columns if name not in header]:
                raise ValueError(f"{path}, line 1: no column {missing[0]!r} in {header}; expected {', '.join(columns)}")
        elif len(cells) != len(header):
            raise ValueError(
                f"{path}, line {number}: {len(cells)} cells; expected {len(header)}, one for each of {header}"
            )
        else:
            yield number, dict(zip(header, cells, strict=True))
    if header is None:
        raise ValueError(f"{path} is empty: expected a first line with the columns {', '.join(columns)}")


def _is_unicode(text: str) -> bool:
    """JSON can escape what is no character: one half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _expected(fields: Mapping[str, type | tuple[type, ...]]) -> str:
    return "an object with " + ", ".join(f"{name} ({_kind(kind)})" for name, kind in fields.items())


def _kind(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join({str: "text", int: "a whole number"}.get(one, one.__name__) for one in kinds)
