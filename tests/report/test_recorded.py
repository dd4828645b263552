"""Figures and tables that show recorded runs, on made-up runs, and the command that makes the real ones."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from lln.report import figure_1
from lln.report.figures import RECORDED, figure
from lln.report.page import update
from lln.report.tables import Table, table
from lln.tasks import reproduce, schedule

ALL = reproduce.jobs("all")


def write_run(folder: Path, name: str, *, accuracy: float = 0.5, loss: float = 4.0) -> None:
    run = folder / name
    run.mkdir(parents=True)
    config = {"seed": 0, "layers": 2, "width": 128, "heads": 2, "length": 128, "batch_size": 8, "source": "stdlib"}
    config |= {"image_size": 64, "patch_size": 8, "attention": "lln", "options": {}}
    provenance = {"commit": "abc", "machine": {"processor": "a processor", "cores": 2}}
    summary = {"steps": 20, "tokens": 1000, "loss": loss, "eval_loss": loss, "eval_accuracy": accuracy}
    for part, content in (("config", config), ("provenance", provenance), ("summary", summary)):
        (run / f"{part}.json").write_text(json.dumps(content))
    lines = [{"step": step, "loss": loss + 1 / step, "loss_scale": 2.0**step} for step in range(1, 11)]
    lines += [{"step": 20, "eval_loss": loss, "eval_accuracy": accuracy}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = {"temperature": 1.0, "entropy": 5.0, "gap": 0.5, "bias": 0.1, "alpha": 2.0, "beta": None}
    records = [
        {"step": step, "layer": f"layer.{layer}", "head": head} | measured | {"alpha": 2.0 + head, "beta": 1.0 * layer}
        for step in (0, 10)
        for layer in range(2)
        for head in range(2)
    ]
    (run / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for number, job in enumerate(ALL):
        write_run(folder / "runs", job.name, accuracy=0.5 + number / 1000)
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize("number", RECORDED)
def test_recorded_figures_are_drawn(number, results, tmp_path):
    png, svg, data = figure(number, out=tmp_path, results=results)
    assert png.stat().st_size > 5_000
    assert svg.stat().st_size > 5_000
    assert len(rows_of(data)) >= 8


def test_figure_1_shows_all_forms_of_lln(results):
    rows, _ = figure_1.read(results)
    shown = {(row["attention"], row["quantity"], row["layer"]) for row in rows}
    forms = ("softmax", "lln", "lln_unbiased", "lln_decomposed")
    quantities = ("temperature", "entropy", "gap", "bias")
    assert shown == {(name, quantity, layer) for name in forms for quantity in quantities for layer in (1, 2)}


def test_figure_9_shows_the_mean_over_heads(results, tmp_path):
    rows = rows_of(figure(9, out=tmp_path, results=results)[2])
    assert {row["value"] for row in rows if row["quantity"] == "alpha"} == {"2.5"}
    assert {(row["layer"], row["value"]) for row in rows if row["quantity"] == "beta"} == {("1", "0"), ("2", "1")}


def test_table_mlm_has_the_published_rows_and_means_over_seeds(results, tmp_path):
    made, markdown, picture = table("mlm", results=results, out=tmp_path)
    assert markdown.read_text() == made.markdown()
    assert picture.stat().st_size > 5_000
    rows = {row[0]: row for row in made.rows}
    assert len(rows) == 15
    softmax = next(row for row in made.rows if row[5] == "87.0")
    runs = [json.loads((results / "runs" / f"glue-sst2-softmax-seed{s}" / "summary.json").read_text()) for s in (0, 1)]
    assert softmax[-3] == f"{50 * sum(run['eval_accuracy'] for run in runs):.1f}"
    assert softmax[-1] == "2"
    assert next(row for row in made.rows if row[5] == "49.8")[6:] == ["-"] * 7  # Reformer is not run


def test_table_3_has_published_and_ours(results, tmp_path):
    made, *_ = table(3, results=results, out=tmp_path)
    assert [row[1] for row in made.rows] == ["81.37", "81.72", "-", "79.89"]
    assert "64 x 64 in patches of 8" in made.notes[0]
    assert "seed 0" in made.notes[1]


def test_the_ablation_compares_every_run_with_softmax(results, tmp_path):
    made, *_ = table("ablation", results=results, out=tmp_path)
    assert len(made.rows) == len(reproduce.ABLATION)
    assert {row[2] for row in made.rows} == {"+0.0%"}


def test_a_page_gets_its_tables(results):
    empty = "Before.\n<!-- table 3: begin -->\nold\n<!-- table 3: end -->\nAfter.\n"
    page = update(empty, results)
    assert "old" not in page
    assert "**Table 3: ViT on Dogs vs Cats**" in page
    assert page.startswith("Before.\n<!-- table 3: begin -->\n")
    assert page.endswith("<!-- table 3: end -->\nAfter.\n")
    assert update(page, results) == page
    of_folder = f"table 3 of {results.name}:"
    assert update(empty.replace("table 3:", of_folder), results.parent) == page.replace("table 3:", of_folder)
    with pytest.raises(ValueError, match="no place for a table"):
        update("Nothing.", results)
    with pytest.raises(ValueError, match="there is no table 9"):
        update(empty.replace("3", "9"), results)


def test_a_missing_run_is_named_with_the_command_that_makes_it(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="no run vision-softmax; `lln reproduce table3` makes it"):
        table(3, results=tmp_path, out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"no folder .*nowhere.* with results"):
        table(3, results=tmp_path / "nowhere", out=tmp_path / "out")
    with pytest.raises(ValueError, match="there is no table 7"):
        table(7, results=tmp_path, out=tmp_path / "out")
    with pytest.raises(ValueError, match="no folder"):
        figure(1, out=tmp_path, results=tmp_path / "nowhere")


def test_markdown_of_a_table():
    text = Table("Title", ["", "a"], [["x", "1"]], ["note"]).markdown()
    assert text == "**Title**\n\n|  | a |\n| --- | ---: |\n| x | 1 |\n\nnote\n"


class Child:
    """A process that is finished as soon as it is looked at, and leaves a finished run behind if it is to."""

    started: ClassVar[list[list[str]]] = []
    fails: ClassVar[set[str]] = set()

    def __init__(self, command, **options):
        folder = Path(command[command.index("--out") + 1])
        if "--from" in command:
            assert (Path(command[command.index("--from") + 1]) / "summary.json").exists()
        Child.started.append(command)
        self.returncode = 1 if folder.name in Child.fails else 0
        if not self.returncode:
            write_run(folder.parent, folder.name)

    def poll(self):
        return self.returncode


@pytest.fixture
def child(monkeypatch):
    Child.started, Child.fails = [], set()
    monkeypatch.setattr(subprocess, "Popen", Child)
    monkeypatch.setattr(schedule.time, "sleep", lambda seconds: None)
    return Child


def test_reproduce_runs_what_is_missing_once(child, tmp_path):
    runs, results = tmp_path / "runs", tmp_path / "results" / "runs"
    write_run(runs, "vision-softmax")
    (tmp_path / "dogs-vs-cats").mkdir()
    (tmp_path / "dogs-vs-cats" / "train.zip").touch()
    said = []
    reproduce.reproduce("table3", runs=runs, results=results, data_dir=tmp_path, say=said.append)
    assert [Path(c[c.index("--out") + 1]).name for c in child.started] == [
        "vision-lln_diag_learned",
        "vision-lln_diag",
        "vision-linformer",
    ]
    assert all(command[:4] == [sys.executable, "-m", "lln.cli", "train"] for command in child.started)
    assert sorted(path.name for path in results.iterdir()) == [
        "vision-linformer",
        "vision-lln_diag",
        "vision-lln_diag_learned",
        "vision-softmax",
    ]
    reproduce.reproduce("table3", runs=runs, results=results, data_dir=None, say=said.append)
    assert len(child.started) == 3
    assert "4 of them finished before" in said[-1]


def test_results_have_no_paths_of_the_machine(tmp_path):
    runs, data = tmp_path / "runs", tmp_path / "data"
    write_run(runs, "glue")
    command = f"lln train glue --out {runs}/glue --from {runs}/mlm --data-dir {data}"
    (runs / "glue" / "provenance.json").write_text(json.dumps({"command": command}))
    reproduce.collect(runs / "glue", tmp_path / "results" / "glue", data)
    kept = json.loads((tmp_path / "results" / "glue" / "provenance.json").read_text())
    assert kept["command"] == "lln train glue --out runs/glue --from runs/mlm --data-dir DATA"


def test_reproduce_goes_on_when_a_run_fails_and_says_which(child, tmp_path):
    child.fails = {"mlm-lln"}
    with pytest.raises(ValueError, match="5 runs are not finished: mlm-lln, glue-mnli-lln-seed0"):
        reproduce.reproduce("mlm", runs=tmp_path / "r", results=tmp_path / "s", data_dir=None, say=lambda text: None)
    assert len(child.started) == len(reproduce.jobs("mlm")) - 4


def test_reproduce_refuses_data_before_a_run_starts(child, tmp_path, monkeypatch):
    folders = {"runs": tmp_path / "runs", "results": tmp_path / "results", "say": lambda text: None}
    with pytest.raises(ValueError, match=r"--data-dir must name a folder with data, and .*nowhere is none"):
        reproduce.reproduce("mlm", data_dir=tmp_path / "nowhere", **folders)
    monkeypatch.setenv("LLN_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="LLN_DATA must name a folder with data"):
        reproduce.reproduce("figure1", data_dir=None, **folders)
    data = tmp_path / "data"
    for name in ("wikitext-2/train.txt", "wikipedia/enwiki.jsonl.gz", "glue/sst2/train.tsv", "glue/sst2/dev.tsv"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).touch()
    with pytest.raises(ValueError, match="lacks what the runs read") as refused:
        reproduce.reproduce("all", data_dir=data, **folders)
    missing = ("wikitext-2/valid.txt", "glue/mnli", "glue/qnli", "glue/qqp", "dogs-vs-cats/train.zip")
    assert [part.split(" is missing")[0].split()[-1] for part in str(refused.value).split(";")] == [
        str(data / name) for name in missing
    ]
    assert not child.started
    assert not folders["runs"].exists()
    (data / "wikitext-2" / "valid.txt").touch()
    reproduce.reproduce("figure1", data_dir=data, **folders)
    assert len(child.started) == 4


def test_reproduce_names_a_damaged_run_before_another_starts(child, tmp_path):
    write_run(tmp_path / "runs", "one-head-lln")
    (tmp_path / "runs" / "one-head-lln" / "summary.json").write_text('{"steps": 2')
    with pytest.raises(ValueError, match=r"one-head-lln/summary.json is damaged: .*; remove it"):
        reproduce.reproduce(
            "figure1", runs=tmp_path / "runs", results=tmp_path / "s", data_dir=None, say=lambda text: None
        )
    assert not child.started


def test_reproduce_finds_out_whether_it_can_write(child, tmp_path):
    (tmp_path / "file").touch()
    for folders in ({"runs": "file", "results": "s"}, {"runs": "r", "results": "file/runs"}):
        paths = {name: tmp_path / folder for name, folder in folders.items()}
        with pytest.raises(OSError, match=r"file.* cannot be written: .*; choose another, --r"):
            reproduce.reproduce("figure1", data_dir=None, say=lambda text: None, **paths)
    assert not child.started


@pytest.mark.parametrize("part", ["config", "provenance", "summary"])
def test_a_damaged_file_of_a_run_is_named(part, results, tmp_path):
    shutil.copytree(results / "runs", tmp_path / "runs")
    file = tmp_path / "runs" / "vision-softmax" / f"{part}.json"
    file.write_text(file.read_text()[:20])
    with pytest.raises(ValueError, match=rf"vision-softmax/{part}.json is damaged: .*; make the run anew"):
        table(3, results=tmp_path, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("number", "name", "remedy"),
    [
        (2, "model.json", "measure it anew with the option --fresh"),
        (4, "lra-cost.json", "record it anew with `lln lra bench`"),
        (5, "lra.json", "record it anew with `lln lra run`"),
    ],
    ids=["table 2", "table 4", "table 5"],
)
@pytest.mark.parametrize("content", ["", '[{"rows": [', "3"], ids=["empty", "cut", "number"])
def test_a_damaged_record_is_named(number, name, remedy, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*; {remedy}"):
        table(number, results=tmp_path, out=tmp_path / "out")


def test_jobs_have_names_of_their_own_and_come_after_their_forerunners():
    names = [job.name for job in ALL]
    assert len(set(names)) == len(names)
    for job in ALL:
        assert job.after is None or names.index(job.after) < names.index(job.name)
    with pytest.raises(ValueError, match="nothing is called 'table9' here"):
        reproduce.jobs("table9")
