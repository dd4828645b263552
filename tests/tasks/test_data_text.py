"""Sources of text."""

import gzip
import json

import datasets
import pytest

from lln.tasks.data import text
from lln.tasks.data.text import read_documents


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("LLN_DATA", raising=False)
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


def both(source, data_dir=None):
    return [read_documents(str(source), split, data_dir) for split in ("train", "validation")]


def test_the_standard_library_is_text_on_every_machine():
    train, validation = both("stdlib")
    assert len(train) > 200
    assert len(validation) >= 5
    assert any('"""Heap queue algorithm' in document for document in train + validation)
    assert not set(train) & set(validation)
    assert read_documents("stdlib", "validation", None) == validation


def test_wikitext_is_split_at_titles(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    lines = [
        "",
        "= One =",
        "",
        "First <unk> .",
        "= 4 =",
        "Second .",
        "",
        "= = Part = =",
        "",
        "Third .",
        "",
        "= Two =",
        "",
    ]
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "wikitext-2" / name).write_bytes("\r\n".join(f" {line} " for line in lines).encode())
    train, validation = both("wikitext-2", tmp_path)
    assert train == ["= One =\nFirst <unk> .\n= 4 =\nSecond .\n= = Part = =\nThird .", "= Two ="]
    assert validation == train
    (tmp_path / "wikitext-2" / "valid.txt").unlink()
    with pytest.raises(ValueError, match=r"valid\.txt is missing: expected WikiText-2"):
        both("wikitext-2", tmp_path)


def test_wikipedia_is_split_by_id_and_joins_with_others(tmp_path):
    (tmp_path / "wikipedia").mkdir()
    (tmp_path / "wikitext-2").mkdir()
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "wikitext-2" / name).write_text(" \n = One = \n \n")

    def write(ids):
        with gzip.open(tmp_path / "wikipedia" / "enwiki.jsonl.gz", "wt") as file:
            for i in ids:
                file.write(json.dumps({"id": i, "title": "T", "text": f"text {i}" if i else ""}) + "\n")

    write(range(1000))
    train, validation = both("wikipedia", tmp_path)
    assert len(train) + len(validation) == 999  # the empty one is left out
    assert 15 <= len(validation) <= 45
    write(range(0, 1000, 2))  # a document's side does not depend on the others
    fewer_train, fewer_validation = both("wikipedia", tmp_path)
    assert set(fewer_train) < set(train)
    assert set(fewer_validation) < set(validation)
    assert read_documents("wikitext-2+wikipedia", "train", tmp_path) == ["= One =", *fewer_train]


def test_files_are_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "HELD_OUT", 0.3)
    expected = [f"a {i}\nb {i}" for i in range(40)]
    (tmp_path / "some.txt").write_bytes("\n \n\n".join(expected).replace("\n", "\r\n").encode("utf-8-sig"))
    rows = [json.dumps({"text": document}) for document in expected]
    (tmp_path / "some.jsonl").write_text("\n".join(rows))
    (tmp_path / "some.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    splits = both(tmp_path / "some.jsonl")
    assert sorted(splits[0] + splits[1]) == sorted(expected)
    assert both(tmp_path / "some.jsonl.gz") == splits
    assert both(tmp_path / "some.txt") == splits


def test_data_set_folders_are_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "HELD_OUT", 0.3)
    rows = datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(20)], "number": list(range(20))})
    rows.save_to_disk(tmp_path / "one")
    train, validation = both(tmp_path / "one")
    assert sorted(train + validation) == sorted(rows["text"])
    datasets.DatasetDict(train=rows, validation=rows.select([3])).save_to_disk(tmp_path / "two")
    assert both(tmp_path / "two") == [rows["text"][:], ["text 3"]]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "files" / "validation.jsonl").write_text('{"text": "b"}\n')
    assert both(tmp_path / "files") == [["a"], ["b"]]
    rows.rename_column("text", "content").save_to_disk(tmp_path / "three")
    with pytest.raises(ValueError, match="three: no column 'text' among"):
        both(tmp_path / "three")
    rows.remove_columns("text").rename_column("number", "text").save_to_disk(tmp_path / "four")
    with pytest.raises(ValueError, match="four: column 'text' holds int64"):
        both(tmp_path / "four")
    (tmp_path / "five").mkdir()
    with pytest.raises(ValueError, match="five cannot be read as a Hugging Face data set"):
        both(tmp_path / "five")


def test_the_hub_is_a_source_when_it_can_be_reached(monkeypatch):
    def load(name, config):
        if name == "away":
            raise ConnectionError("Couldn't reach it\nand more")
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": [f"{name} {config}"]})})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_documents("hub:me/data:part", "train", None) == ["me/data part"]
    assert read_documents("hub:me/data", "train", None) == ["me/data None"]
    with pytest.raises(ValueError, match="'away' could not be had from the hub: ConnectionError: Couldn't reach it;"):
        read_documents("hub:away", "train", None)


def test_sources_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown text source 'wikitext-3'"):
        read_documents("wikitext-3", "train", None)
    with pytest.raises(ValueError, match="needs data: give --data-dir or set LLN_DATA"):
        read_documents("wikitext-2", "train", None)
    with pytest.raises(ValueError, match="wikipedia is missing"):
        read_documents("wikipedia", "train", tmp_path)
    with pytest.raises(ValueError, match="a part twice"):
        read_documents("stdlib+stdlib", "train", None)
    with pytest.raises(ValueError, match="split must be"):
        read_documents("stdlib", "test", None)
    (tmp_path / "a+b.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"a\+b\.txt' has no train documents"):
        read_documents(str(tmp_path / "a+b.txt"), "train", None)
