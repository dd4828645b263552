"""`lln reproduce table1`: its plan, its lines of results, what is run again, and the table."""

import json
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest
import transformers

from lln.linearize.config import BEST
from lln.paper import table, table1_runs
from lln.paper import table1 as report
from lln.paper.jobs import Request
from lln.paper.table1_runs import METHODS, SIX, STEPS, FineTuning, cells, chosen_cells, reproduce_table_1
from lln.tasks import schedule
from lln.tasks.presets import GLUE_TASKS, PRETRAINED

METRICS = {"accuracy": 0.5, "f1": 0.6, "matthews": 0.2, "spearman": 0.8, "pearson": 0.7, "loss": 0.4}


def test_the_plan():
    planned = cells()
    assert len(set(planned)) == len(planned) == 6 * 9 * 3 + 12 * 4
    assert set(METHODS) == set(report.ROWS)
    assert set(PRETRAINED) == set(GLUE_TASKS) == set(report.TITLES)
    assert all(PRETRAINED[task]["train_examples"] <= 8000 for task in PRETRAINED)
    first = planned[: 6 * 8]
    assert {cell.method for cell in first} == set(SIX)
    assert {cell.seed for cell in first} == {0}
    assert "imdb" not in {cell.task for cell in first}


def test_every_method_has_the_same_number_of_steps():
    for method in METHODS:
        if method != "softmax":
            assert sum(METHODS[method].stage_steps(STEPS).values()) == sum(STEPS.values())
    assert METHODS["lln_diag_ours"].stage_steps(STEPS) == STEPS
    assert METHODS["lln_ours"].stage_steps(STEPS)["join"] == 0
    for method in ("elu", "lln", "lln_diag", "performer"):  # nothing to align or join
        assert METHODS[method].stage_steps(STEPS)["distil"] == sum(STEPS.values())
    assert METHODS["hedgehog"].stage_steps(STEPS) == {
        "align": STEPS["align"],
        "join": 0,
        "distil": STEPS["join"] + STEPS["distil"],
    }


def test_the_papers_forms_leave_out_what_linearize_adds():
    for method, attention in (("lln", "lln"), ("lln_diag", "lln_diag")):
        assert METHODS[method].options.keys() == BEST[attention].keys()


def test_filters():
    assert chosen_cells(Request(methods=["elu"], tasks=["rte"], seeds=[2])) == [FineTuning("elu", "rte", 2)]
    assert len(chosen_cells(Request(methods=["performer"]))) == 4
    assert len(chosen_cells(Request(tasks=["imdb"], seeds=[0]))) == 6
    for given, message in (
        ({"methods": ["linformer"]}, "table1 has no method linformer; there are: softmax, "),
        ({"tasks": ["wnli"]}, "table1 has no task wnli; there are: mnli, "),
        ({"seeds": [3]}, "table1 has no seed 3; there are: 0, 1, 2"),
        ({"methods": ["tnn"], "tasks": ["rte"]}, "table1 has no run of .* together: softmax, "),
    ):
        with pytest.raises(ValueError, match=message):
            chosen_cells(Request(**given))


class Child:
    """A process that is finished as soon as it is looked at, and leaves what the real one would."""

    started: ClassVar[list[list[str]]] = []
    fails: ClassVar[set[str]] = set()

    def __init__(self, command, **options):
        folder = Path(command[command.index("--out") + 1])
        Child.started.append(command[3:])
        self.returncode = 1 if folder.name in Child.fails else 0
        if self.returncode:
            return
        if command[3] == "linearize":
            (folder / "work").mkdir(parents=True)
            (folder / "work" / "summary.json").write_text('{"finished": true}')
            settings = {f"{stage}_steps": int(command[command.index(f"--{stage}-steps") + 1]) for stage in STEPS} | {
                "batch_tokens": 2048,
                "length": int(command[command.index("--length") + 1]),
            }
            kept = {"distil": [{"cosine": 0.9, "length": 32}, {"cosine": 0.8, "rank_correlation": 0.7, "length": 512}]}
            (folder / "report.json").write_text(json.dumps({"settings": settings, "kept": kept}))
            return
        start = Path(command[command.index("--from") + 1])
        assert start.name == "model" or (start / "report.json").exists()
        folder.mkdir()
        (folder / "model").mkdir()
        summary = {f"eval_{name}": value for name, value in METRICS.items()} | {"attention": "lln", "options": {}}
        summary |= {"train_examples": 9, "eval_examples": 5, "steps": 3, "tokens": 50, "seconds": 1.5, "parameters": 7}
        rate = float(command[command.index("--learning-rate") + 1]) if "--learning-rate" in command else 1e-4
        origin = {"command": " ".join(["lln", *command[3:]]), "commit": "abc", "threads": 1, "torch": "2"}
        origin |= {"machine": {"processor": "a processor", "cores": 2}}
        (folder / "summary.json").write_text(json.dumps(summary | {"learning_rate": rate}))
        (folder / "provenance.json").write_text(json.dumps(origin))

    def poll(self):
        return self.returncode

    def terminate(self):
        pass


@pytest.fixture
def child(monkeypatch):
    Child.started, Child.fails = [], set()
    monkeypatch.setattr(subprocess, "Popen", Child)
    monkeypatch.setattr(schedule, "POLL_SECONDS", 0)
    return Child


@pytest.fixture
def places(tmp_path):
    """A tiny model, and empty files of data."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.utils.logging.disable_progress_bar()
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=512, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    data = tmp_path / "data"
    for name in ("glue/rte/train.jsonl", "glue/rte/dev.jsonl", "wikitext-2/train.txt", "wikitext-2/valid.txt"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).touch()
    (data / "wikipedia").mkdir()
    (data / "wikipedia" / "enwiki.jsonl.gz").touch()
    return {"runs": tmp_path / "runs", "results": tmp_path / "results", "data_dir": data}


def run(places, **options):
    reproduce_table_1(places["runs"].parent / "model", Request(**places | options))


def lines(places):
    return [json.loads(line) for line in (places["results"] / "table1.jsonl").read_text().splitlines()]


def test_runs_become_lines_and_their_folders_go(child, places, capsys):
    run(places, methods=["softmax", "elu"], tasks=["rte"], seeds=[0])
    found = lines(places)
    assert [(x["method"], x["task"], x["seed"]) for x in found] == [("softmax", "rte", 0), ("elu", "rte", 0)]
    assert found[0]["metrics"] == {"accuracy": 0.5, "loss": 0.4}
    assert "linearize" not in found[0]
    steps = {"align_steps": 0, "join_steps": 0, "distil_steps": sum(STEPS.values())}
    assert found[1]["linearize"] == steps | {
        "tokens": sum(STEPS.values()) * 2048,
        "length": 128,
        "cosine": 0.8,
        "rank_correlation": 0.7,
    }
    wanted = {"options", "learning_rate", "train_examples", "epochs", "seconds", "parameters", "commit", "machine"}
    assert wanted <= found[1].keys()
    assert str(places["runs"].parent) not in json.dumps(found)
    assert "--from runs/table1/linear-elu-128" in found[1]["command"]
    assert "--data-dir DATA" in found[1]["command"]
    assert not (places["runs"] / "table1" / "elu-rte-seed0").exists()
    assert "jobs to go, about" in capsys.readouterr().err
    assert [command[0] for command in child.started] == ["train", "linearize", "train"]


def test_what_is_recorded_is_not_run_again(child, places, capsys):
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    before = len(child.started)
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    assert "1 of them finished before" in capsys.readouterr().err
    assert len(child.started) == before
    run(places, methods=["elu"], tasks=["rte"])
    new = child.started[before:]
    assert [command[:2] for command in new] == [["train", "glue"]] * 2  # it is linear already
    # The rate that the first seed chose is that of the others.
    assert all(command[command.index("--learning-rate") + 1] == "0.0001" for command in new)
    assert [x["seed"] for x in lines(places)] == [0, 1, 2]


def test_runs_from_another_model_or_with_other_steps_are_not_mixed(child, places):
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    (places["runs"].parent / "model").rename(places["runs"].parent / "other")
    with pytest.raises(ValueError, match=r"table1\.jsonl holds runs from model, not from other"):
        reproduce_table_1(places["runs"].parent / "other", Request(**places, methods=["elu"]))
    (places["runs"].parent / "other").rename(places["runs"].parent / "model")
    path = places["runs"] / "table1" / "linear-elu-128" / "report.json"
    report = json.loads(path.read_text())
    for changed in (
        report | {"settings": report["settings"] | {"distil_steps": 7}},
        report | {"origin": {"model": "some/other"}},
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"linear-elu-128 was made from another model or with other steps"):
            run(places, methods=["elu"], tasks=["rte"])
    assert len(child.started) == 2
    result = places["results"] / "table1.jsonl"
    row = lines(places)[0]
    result.write_text(json.dumps(row | {"linearize": row["linearize"] | {"distil_steps": 7}}) + "\n")
    with pytest.raises(ValueError, match=r"holds a run of elu that was made linear in other steps"):
        run(places, methods=["softmax"], tasks=["rte"])


def test_tasks_of_other_lengths_start_from_a_model_made_linear_for_theirs(child, places):
    data = places["data_dir"] / "imdb"
    data.mkdir()
    for name in ("train.jsonl.gz", "test.jsonl.gz"):
        (data / name).touch()
    run(places, methods=["elu"], tasks=["rte", "imdb"], seeds=[0])
    given = [command[command.index("--length") + 1] for command in child.started if command[0] == "linearize"]
    assert given == ["128", "512"]
    assert {x["task"]: x["linearize"]["length"] for x in lines(places)} == {"rte": 128, "imdb": 512}


def test_other_seeds_alone_choose_a_rate_themselves(child, places):
    run(places, methods=["softmax"], tasks=["rte"], seeds=[1])
    assert "--learning-rate" not in child.started[0]


def test_a_method_that_fails_is_named_and_the_others_go_on(child, places):
    child.fails = {"linear-elu-128"}
    with pytest.raises(ValueError, match=r"2 runs are not finished: linear-elu-128, elu-rte-seed0; the same command"):
        run(places, methods=["softmax", "elu"], tasks=["rte"], seeds=[0])
    assert [x["method"] for x in lines(places)] == ["softmax"]
    child.fails = {"softmax-rte-seed0"}
    (places["results"] / "table1.jsonl").unlink()
    with pytest.raises(ValueError, match="3 runs are not finished: softmax-rte-seed0"):  # others need the first's rate
        run(places, methods=["softmax"], tasks=["rte"])


def test_the_other_options_of_a_method_reach_linearize(child, places):
    run(places | {"data_dir": None}, methods=["lln_diag"], tasks=["sst2"], seeds=[0])
    command = child.started[0]
    given = [command[i + 1] for i, part in enumerate(command) if part == "--option"]
    assert "form=paper" in given
    assert "projection=False" in given
    assert "near=blocks" in given


def test_refused(child, places, tmp_path):
    with pytest.raises(ValueError, match=r"lacks what the runs read: .*glue/cola is missing"):
        run(places, tasks=["cola", "rte"])
    with pytest.raises(ValueError, match="at least one job must run at a time"):
        run(places, side_by_side=0)
    for model, message in (
        (None, "table 1 starts from a pretrained model: --model FOLDER"),
        (tmp_path, "--model must name a folder with a Hugging Face encoder"),
    ):
        with pytest.raises(ValueError, match=message):
            reproduce_table_1(model, Request(**places))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    linear = config | {"lln_attention": {"attention": "lln", "options": {}, "max_len": None}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(linear))
    with pytest.raises(ValueError, match="is linear already; give the softmax model"):
        run(places)
    assert not child.started
    assert not places["runs"].exists()


def test_estimates_count_trials_and_validation(capsys):
    cell = FineTuning("elu", "rte", 0)
    alone = table1_runs.fine_tuning_cost(cell, tries_rates=False)
    assert alone == pytest.approx(70 * (2490 * 3 + 0.3 * 277))
    assert table1_runs.fine_tuning_cost(cell, tries_rates=True) == pytest.approx(alone + 70 * 2490 * 3 * 2 * 0.4)
    clock = table1_runs.Clock({"a": 3600.0, "b": 7200.0}, 2.0, 2)
    clock.print_time_left()
    clock.on_end(schedule.Planned(name="a", log=None, command=list, is_finished=bool, record=str), 3600.0)
    assert capsys.readouterr().err.splitlines() == ["2 jobs to go, about 3.0 hours", "1 jobs to go, about 1.0 hours"]


def line(method, task, seed, **metrics):
    origin = {"commit": "abc", "threads": 1, "machine": {"processor": "P", "cores": 2}, "model": "m"}
    budget = {"train_examples": 100, "steps": 7}
    stage = (
        {} if method == "softmax" else {"linearize": {"align_steps": 0, "distil_steps": 9, "tokens": 99, "length": 64}}
    )
    return {"method": method, "task": task, "seed": seed, "metrics": metrics} | origin | budget | stage


def test_the_table(tmp_path):
    rows = [line("softmax", task, 0, accuracy=0.8, f1=0.9, matthews=0.4, spearman=0.9) for task in report.TITLES]
    rows += [line("elu", task, 0, accuracy=0.6) for task in report.OF_THE_PAPER]
    rows += [line("elu", "cola", seed, matthews=value, accuracy=1.0) for seed, value in enumerate((0.1, 0.2, 0.3))]
    (tmp_path / "table1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, markdown, picture = table("table1", results=tmp_path, out=tmp_path / "out")
    assert markdown.read_text() == made.markdown()
    assert picture.stat().st_size > 5_000
    found = {row[0]: dict(zip(made.columns, row, strict=True)) for row in made.rows}
    assert len(found) == 18
    elu, softmax = found["Linear Transformer (ELU)"], found["Softmax attention"]
    assert (elu["MNLI (paper)"], elu["avg (paper)"], elu["MNLI"]) == ("74.8", "82.8", "60.0")
    assert (elu["CoLA"], elu["MRPC"]) == ("20.0 ± 10.0", "-")
    assert (elu["of softmax, 4 tasks"], elu["of softmax, 8 tasks"]) == ("75.0%", "-")
    assert (softmax["MRPC"], softmax["STS-B"], softmax["IMDB"]) == ("90.0", "90.0", "80.0")
    assert softmax["of softmax, 8 tasks"] == "100.0%"
    assert found["Hedgehog"]["MNLI (paper)"] == found["Hedgehog"]["MNLI"] == "-"
    assert "in 9 steps (99 tokens" in made.notes[0]
    assert "commit abc, seeds 0, 1, 2" in made.notes[-1]


def test_the_table_before_anything_is_recorded(tmp_path):
    made, *_ = table("table1", results=tmp_path, out=tmp_path / "out")
    assert all(set(row[6:]) == {"-"} for row in made.rows)
    assert "`lln reproduce table1` writes" in made.notes[0]
