"""Text: is a film review good or bad? IMDB, byte by byte."""

from pathlib import Path

import numpy as np

from lln.tasks.data.folder import require
from lln.tasks.data.lines import read_jsonl
from lln.tasks.lra.examples import Examples, Sequences, Splits
from lln.tasks.lra.task import Task, hold_out

LENGTH = 4000
VALID_REVIEWS = 2000  # of the 25,000 for training; published comparisons have none


def read(folder: Path) -> tuple[str, Splits]:
    return "IMDB", hold_out(_split(folder, "train"), _split(folder, "test"), VALID_REVIEWS)


def _split(folder: Path, split: str) -> Examples:
    path = require(folder / "imdb" / f"{split}.jsonl.gz", "IMDB reviews as JSON lines with text and label")
    rows = [row for _, row in read_jsonl(path, {"text": str, "label": int})]
    order = np.random.default_rng(0).permutation(len(rows))  # the file is sorted by label
    texts = (rows[index]["text"].encode() for index in order)
    labels = np.array([rows[index]["label"] for index in order], dtype=np.int64)
    return Examples((Sequences.of(texts, length=LENGTH),), labels)


TASK = Task(
    name="text",
    title="Text (4k)",
    length=LENGTH,
    symbols=256,
    classes=2,
    about="Is a film review good or bad? IMDB, byte by byte.",
    presets={
        "laptop": {"steps": 700, "batch_size": 16, "learning_rate": 5e-4},
        "paper": {"batch_size": 32, "learning_rate": 1e-4, "warmup_steps": 80},
    },
    read=read,
    files="imdb/train.jsonl.gz and imdb/test.jsonl.gz",
    answers=("bad", "good"),
)
