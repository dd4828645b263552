"""GLUE in each of its formats."""

import gzip
import json

import datasets
import pytest

from lln.tasks.data.glue import TASKS, read_glue
from lln.tasks.metrics import METRICS
from lln.tasks.presets import GLUE_TASKS


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "glue" / "sst2").mkdir(parents=True)
    for name in ("mnli", "qnli", "qqp"):
        (tmp_path / "glue" / name).mkdir()
    return tmp_path


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8-sig")


def test_pairs_are_read_from_json_lines(folder):
    mnli = [("p", "h", label) for label in ("neutral", "contradiction", "entailment", 2)]
    rows = [dict(zip(("premise", "hypothesis", "label"), row, strict=True)) for row in mnli]
    write_jsonl(folder / "glue/mnli/dev_matched.jsonl", *rows)
    read = read_glue("mnli", "validation", folder)
    assert read["label"][:] == [1, 2, 0, 2]
    assert read[0] == {"text_a": "p", "text_b": "h", "label": 1}
    assert read.features["label"].names == ["entailment", "neutral", "contradiction"]
    write_jsonl(folder / "glue/qqp/train.jsonl", {"question1": "a", "question2": "", "label": 1, "src": "x"})
    assert read_glue("qqp", "train", folder)[0] == {"text_a": "a", "text_b": "", "label": 1}
    write_jsonl(folder / "glue/qnli/dev.jsonl", {"question": "a", "sentence": "b", "label": "not_entailment"})
    assert read_glue("qnli", "validation", folder)[0] == {"text_a": "a", "text_b": "b", "label": 1}


@pytest.mark.parametrize(
    "table", ["label\tsentence\r\n1\tgood .\r\n0\tbad\r\n", "sentence\tlabel\ngood .\t1\nbad\t0\n"]
)
def test_single_texts_are_read_from_tables(folder, table):
    (folder / "glue/sst2/train.tsv").write_text(table, newline="")
    read = read_glue("sst2", "train", folder)
    assert read[:] == {"text_a": ["good .", "bad"], "text_b": [None, None], "label": [1, 0]}


def test_published_layouts_are_read(folder):
    rows = datasets.Dataset.from_dict({"premise": ["p"], "hypothesis": ["h"], "label": [2], "idx": [0]})
    rows.to_parquet(folder / "glue/mnli/validation_matched-00000-of-00001.parquet")
    expected = {"text_a": "p", "text_b": "h", "label": 2}
    assert read_glue("mnli", "validation", folder)[0] == expected
    qqp = rows.rename_columns({"premise": "question1", "hypothesis": "question2"})
    datasets.DatasetDict(train=qqp, validation=qqp).save_to_disk(folder / "glue/qqp")
    with pytest.raises(ValueError, match="validation row 0: unknown label 2"):
        read_glue("qqp", "validation", folder)
    with pytest.raises(ValueError, match=r"train\.jsonl is missing: expected train examples \(or train-\*\.parquet"):
        read_glue("mnli", "train", folder)


def test_the_hub_is_used_without_a_folder(monkeypatch):
    rows = datasets.Dataset.from_dict({"sentence": ["s"], "label": [1]})
    asked = []

    def load(name, config):
        asked.append((name, config))
        return datasets.DatasetDict(train=rows, validation=rows.remove_columns("label"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_glue("sst2", "train", None)[0] == {"text_a": "s", "text_b": None, "label": 1}
    assert asked == [("nyu-mll/glue", "sst2")]
    with pytest.raises(ValueError, match="no column 'label'"):
        read_glue("sst2", "validation", None)

    def away(name, config):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", away)
    with pytest.raises(ValueError, match=r"'sst2': give --data-dir or set LLN_DATA to a folder with glue/sst2/"):
        read_glue("sst2", "train", None)


def test_what_is_wrong_is_named(folder):
    write_jsonl(folder / "glue/qnli/train.jsonl", {"question": "a", "sentence": "b", "label": "maybe"})
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1: unknown label 'maybe'; expected entailment, not_en"):
        read_glue("qnli", "train", folder)
    write_jsonl(folder / "glue/qnli/train.jsonl", {"question1": "a", "sentence": "b", "label": 0})
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1: no 'question'"):
        read_glue("qnli", "train", folder)
    (folder / "glue/sst2/dev.tsv").write_text("label\tsentence\n1\tgood\n-1\tbad\n")
    with pytest.raises(ValueError, match=r"dev\.tsv, line 3: unknown label '-1'"):
        read_glue("sst2", "validation", folder)
    (folder / "glue/sst2/dev.tsv").write_text("label\tsentence\n")
    with pytest.raises(ValueError, match="'sst2' has no validation examples"):
        read_glue("sst2", "validation", folder)
    with pytest.raises(ValueError, match="unknown GLUE task 'wnli': expected one of mnli, qnli, qqp, sst2, cola"):
        read_glue("wnli", "train", folder)
    with pytest.raises(ValueError, match="split must be"):
        read_glue("sst2", "test", folder)
    (folder / "glue/mnli").rmdir()
    with pytest.raises(ValueError, match=r"mnli is missing: expected a folder with train\.jsonl"):
        read_glue("mnli", "train", folder)


def test_tasks_of_glue_and_their_metrics():
    assert tuple(TASKS) == GLUE_TASKS
    assert {name for name, task in TASKS.items() if "f1" in task.metrics} == {"qqp", "mrpc"}
    assert {name for name, task in TASKS.items() if "accuracy" not in task.metrics} == {"stsb"}
    assert all(set(task.metrics) <= METRICS.keys() for task in TASKS.values())
    assert TASKS["cola"].metrics[0] == "matthews"


def test_scores_are_read_as_numbers(folder):
    (folder / "glue/stsb").mkdir()
    rows = [{"sentence1": "a", "sentence2": "b", "score": score} for score in (0, 3.75, 5.0)]
    write_jsonl(folder / "glue/stsb/dev.jsonl", *rows)
    assert read_glue("stsb", "validation", folder)["label"][:] == [0.0, 3.75, 5.0]
    for bad, message in ((5.5, "the score is 5.5; expected a number from 0 to 5"), ("high", "'score' is a str")):
        write_jsonl(folder / "glue/stsb/dev.jsonl", {"sentence1": "a", "sentence2": "b", "score": bad})
        with pytest.raises(ValueError, match=rf"dev\.jsonl, line 1: {message}"):
            read_glue("stsb", "validation", folder)


def test_reviews_lie_beside_glue(folder):
    (folder / "imdb").mkdir()
    with gzip.open(folder / "imdb/test.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": 3, "text": "good", "label": 1, "rating": 8}) + "\n")
    assert read_glue("imdb", "validation", folder)[0] == {"text_a": "good", "text_b": None, "label": 1}
    with pytest.raises(ValueError, match=r"imdb/train\.jsonl\.gz is missing"):
        read_glue("imdb", "train", folder)
