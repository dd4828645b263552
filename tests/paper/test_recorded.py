"""Figures and tables that show recorded runs, on made-up runs, and the command that makes the real ones."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from lln.paper import ablation, figure, figure1, load, reproduce, table, table3
from lln.paper.jobs import Request
from lln.report.page import update
from lln.report.table import Table
from lln.results import Result, add_result, read_results, write_results
from lln.tasks import schedule
from lln.tasks.run import run_result

TARGETS = [name for name in reproduce.targets() if name != "table5"]
ALL = [job for name in TARGETS for job in load(name).JOBS]
RECORDED = ("figure1", "figure8", "figure9", "figure10")


def write_run(folder: Path, name: str, *, accuracy: float = 0.5, loss: float = 4.0) -> None:
    run = folder / name
    run.mkdir(parents=True)
    config = {"seed": 0, "layers": 2, "width": 128, "heads": 2, "length": 128, "batch_size": 8, "source": "stdlib"}
    config |= {"image_size": 64, "patch_size": 8, "attention": "lln", "options": {}}
    provenance = {
        "command": "lln train",
        "commit": "abc",
        "seed": 0,
        "machine": {"processor": "a processor", "cores": 2},
    }
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
    number = 0
    for target in TARGETS:
        found = []
        for job in load(target).JOBS:
            write_run(folder / "runs", job.name, accuracy=0.5 + number / 1000)
            found.append(run_result(folder / "runs" / job.name))
            number += 1
        write_results(folder / f"{target}.jsonl", found)
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
    rows, _ = figure1.read(results)
    shown = {(row["attention"], row["quantity"], row["layer"]) for row in rows}
    forms = ("softmax", "lln", "lln_unbiased", "lln_decomposed")
    quantities = ("temperature", "entropy", "gap", "bias")
    assert shown == {(name, quantity, layer) for name in forms for quantity in quantities for layer in (1, 2)}


def test_figure_9_shows_the_mean_over_heads(results, tmp_path):
    rows = rows_of(figure("figure9", out=tmp_path, results=results)[2])
    assert {row["value"] for row in rows if row["quantity"] == "alpha"} == {"2.5"}
    assert {(row["layer"], row["value"]) for row in rows if row["quantity"] == "beta"} == {("1", "0"), ("2", "1")}


def test_table_mlm_has_the_published_rows_and_means_over_seeds(results, tmp_path):
    made, markdown, picture = table("mlm", results=results, out=tmp_path)
    assert markdown.read_text() == made.markdown()
    assert picture.stat().st_size > 5_000
    rows = {row[0]: row for row in made.rows}
    assert len(rows) == 18
    softmax = next(row for row in made.rows if row[5] == "87.0")
    runs = read_results(results / "mlm.jsonl", made_by="")
    accuracies = [runs[f"glue-sst2-softmax-seed{seed}"].summary["eval_accuracy"] for seed in (0, 1)]
    assert softmax[-3] == f"{50 * sum(accuracies):.1f}"
    assert softmax[-1] == "2"
    assert next(row for row in made.rows if row[5] == "49.8")[6:] == ["-"] * 7  # Reformer is not run


def test_table_3_has_published_and_ours(results, tmp_path):
    made, *_ = table("table3", results=results, out=tmp_path)
    assert [row[1] for row in made.rows] == ["81.37", "81.72", "-", "79.89"]
    assert "64 x 64 in patches of 8" in made.notes[0]
    assert "seed 0" in made.notes[1]


def test_the_ablation_compares_every_run_with_softmax(results, tmp_path):
    made, *_ = table("ablation", results=results, out=tmp_path)
    assert len(made.rows) == len(ablation.JOBS)
    assert {row[2] for row in made.rows} == {"+0.0%"}


def test_a_page_gets_its_tables(results):
    empty = "Before.\n<!-- table3: begin -->\nold\n<!-- table3: end -->\nAfter.\n"
    parts = {"table3": lambda file: table3.make(results, file).markdown()}
    page = update(empty, parts)
    assert "old" not in page
    assert "**Table 3: ViT on Dogs vs Cats**" in page
    assert page.startswith("Before.\n<!-- table3: begin -->\n")
    assert page.endswith("<!-- table3: end -->\nAfter.\n")
    assert update(page, parts) == page
    (results / "other-file.jsonl").write_bytes((results / "table3.jsonl").read_bytes())
    marks = "table3 of other-file:"
    assert update(empty.replace("table3:", marks), parts) == page.replace("table3:", marks)
    with pytest.raises(ValueError, match="no place for a table"):
        update("Nothing.", parts)
    with pytest.raises(ValueError, match="there is no table9"):
        update(empty.replace("3", "9"), parts)


def test_a_missing_run_is_named_with_the_command_that_makes_it(results, tmp_path):
    with pytest.raises(ValueError, match=r"table3.jsonl is missing; `lln reproduce table3` makes it"):
        table("table3", results=tmp_path, out=tmp_path / "out")
    found = read_results(results / "table3.jsonl", made_by="")
    write_results(tmp_path / "table3.jsonl", [x for x in found.values() if x.run != "vision-softmax"])
    with pytest.raises(ValueError, match="has no run vision-softmax; `lln reproduce table3` makes it"):
        table("table3", results=tmp_path, out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"no folder .*nowhere.* with results"):
        table("table3", results=tmp_path / "nowhere", out=tmp_path / "out")
    with pytest.raises(ValueError, match="there is no 'table7'; there are: table1"):
        table("table7", results=tmp_path, out=tmp_path / "out")
    with pytest.raises(ValueError, match="figure1 is a figure; tables are: table1"):
        table("figure1", results=tmp_path, out=tmp_path / "out")
    with pytest.raises(ValueError, match="no folder"):
        figure("figure1", out=tmp_path, results=tmp_path / "nowhere")


def test_markdown_of_a_table():
    text = Table("Title", ["", "a"], [["x", "1"]], ["note"]).markdown()
    assert text == "**Title**\n\n|  | a |\n| --- | ---: |\n| x | 1 |\n\nnote\n"


class Child:
    """A process that is finished when it is first polled, and leaves a finished run behind if it is to."""

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


def test_reproduce_runs_what_is_missing_once(child, tmp_path, capsys):
    runs, results = tmp_path / "runs", tmp_path / "results"
    write_run(runs, "vision-softmax")
    (tmp_path / "dogs-vs-cats").mkdir()
    (tmp_path / "dogs-vs-cats" / "train.zip").touch()
    reproduce.reproduce("table3", Request(runs=runs, results=results, data_dir=tmp_path))
    assert [Path(c[c.index("--out") + 1]).name for c in child.started] == [
        "vision-lln_diag_learned",
        "vision-lln_diag",
        "vision-linformer",
    ]
    assert all(command[:4] == [sys.executable, "-m", "lln.cli", "train"] for command in child.started)
    assert [path.name for path in results.iterdir()] == ["table3.jsonl"]
    assert sorted(read_results(results / "table3.jsonl", made_by="")) == [
        "vision-linformer",
        "vision-lln_diag",
        "vision-lln_diag_learned",
        "vision-softmax",
    ]
    capsys.readouterr()
    reproduce.reproduce("table3", Request(runs=runs, results=results))
    assert len(child.started) == 3
    assert "4 of them finished before" in capsys.readouterr().err


def test_results_have_no_paths_of_the_machine(tmp_path):
    runs, data = tmp_path / "runs", tmp_path / "data"
    write_run(runs, "glue")
    command = f"lln train glue --out {runs}/glue --from {runs}/mlm --data-dir {data}"
    (runs / "glue" / "provenance.json").write_text(json.dumps({"command": command}))
    kept = run_result(runs / "glue", data_dir=data)
    assert kept.origin["command"] == "lln train glue --out runs/glue --from runs/mlm --data-dir DATA"


def test_reproduce_goes_on_when_a_run_fails_and_reports_which(child, tmp_path):
    child.fails = {"mlm-lln"}
    with pytest.raises(ValueError, match="5 runs are not finished: mlm-lln, glue-mnli-lln-seed0"):
        reproduce.reproduce("mlm", Request(runs=tmp_path / "r", results=tmp_path / "s"))
    assert len(child.started) == len(reproduce.jobs("mlm")) - 4


def test_reproduce_refuses_data_before_a_run_starts(child, tmp_path, monkeypatch):
    folders = {"runs": tmp_path / "runs", "results": tmp_path / "results"}
    with pytest.raises(ValueError, match=r"--data-dir must name a folder with data, and .*nowhere is none"):
        reproduce.reproduce("mlm", Request(data_dir=tmp_path / "nowhere", **folders))
    monkeypatch.setenv("LLN_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="LLN_DATA must name a folder with data"):
        reproduce.reproduce("figure1", Request(**folders))
    data = tmp_path / "data"
    for name in ("wikitext-2/train.txt", "wikipedia/enwiki.jsonl.gz", "glue/sst2/train.tsv", "glue/sst2/dev.tsv"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).touch()
    with pytest.raises(ValueError, match="lacks what the runs read") as refused:
        reproduce.reproduce("all", Request(data_dir=data, **folders))
    missing = ("dogs-vs-cats/train.zip", "wikitext-2/valid.txt", "glue/mnli", "glue/qnli", "glue/qqp")
    assert [part.split(" is missing")[0].split()[-1] for part in str(refused.value).split(";")] == [
        str(data / name) for name in missing
    ]
    assert not child.started
    assert not folders["runs"].exists()
    (data / "wikitext-2" / "valid.txt").touch()
    reproduce.reproduce("figure1", Request(data_dir=data, **folders))
    assert len(child.started) == 4


def test_reproduce_names_a_damaged_run_before_another_starts(child, tmp_path):
    write_run(tmp_path / "runs", "one-head-lln")
    (tmp_path / "runs" / "one-head-lln" / "summary.json").write_text('{"steps": 2')
    with pytest.raises(ValueError, match=r"one-head-lln/summary.json is damaged: .*; remove it"):
        reproduce.reproduce("figure1", Request(runs=tmp_path / "runs", results=tmp_path / "s"))
    assert not child.started


def test_reproduce_finds_out_whether_it_can_write(child, tmp_path):
    (tmp_path / "file").touch()
    for folders in ({"runs": "file", "results": "s"}, {"runs": "r", "results": "file/s"}):
        paths = {name: tmp_path / folder for name, folder in folders.items()}
        with pytest.raises(OSError, match=r"file.* cannot be written: .*; choose another, --r"):
            reproduce.reproduce("figure1", Request(**paths))
    assert not child.started


@pytest.mark.parametrize("content", ['{"run": "a"}\n', "3\n", '{"rows": [\n{}\n'], ids=["part", "number", "cut"])
@pytest.mark.parametrize("name", ["table2", "table3", "table4", "table5"])
def test_a_damaged_result_file_is_named(name, content, tmp_path):
    (tmp_path / f"{name}.jsonl").write_text(content)
    with pytest.raises(ValueError, match=rf"{name}.jsonl is damaged: .*; restore it, or make it again with `lln "):
        table(name, results=tmp_path, out=tmp_path / "out")


def test_a_result_is_read_as_it_was_written(tmp_path):
    rows = [{"step": 1, "kind": "lln", "x": 0.1}, {"step": 2, "kind": "lln", "x": None}]
    tables = {"training": rows, "rows": [{"a": 1}, {"b": [2]}], "evaluations": [{"step": 1, "lists": [1, 2]}]}
    tables |= {"heads": [{"n": 1, "same": 1}, {"n": 1.0, "same": 1}]}
    path = tmp_path / "deep" / "results.jsonl"
    for run, command in (("a", "first"), ("b", "other"), ("a", "again")):
        add_result(path, Result(run, {"command": command}, {"options": {}}, {"loss": 0.5}, tables))
    found = read_results(path, made_by="")
    assert list(found) == ["a", "b"]
    assert found["a"] == Result("a", {"command": "again"}, {"options": {}}, {"loss": 0.5}, tables)
    assert [type(row["n"]) for row in found["a"].tables["heads"]] == [int, float]
    assert json.loads(path.read_text().splitlines()[0])["training"] == {"step": [1, 2], "kind": "lln", "x": [0.1, None]}


def test_parts_of_a_target_are_chosen_with_what_they_start_from(child, tmp_path, monkeypatch):
    monkeypatch.delenv("LLN_DATA", raising=False)
    chosen = reproduce.chosen_jobs("mlm", Request(methods=["elu"], tasks=["sst2"]))
    assert [job.name for job in chosen] == ["mlm-elu", "glue-sst2-elu-seed0"]
    assert len(reproduce.chosen_jobs("table5", Request(tasks=["listops"]))) == 8
    for options, message in (
        ({"methods": ["tnn"]}, "mlm has no method tnn; there are: softmax, "),
        ({"tasks": ["sst2"], "methods": ["elu"], "seeds": [1]}, "no run of this method, task and seed together"),
    ):
        with pytest.raises(ValueError, match=message):
            reproduce.chosen_jobs("mlm", Request(**options))
    with pytest.raises(ValueError, match="text needs data"):
        reproduce.reproduce("table5", Request(runs=tmp_path / "r", results=tmp_path / "s", tasks=["text"]))
    assert not child.started


def test_jobs_have_names_of_their_own_and_come_after_their_forerunners():
    names = [job.name for job in ALL]
    assert len(set(names)) == len(names)
    for job in ALL:
        assert job.after is None or names.index(job.after) < names.index(job.name)
    for name, message in (
        ("table9", "there is no 'table9'"),
        ("figure9", "no runs of its own are behind figure9; what can be reproduced: table3, "),
        ("table2", "table2 is measured, not trained: `lln bench model --out"),
    ):
        with pytest.raises(ValueError, match=message):
            reproduce.jobs(name)


def test_every_job_is_a_command_that_lln_train_takes():
    from typer.main import get_command

    from lln.cli.options import changed
    from lln.cli.train import EXPERIMENTS, app

    commands = get_command(app).commands
    for job in [*ALL, *load("table5").JOBS]:
        _, kind, *arguments = reproduce._command(job, Path("runs"), Path("data"))
        given = commands[kind].make_context(kind, arguments).params
        rest = {name: given.pop(name) for name in ("preset", "out", "data_dir", "quiet", "record")}
        EXPERIMENTS[kind][0].preset(rest["preset"], **changed(given))  # refuses what cannot be
        assert rest["out"] == Path("runs") / job.name
