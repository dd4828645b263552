"""Text to pre-train on: a list of documents from a named source, split into training and validation.

Where a source has no validation part of its own, about 3 % of its documents are held out. A document's side depends on
a hash of its own name, id or text alone, so it stays where it is when documents are added or removed.
"""

import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from lln.tasks.data import hub
from lln.tasks.data.folder import hashed_share, require
from lln.tasks.data.lines import read_jsonl, read_lines

Split = Literal["train", "validation"]
Keyed = Iterator[tuple[str, str]]  # what determines a document's side, and the document

HELD_OUT = 0.03
NAMED = ("stdlib", "wikitext-2", "wikipedia")
# Left out of the standard library: installed packages, tests, and tables of characters that are no text.
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}


class NoDocumentsError(ValueError):
    """A source has no documents in a split."""


def read_documents(source: str, split: Split, data_dir: Path | None) -> list[str]:
    """The documents of one split of a source, in an order that is always the same; empty documents are left out.

    source: "stdlib" (the source of Python's standard library, docstrings and all), "wikitext-2" or "wikipedia" (in
    `data_dir`), several of these joined with "+", a file .txt (documents between empty lines), .jsonl or .jsonl.gz
    (each line with "text"), the folder of a Hugging Face data set, or "hub:NAME" or "hub:NAME:CONFIG".
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
    parts = source.split("+")
    names = parts if set(parts) <= set(NAMED) else [source]  # a path may hold a plus
    if len(set(names)) < len(names):
        raise ValueError(f"source {source!r} names a part twice")
    documents = [document for name in names for document in _read(name, split, data_dir) if document.strip()]
    if not documents:
        raise NoDocumentsError(
            f"source {source!r} has no {split} documents: {HELD_OUT:.0%} of the documents are held out for validation, "
            "chosen by hash; give more of them, or a data set folder with a validation split"
        )
    return documents


def default_source(data_dir: Path | None) -> str:
    return "stdlib" if data_dir is None else "wikitext-2+wikipedia"


def check_source(source: str, data_dir: Path) -> None:
    """Refuse a named source, or several joined with "+", whose files are not in `data_dir`."""
    for name in source.split("+"):
        for split in get_args(Split):
            _read(name, split, data_dir)  # finds the file, and reads nothing yet


def _read(source: str, split: Split, data_dir: Path | None) -> Iterator[str]:
    if source == "stdlib":
        return _stdlib(split)
    if source == "wikitext-2":
        path = _in(data_dir, source) / {"train": "train.txt", "validation": "valid.txt"}[split]
        return _wikitext(require(path, "WikiText-2, one paragraph a line"))
    if source == "wikipedia":
        return _side(split, _wikipedia(_in(data_dir, source) / "enwiki.jsonl.gz"))
    if source.startswith("hub:"):
        return _dataset_text(hub.from_hub(source.removeprefix("hub:")), split, source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _dataset_text(hub.from_folder(path), split, source)
    if path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz")):
        return _side(split, ((row["text"],) * 2 for _, row in read_jsonl(path, {"text": str})))
    if path.is_file() and path.suffix == ".txt":
        return _side(split, ((document,) * 2 for document in _between_empty_lines(path)))
    raise ValueError(
        f"unknown text source {source!r}: expected {', '.join(NAMED)} (joined with +), a file .txt, .jsonl or "
        ".jsonl.gz that exists, the folder of a Hugging Face data set, or hub:NAME"
    )


def _in(data_dir: Path | None, name: str) -> Path:
    if data_dir is None:
        raise ValueError(
            f"source {name!r} needs data: give --data-dir or set LLN_DATA to the folder that holds {name}/"
        )
    return require(data_dir / name, f"the folder of {name}")


def _on_side(split: Split, key: str) -> bool:
    return (hashed_share(key) < HELD_OUT) == (split == "validation")


def _side(split: Split, documents: Keyed) -> Iterator[str]:
    return (document for key, document in documents if _on_side(split, key))


def _stdlib(split: Split) -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, below, files in os.walk(root):
        below[:] = set(below) - NOT_TEXT  # installed packages are not read
        names += [Path(folder, file).relative_to(root).as_posix() for file in files if file.endswith(".py")]
    if not names:
        raise ValueError(f"this Python has no source of its standard library in {root}: choose another text source")
    for name in sorted(names):
        if _on_side(split, name):
            with tokenize.open(root / name) as file:  # in the encoding that the file declares
                yield file.read()


def _wikitext(path: Path) -> Iterator[str]:
    """Articles: a title is a heading of the first level, "= Title =", between empty lines."""
    article: list[str] = []
    before = ""
    pending = ""  # what may be a title, until the line after it is known
    for _, raw in read_lines(path):
        line = raw.strip()
        if pending and not line:
            yield "\n".join(article)
            article = []
        if pending:
            article.append(pending)
        pending = line if not before and re.fullmatch(r"= (?!= ).* =", line) else ""
        if line and not pending:
            article.append(line)
        before = line
    yield "\n".join([*article, pending] if pending else article)


def _wikipedia(path: Path) -> Keyed:
    require(path, "articles as gzipped JSON lines with id, title and text")
    return ((str(row["id"]), row["text"]) for _, row in read_jsonl(path, {"id": (int, str), "text": str}))


def _between_empty_lines(path: Path) -> Iterator[str]:
    lines: list[str] = []
    for _, line in read_lines(path):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    yield "\n".join(lines)


def _dataset_text(found: hub.Splits, split: Split, source: str) -> Iterator[str]:
    """The column "text" of a split; without a validation split, a part of the training split."""
    if "train" not in found:
        raise ValueError(f"{source}: no split 'train' among {sorted(found)}")
    rows = found.get(split, found["train"])
    if "text" not in rows.column_names:
        raise ValueError(f"{source}: no column 'text' among {rows.column_names}")
    if (kind := getattr(rows.features["text"], "dtype", None)) not in ("string", "large_string"):
        raise ValueError(f"{source}: column 'text' holds {kind}; expected strings")
    texts: Iterator[str] = (row["text"] or "" for row in rows.select_columns("text"))
    return texts if "validation" in found else _side(split, ((text, text) for text in texts))
