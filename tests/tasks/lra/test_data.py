"""Data of the tasks: what is read, what is held out, what is cached, and the errors when something is missing."""

import gzip
import json

import numpy as np
import pytest
import torch

from lln.tasks.lra import load, retrieval
from lln.tasks.lra.data import generated, sizes
from lln.tasks.lra.examples import Examples, Sequences, collate
from lln.tasks.lra.registry import TASKS


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_published_sizes():
    lengths = {name: (task.length, task.classes) for name, task in TASKS.items()}
    assert lengths == {
        "text": (4000, 2),
        "listops": (2000, 10),
        "retrieval": (4000, 2),
        "pathfinder": (1024, 2),
        "image": (1024, 10),
    }
    assert sizes("listops") == (96_000, 2_000, 2_000)
    assert sizes("pathfinder") == (160_000, 20_000, 20_000)
    assert sizes("pathfinder", 9) == (9, 2, 2)


def test_batch_pads_with_what_is_no_symbol():
    examples = Examples(
        (Sequences.of([b"\x00\xff", b"", b"abcd"], length=3), Sequences.of([b"x", b"yy", b""], length=3)),
        np.array([1, 0, 1]),
    )
    batch = examples.batch([0, 1, 2])
    assert batch["tokens"].tolist() == [
        [[1, 256, 0], [121, 0, 0]],
        [[0, 0, 0], [122, 122, 0]],
        [[98, 99, 100], [0, 0, 0]],
    ]
    assert batch["labels"].tolist() == [1, 0, 1]
    assert batch["tokens"].dtype == torch.int64
    ordered = examples.by_length()
    assert ordered.lengths.tolist() == [3, 2, 2]
    assert sorted(ordered.labels.tolist()) == [0, 1, 1]
    assert collate([ordered.example(0)])["tokens"].tolist() == batch["tokens"][2:].tolist()


def test_text(tmp_path):
    long = "é" * 3000
    rows = [{"id": n, "text": long if n == 0 else f"review {n}", "label": n % 2} for n in range(9)]
    for split in ("train", "test"):
        write_jsonl(tmp_path / "imdb" / f"{split}.jsonl.gz", rows)
    data = load("text", data_dir=tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 5, "valid": 4, "test": 9}
    found = {}
    for index in range(9):
        example = data.splits["test"].example(index)
        found[bytes(example["input_0"])] = example["labels"]
    assert found == {row["text"].encode()[:4000]: row["label"] for row in rows}
    both = [bytes(data.splits[s].inputs[0][i]) for s in ("train", "valid") for i in range(len(data.splits[s]))]
    assert sorted(both) == sorted(found)


def test_image(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, (6, 32, 32), dtype=np.uint8)
    (tmp_path / "cifar10-gray").mkdir()
    for split in ("train", "test"):
        np.savez(tmp_path / "cifar10-gray" / f"{split}.npz", x=pictures, y=np.arange(6, dtype=np.uint8))
    data = load("image", data_dir=tmp_path)
    assert len(data.splits["train"]) == len(data.splits["valid"]) == 3
    example = data.splits["test"].example(4)
    assert np.array_equal(example["input_0"].reshape(32, 32), pictures[4])
    assert example["labels"] == 4
    np.savez(tmp_path / "cifar10-gray" / "test.npz", x=pictures[:, :16], y=np.arange(6))
    with pytest.raises(ValueError, match=r"uint8 \(N, 32, 32\)"):
        load("image", data_dir=tmp_path)


def test_published_pairs(tmp_path):
    (tmp_path / "aan").mkdir()
    for split in ("train", "eval", "test"):
        (tmp_path / "aan" / f"new_aan_pairs.{split}.tsv").write_text('1.0\tA\tB\ta "quoted" text\tb\n0.0\tC\tD\tc\td\n')
    data = load("retrieval", data_dir=tmp_path)
    assert data.source == "ACL Anthology Network"
    assert bytes(data.splits["valid"].inputs[0][0]) == b'a "quoted" text'
    assert data.splits["test"].labels.tolist() == [1, 0]
    (tmp_path / "aan" / "new_aan_pairs.test.tsv").write_text("1.0\tA\tB\ttext\n")
    with pytest.raises(ValueError, match="line 1: 4 cells; expected 5"):
        load("retrieval", data_dir=tmp_path)


def article(number):
    """Every word of an article names it."""
    random = np.random.default_rng(number)
    return {"id": number, "title": "", "text": " ".join(f"w{number}" for _ in range(random.integers(300, 900)))}


def test_passages_of_ours(tmp_path):
    write_jsonl(tmp_path / "wikipedia" / "enwiki.jsonl.gz", [*map(article, range(10, 210)), {"id": 1, "text": "short"}])
    data = load("retrieval", data_dir=tmp_path)
    assert data.source == "wikipedia passages, ours"
    seen = {}
    for name, split in data.splits.items():
        assert split.labels.mean() == 0.5
        seen[name] = set()
        for index in range(len(split)):
            example = split.example(index)
            # Without the first and last word, which a cut at 4,000 bytes may have shortened.
            first, second = (set(bytes(example[f"input_{t}"]).split()[1:-1]) for t in (0, 1))
            assert len(first) == len(second) == 1
            assert (first == second) == bool(example["labels"])
            seen[name] |= first | second
    assert not seen["train"] & seen["test"]
    assert not seen["valid"] & (seen["test"] | seen["train"])
    train = data.splits["train"]
    near = np.abs(train.inputs[0].lengths - train.inputs[1].lengths)
    assert abs(near[train.labels == 1].mean() - near[train.labels == 0].mean()) < 0.15 * near.mean()


def test_passages_come_from_both_sides_of_the_cut():
    text = " ".join(map(str, range(600))).encode()
    articles = [retrieval.Article(number, text) for number in range(8)]
    pairs = retrieval.passages(articles, rounds=2, seed=0)
    assert len(pairs) == 16
    for index in range(16):
        first, second = (bytes(sequences[index]) for sequences in pairs.inputs)
        assert first + second == text
        assert 0.3 < len(first) / len(text) < 0.7
    with pytest.raises(ValueError, match="at least 4 articles"):
        retrieval.passages(articles[:3], rounds=1, seed=0)


def test_cache_is_checked(tmp_path):
    first = generated("listops", (6, 2, 3), seed=1, workers=1)
    assert {name: len(split) for name, split in first.splits.items()} == {"train": 6, "valid": 2, "test": 3}
    (path,) = (tmp_path / "cache").glob("lra-listops-*.npz")
    written = path.stat().st_mtime_ns
    again = generated("listops", (6, 2, 3), seed=1, workers=1)
    assert path.stat().st_mtime_ns == written
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="again"):
        third = generated("listops", (6, 2, 3), seed=1, workers=1)
    assert path.read_bytes() == whole
    for other in (again, third):
        for name, split in first.splits.items():
            assert np.array_equal(split.inputs[0].symbols, other.splits[name].inputs[0].symbols)
            assert np.array_equal(split.labels, other.splits[name].labels)
    more = generated("listops", (9, 2, 3), seed=1, workers=1)
    assert np.array_equal(more.splits["test"].inputs[0].symbols, first.splits["test"].inputs[0].symbols)


def test_published_listops_files(tmp_path):
    (tmp_path / "listops").mkdir()
    for split in ("train", "val", "test"):
        rows = "".join(f"( ( ( [MAX {n} ) 0 ) ] )\t{n}\n" for n in range(5))
        (tmp_path / "listops" / f"basic_{split}.tsv").write_text("Source\tTarget\n" + rows)
    data = load("listops", data_dir=tmp_path, examples=3)
    assert data.source == "published files"
    assert [len(split) for split in data.splits.values()] == [3, 5, 5]


@pytest.mark.parametrize("name", ["text", "image", "retrieval"])
def test_errors_name_what_is_needed(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name} needs data: .*--data-dir.*LLN_DATA.*generated and work without"):
        load(name)
    with pytest.raises(ValueError, match="is missing: expected"):
        load(name, data_dir=tmp_path)


def test_wrong_labels(tmp_path):
    for split in ("train", "test"):
        write_jsonl(tmp_path / "imdb" / f"{split}.jsonl.gz", [{"text": "good", "label": n} for n in (0, 1, 2)])
    with pytest.raises(ValueError, match=r"text \(IMDB\) has .* labels from .* expected 0 to 1"):
        load("text", data_dir=tmp_path)
    write_jsonl(tmp_path / "imdb" / "test.jsonl.gz", [])
    with pytest.raises(ValueError, match="has"):
        load("text", data_dir=tmp_path)


def test_wrong_requests():
    with pytest.raises(ValueError, match="no task is called 'speech'; there are: text, listops"):
        load("speech")
    with pytest.raises(ValueError, match="dashes are for pathfinder"):
        load("listops", dashes=6)
    with pytest.raises(ValueError, match="read, not generated"):
        sizes("text")
    with pytest.raises(ValueError, match="examples to train on"):
        sizes("listops", 0)
