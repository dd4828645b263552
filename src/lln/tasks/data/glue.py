"""Eight tasks of GLUE, and IMDB's reviews as a ninth of longer texts, each as text_a, text_b and label.

Labels are numbered as in the published data sets of the hub, so that a model trained elsewhere means the same by them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets  # type: ignore[import-untyped]

from lln.tasks.data import hub
from lln.tasks.data.folder import cache_dir, require
from lln.tasks.data.lines import read_jsonl, read_table

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    text_a: str  # the column of the first text
    text_b: str | None  # of the second, if the task is about pairs
    labels: tuple[str, ...]  # () if the label is a number, a score from 0 to 5
    train_file: str = "train.jsonl"
    validation_file: str = "dev.jsonl"
    metrics: tuple[str, ...] = ("accuracy",)  # of lln.tasks.metrics; the first one decides between learning rates
    label: str = "label"  # the column of the label in our files; on the hub it is "label"
    validation_split: str = "validation"  # its name on the hub
    folder: str = ""  # in the data folder; left out, glue/TASK
    hub: str = ""  # left out, the task's config of HUB


ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "mnli": GlueTask(
        text_a="premise",
        text_b="hypothesis",
        labels=("entailment", "neutral", "contradiction"),
        validation_file="dev_matched.jsonl",
        validation_split="validation_matched",
    ),
    "qnli": GlueTask(text_a="question", text_b="sentence", labels=ENTAILMENT),
    "qqp": GlueTask(
        text_a="question1",
        text_b="question2",
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
    ),
    "sst2": GlueTask(
        text_a="sentence",
        text_b=None,
        labels=("negative", "positive"),
        train_file="train.tsv",
        validation_file="dev.tsv",
    ),
    "cola": GlueTask(
        text_a="sentence", text_b=None, labels=("unacceptable", "acceptable"), metrics=("matthews", "accuracy")
    ),
    "mrpc": GlueTask(
        text_a="sentence1", text_b="sentence2", labels=("not_equivalent", "equivalent"), metrics=("f1", "accuracy")
    ),
    "rte": GlueTask(text_a="premise", text_b="hypothesis", labels=ENTAILMENT),
    "stsb": GlueTask(text_a="sentence1", text_b="sentence2", labels=(), metrics=("spearman", "pearson"), label="score"),
    "imdb": GlueTask(
        text_a="text",
        text_b=None,
        labels=("negative", "positive"),
        train_file="train.jsonl.gz",
        validation_file="test.jsonl.gz",
        validation_split="test",
        folder="imdb",
        hub="stanfordnlp/imdb",
    ),
}
HIGHEST_SCORE = 5.0  # of STS-B


def read_glue(task: str, split: Literal["train", "validation"], data_dir: Path | None) -> datasets.Dataset:
    """One split of a task, with the columns text_a, text_b (None where there is but one text) and label (a number).

    Read from `data_dir`/glue/TASK (`data_dir`/imdb): our files (SST-2 tab-separated, the others JSON lines), the
    Parquet files of the hub, or a data set written by `save_to_disk`. Without `data_dir`, from the hub.
    """
    if task not in TASKS:
        raise ValueError(f"unknown GLUE task {task!r}: expected one of {', '.join(TASKS)}")
    if split not in ("train", "validation"):
        raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
    columns = TASKS[task]
    if data_dir is None:
        name = columns.hub or f"{HUB}:{task}"
        try:
            rows = _rows(hub.from_hub(name), split, columns, name)
        except ValueError as error:
            how = f"give --data-dir or set LLN_DATA to a folder with {_folder(task)}/"
            raise ValueError(f"no data for GLUE task {task!r}: {how} ({error})") from error
    else:
        rows = _from_folder(data_dir / _folder(task), split, columns)
    found: dict[str, list[Any]] = {"text_a": [], "text_b": [], "label": []}
    for where, row in rows:
        found["text_a"].append(_text(row, columns.text_a, where))
        found["text_b"].append(_text(row, columns.text_b, where) if columns.text_b else None)
        found["label"].append(
            _label(row["label"], columns.labels, where) if columns.labels else _score(row["label"], where)
        )
    if not found["label"]:
        raise ValueError(f"GLUE task {task!r} has no {split} examples in {data_dir or HUB}")
    text = datasets.Value("string")
    label = datasets.ClassLabel(names=list(columns.labels)) if columns.labels else datasets.Value("float32")
    return datasets.Dataset.from_dict(found, datasets.Features({"text_a": text, "text_b": text, "label": label}))


def check_glue(task: str, data_dir: Path) -> None:
    """Refuse a data folder that has no examples of a task."""
    for split in ("train", "validation"):
        _from_folder(data_dir / _folder(task), split, TASKS[task])  # finds the files, and reads no examples yet


def _folder(task: str) -> str:
    return TASKS[task].folder or f"glue/{task}"


def _from_folder(folder: Path, split: str, task: GlueTask) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it was found, row) for each example."""
    name = task.train_file if split == "train" else task.validation_file
    path = require(folder, f"a folder with {name}") / name
    if path.is_file():
        texts = [task.text_a, *([task.text_b] if task.text_b else [])]
        rows = (
            read_table(path, ["label", *texts])
            if path.suffix == ".tsv"
            else read_jsonl(
                path, {**dict.fromkeys(texts, str), task.label: (int, str) if task.labels else (int, float)}
            )
        )
        return ((f"{path}, line {number}", row | {"label": row[task.label]}) for number, row in rows)
    published = task.validation_split if split == "validation" else split
    if parquet := sorted(map(str, folder.glob(f"{published}-*.parquet"))):
        found = {published: datasets.Dataset.from_parquet(parquet, cache_dir=str(cache_dir() / "datasets"))}
    elif (folder / "dataset_dict.json").is_file():
        found = hub.from_folder(folder)
    else:
        require(path, f"{split} examples (or {published}-*.parquet, or a data set written by save_to_disk)")
    return _rows(found, split, task, str(folder))


def _rows(found: hub.Splits, split: str, task: GlueTask, origin: str) -> Iterator[tuple[str, dict[str, Any]]]:
    published = task.validation_split if split == "validation" else split
    if published not in found:
        raise ValueError(f"{origin}: no split {published!r} among {sorted(found)}")
    rows = found[published]
    for column in filter(None, (task.text_a, task.text_b, "label")):
        if column not in rows.column_names:
            raise ValueError(f"{origin}: no column {column!r} among {rows.column_names}")
    return ((f"{origin}, {published} row {number}", row) for number, row in enumerate(rows))


def _text(row: dict[str, Any], column: str, where: str) -> str:
    if not isinstance(text := row[column], str):
        raise ValueError(f"{where}: {column!r} is {text!r}; expected text")
    return text


def _label(given: str | int, names: tuple[str, ...], where: str) -> int:
    """A label as its name or its number; tables write the number as text."""
    if given in names:
        return names.index(str(given))
    number = str(given)
    if number in map(str, range(len(names))):
        return int(number)
    raise ValueError(f"{where}: unknown label {given!r}; expected {', '.join(names)} or 0 to {len(names) - 1}")


def _score(given: Any, where: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= HIGHEST_SCORE:
        raise ValueError(f"{where}: the score is {given!r}; expected a number from 0 to {HIGHEST_SCORE:g}")
    return float(given)
