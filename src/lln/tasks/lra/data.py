"""The data of each task: read from the data folder where it has it, generated where the task can be.

text          imdb/{train,test}.jsonl.gz
listops       listops/basic_{train,val,test}.tsv, the published files; otherwise generated
retrieval     aan/new_aan_pairs.{train,eval,test}.tsv, the published files; otherwise wikipedia/enwiki.jsonl.gz
pathfinder    generated
image         cifar10-gray/{train,test}.npz
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from lln.tasks.data.folder import data_dir as find_data_dir
from lln.tasks.data.folder import require
from lln.tasks.data.lines import read_jsonl
from lln.tasks.lra import listops, pathfinder, retrieval
from lln.tasks.lra.cache import cached_examples
from lln.tasks.lra.examples import TASKS, Data, Examples, Sequences, task_named

VALID_REVIEWS = 2000  # of the 25,000 for training; published comparisons have none
VALID_IMAGES = 5000  # as published
VERSION = 1  # of the generators: another one makes the cache stale
GENERATED = {"listops": 96_000, "pathfinder": 160_000}  # training examples, as published


def load(
    name: str, *, data_dir: Path | None = None, examples: int | None = None, dashes: int | None = None, seed: int = 0
) -> Data:
    """The splits of a task. For listops and pathfinder: the number of training `examples`, by default as published, the
    `seed` of what is generated, and for pathfinder the `dashes` of a path, by default 14.
    """
    task = task_named(name)
    folder = find_data_dir(data_dir)
    _check_dashes(name, dashes)
    if name == "listops" and folder is not None and (folder / "listops").is_dir():
        files = {"train": "train", "valid": "val", "test": "test"}
        read = {split: listops.read_tsv(folder / "listops" / f"basic_{ending}.tsv") for split, ending in files.items()}
        if examples is not None:
            read["train"] = read["train"].part(0, min(examples, len(read["train"])))
        return Data(task, "published files", read)
    if name in GENERATED:
        return generated(name, sizes(name, examples), seed=seed, dashes=dashes)
    if examples is not None:
        raise ValueError(f"{name} is read, not generated: it has the examples that its files have")
    if folder is None:
        raise ValueError(
            f"{name} needs data: give its folder with --data-dir or the environment variable LLN_DATA. "
            f"Expected there: {_NEEDS[name]}. listops and pathfinder are generated and work without"
        )
    return _READERS[name](folder)


def sizes(name: str, examples: int | None = None) -> tuple[int, int, int]:
    """Training, validation and test examples of a generated task; as published, if `examples` is left out.

    ListOps holds out 2,000 and 2,000, whatever there is to train on; pathfinder an eighth of it for each.
    """
    task_named(name)
    if name not in GENERATED:
        raise ValueError(f"{name} is read, not generated; these are: {', '.join(GENERATED)}")
    train = GENERATED[name] if examples is None else examples
    if train < 1:
        raise ValueError(f"there must be examples to train on, got {train}")
    held_out = 2000 if name == "listops" else -(-train // 8)
    return train, held_out, held_out


def sample(name: str, count: int, *, data_dir: Path | None = None, seed: int = 0, dashes: int | None = None) -> Data:
    """The task to look at: as `load` reads it, but of what is generated no more than `count` examples a split."""
    folder = find_data_dir(data_dir)
    if name not in GENERATED or (name == "listops" and folder is not None and (folder / "listops").is_dir()):
        return load(name, data_dir=data_dir, dashes=dashes)
    return generated(name, (count, count, count), seed=seed, dashes=dashes, workers=1)


def generated(
    name: str, counts: tuple[int, int, int], *, seed: int, dashes: int | None = None, workers: int | None = None
) -> Data:
    """listops or pathfinder, made or from the cache; `counts` are training, validation and test examples.

    Held-out examples are made first: with as many of them, they do not depend on how many there are to train on.
    """
    _check_dashes(name, dashes)
    train, valid, test = counts
    settings = {"count": sum(counts), "seed": seed, "version": VERSION}
    if name == "pathfinder":
        dashes = pathfinder.DASHES[0] if dashes is None else dashes
        make = partial(pathfinder.generate, sum(counts), seed=seed, dashes=dashes, workers=workers)
        everything = cached_examples(name, settings | {"dashes": dashes}, make)
        source = f"generated, {dashes} dashes, seed {seed}"
    else:
        make = partial(listops.generate, sum(counts), seed=seed, workers=workers)
        everything = cached_examples(name, settings, make)
        source = f"generated, seed {seed}"
    splits = {
        "train": everything.part(test + valid, test + valid + train),
        "valid": everything.part(test, test + valid),
        "test": everything.part(0, test),
    }
    return Data(TASKS[name], source, splits)


def _check_dashes(name: str, dashes: int | None) -> None:
    if dashes is not None and name != "pathfinder":
        raise ValueError(f"dashes are for pathfinder, not for {name}")


def _text(folder: Path) -> Data:
    def read(split: str) -> Examples:
        path = require(folder / "imdb" / f"{split}.jsonl.gz", "IMDB reviews as JSON lines with text and label")
        rows = [row for _, row in read_jsonl(path, {"text": str, "label": int})]
        order = np.random.default_rng(0).permutation(len(rows))  # the file is sorted by label
        texts = (rows[index]["text"].encode() for index in order)
        labels = np.array([rows[index]["label"] for index in order], dtype=np.int64)
        return Examples((Sequences.of(texts, length=TASKS["text"].length),), labels)

    return Data(TASKS["text"], "IMDB", _hold_out(read("train"), read("test"), VALID_REVIEWS))


def _image(folder: Path) -> Data:
    def read(split: str) -> Examples:
        path = require(folder / "cifar10-gray" / f"{split}.npz", "grey pictures x (N, 32, 32) and labels y")
        with np.load(path) as stored:
            pictures, labels = stored["x"], stored["y"].astype(np.int64)
        if pictures.dtype != np.uint8 or pictures.shape != (len(labels), 32, 32):
            raise ValueError(
                f"{path} holds x {pictures.dtype} {pictures.shape} and {len(labels)} labels; "
                "expected uint8 (N, 32, 32) and N labels"
            )
        return Examples((Sequences.rows(pictures.reshape(len(labels), -1)),), labels)

    return Data(TASKS["image"], "CIFAR-10 in grey", _hold_out(read("train"), read("test"), VALID_IMAGES))


def _retrieval(folder: Path) -> Data:
    if (folder / "aan").is_dir():
        files = {"train": "train", "valid": "eval", "test": "test"}
        read = {
            split: retrieval.read_pairs(folder / "aan" / f"new_aan_pairs.{ending}.tsv")
            for split, ending in files.items()
        }
        return Data(TASKS["retrieval"], "ACL Anthology Network", read)
    path = require(folder / "wikipedia" / "enwiki.jsonl.gz", f"Wikipedia articles, or {_NEEDS['retrieval']}")
    splits = {
        split: retrieval.passages(articles, rounds=retrieval.ROUNDS[split], seed=number)
        for number, (split, articles) in enumerate(retrieval.read_articles(path).items())
    }
    return Data(TASKS["retrieval"], "wikipedia passages, ours", splits)


def _hold_out(train: Examples, test: Examples, count: int) -> dict[str, Examples]:
    count = min(count, len(train) // 2)
    return {"train": train.part(count, len(train)), "valid": train.part(0, count), "test": test}


_READERS: dict[str, Callable[[Path], Data]] = {"text": _text, "image": _image, "retrieval": _retrieval}
_NEEDS = {
    "text": "imdb/train.jsonl.gz and imdb/test.jsonl.gz",
    "image": "cifar10-gray/train.npz and cifar10-gray/test.npz",
    "retrieval": "aan/new_aan_pairs.{train,eval,test}.tsv (as published) or wikipedia/enwiki.jsonl.gz (our stand-in)",
}
