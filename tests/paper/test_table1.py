"""`lln reproduce table1`: its plan, its lines of results, what is run again, and the table."""

import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import transformers

from lln.linearize.config import LinearizeConfig
from lln.paper import table, table1_methods
from lln.paper import table1 as report
from lln.paper.jobs import Request
from lln.paper.table1_methods import ALL_STEPS, BATCH_TOKENS, METHODS, SCHEDULES, SEVEN, Cell, cells, learned_tokens
from lln.paper.table1_runs import chosen_cells, reproduce_table_1
from lln.results import Result, read_results, write_results
from lln.tasks import schedule
from lln.tasks.presets import GLUE_TASKS, PRETRAINED

METRICS = {"accuracy": 0.5, "f1": 0.6, "matthews": 0.2, "spearman": 0.8, "pearson": 0.7, "loss": 0.4}


def test_the_plan():
    planned = cells()
    assert len(set(planned)) == len(planned) == 7 * 9 * 3 + 10 * 4
    assert set(METHODS) == set(report.ROWS)
    assert set(PRETRAINED) == set(GLUE_TASKS) == set(report.TITLES)
    assert all(PRETRAINED[task]["train_examples"] <= 8000 for task in PRETRAINED)
    first = planned[: 7 * 8]
    assert {cell.method for cell in first} == set(SEVEN)
    assert {cell.seed for cell in first} == {0}
    assert "imdb" not in {cell.task for cell in first}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_method_has_the_same_number_of_steps(name):
    steps = SCHEDULES[name].steps
    assert sum(steps.values()) == ALL_STEPS
    for method in METHODS:
        if method != "softmax":
            assert learned_tokens(method, name)["tokens"] == ALL_STEPS * BATCH_TOKENS
            assert sum(METHODS[method].stage_steps(SCHEDULES[name].trial.steps).values()) == ALL_STEPS // 2
    assert METHODS["lln_diag_ours"].stage_steps(steps) == steps
    for method in ("elu", "lln", "lln_diag", "performer"):  # nothing to align or join
        assert METHODS[method].stage_steps(steps)["distil"] == ALL_STEPS
    for method in ("lln_ours", "hedgehog"):  # nothing to join
        found = METHODS[method].stage_steps(steps)
        last = "distil" if steps["distil"] else "align"
        assert found == {**steps, "join": 0, last: steps[last] + steps["join"]}


def test_the_papers_forms_leave_out_what_linearize_adds():
    for method, attention in (("lln", "lln"), ("lln_diag", "lln_diag")):
        chosen = LinearizeConfig(attention=attention).all_options(is_causal=False)
        assert METHODS[method].options.keys() == chosen.keys()


def test_filters():
    assert chosen_cells(Request(methods=["elu"], tasks=["rte"], seeds=[2])) == [Cell("elu", "rte", 2)]
    assert len(chosen_cells(Request(methods=["performer"]))) == 4
    assert len(chosen_cells(Request(tasks=["imdb"], seeds=[0]))) == 7
    for given, message in (
        ({"methods": ["linformer"]}, "table1 has no method linformer; there are: softmax, "),
        ({"tasks": ["wnli"]}, "table1 has no task wnli; there are: mnli, "),
        ({"seeds": [3]}, "table1 has no seed 3; there are: 0, 1, 2"),
        ({"methods": ["tnn"], "tasks": ["rte"]}, "table1 has no run of .* together: softmax, "),
    ):
        with pytest.raises(ValueError, match=message):
            chosen_cells(Request(**given))


class Child:
    """A process that is finished when it is first polled, and leaves what the real one would."""

    started: ClassVar[list[list[str]]] = []
    fails: ClassVar[set[str]] = set()
    divergence: ClassVar[dict[float, float]] = {1e-4: 0.2, 3e-4: 0.1}

    def __init__(self, command, **options):
        folder = Path(command[command.index("--out") + 1])
        Child.started.append(command[3:])
        self.returncode = 1 if folder.name in Child.fails else 0
        if self.returncode:
            return
        origin = {"command": " ".join(["lln", *command[3:]]), "commit": "abc", "threads": 1, "torch": "2"}
        origin |= {"machine": {"processor": "a processor", "cores": 2}}
        flags = dict(pairwise(command))
        if command[3] == "linearize":
            assert (Path(command[4]) / "config.json").exists()
            rate = float(flags["--distil-rate"])
            (folder / "work").mkdir(parents=True)
            (folder / "work" / "summary.json").write_text('{"finished": true}')
            settings = {f"{stage}_steps": int(flags[f"--{stage}-steps"]) for stage in ("align", "join", "distil")}
            settings |= {"options": {"a": 1}, "distil_rate": rate}
            kept = {"distil": [{"cosine": 0.9, "divergence": Child.divergence[rate], "length": 128}]}
            scores = {f"softmax_{name}": value for name, value in METRICS.items()}
            scores |= {f"linear_{name}": value - 0.1 for name, value in METRICS.items()}
            found = {
                "origin": {"model": command[4]},
                "settings": settings,
                "kept": kept,
                "ablation": [],
                "data": {"training_examples": 9},
            }
            (folder / "report.json").write_text(json.dumps(found | {"labelled": scores | {"examples": 5}} | origin))
            return
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        summary = {f"eval_{name}": value for name, value in METRICS.items()} | {"attention": "softmax", "options": {}}
        summary |= {"train_examples": 9, "eval_examples": 5, "steps": 3, "tokens": 50, "seconds": 1.5}
        (folder / "summary.json").write_text(json.dumps(summary | {"learning_rate": 1e-4}))
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
    for task in ("rte", "qnli"):
        (data / "glue" / task).mkdir(parents=True)
        for part in ("train", "dev"):
            (data / "glue" / task / f"{part}.jsonl").touch()
    return {"runs": tmp_path / "runs", "results": tmp_path / "results", "data_dir": data}


def run(places, **options):
    reproduce_table_1(places["runs"].parent / "model", Request(**places | options))


def lines(places):
    return report.read_lines(places["results"] / "table1.jsonl")


def names(child):
    return [Path(command[command.index("--out") + 1]).name for command in child.started]


def test_runs_become_lines(child, places, capsys):
    run(places, methods=["softmax", "elu"], tasks=["rte"], seeds=[0])
    softmax, _, elu = found = lines(places)
    assert [(x["method"], x["task"]) for x in found] == [("softmax", "rte"), ("softmax", "qnli"), ("elu", "rte")]
    assert softmax["metrics"] == elu["softmax"] == {"accuracy": 0.5}
    assert elu["metrics"] == {"accuracy": 0.4}
    assert "linearize" not in softmax
    assert elu["linearize"] == learned_tokens("elu", "align")
    assert elu["schedule"] == "align"
    assert elu["kept"] == {"cosine": 0.9, "divergence": 0.1}
    assert {"options", "train_examples", "eval_examples", "commit", "machine"} <= elu.keys()
    assert {"learning_rate", "epochs", "seconds", "steps"} <= softmax.keys()
    assert str(places["runs"].parent) not in json.dumps(found)
    assert "lln linearize runs/table1/softmax-rte-seed0/model --attention elu" in elu["command"]
    assert "--data-dir DATA" in elu["command"]
    assert "jobs to go, about" in capsys.readouterr().err
    # The folder that other methods start from is kept.
    assert (places["runs"] / "table1" / "softmax-rte-seed0").exists()
    assert not (places["runs"] / "table1" / "elu-rte-seed0").exists()


def test_the_better_of_two_schedules_is_chosen_on_held_out_training_examples(child, places):
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    assert names(child) == [
        "softmax-rte-seed0",
        "softmax-qnli-seed0",
        "try-elu-align",
        "try-elu-distil",
        "elu-rte-seed0",
    ]
    trials, final = child.started[2:4], child.started[4]
    assert all("--hold-out" in command for command in trials)
    assert "--hold-out" not in final
    assert final[final.index("--distil-rate") + 1] == "0.0003"
    assert final[final.index("--distil-feature-rate") + 1] == "0.003"
    assert lines(places)[-1]["trials"] == {"align": 0.1, "distil": 0.2}
    assert lines(places)[-1]["learning_rate"] == 3e-4


def test_all_methods_learn_from_what_the_model_was_fine_tuned_on(child, places):
    run(places | {"data_dir": None}, methods=["elu", "lln_diag"], tasks=["sst2", "imdb"], seeds=[0])
    for command in child.started:
        flags = dict(pairwise(command))
        task = flags["--task"]
        if command[0] == "linearize":
            assert int(flags["--examples"]) == PRETRAINED[task]["train_examples"]
            assert flags["--length"] == ("512" if task == "imdb" else "128")
            assert flags.get("--eval-examples") == (
                "1000" if task == "imdb" else "400" if "--hold-out" in command else None
            )


def test_what_is_recorded_is_not_run_again(child, places, capsys):
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    before = len(child.started)
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    assert "1 of them finished before" in capsys.readouterr().err
    assert len(child.started) == before
    run(places, methods=["elu"], tasks=["rte"])
    assert sorted(names(child)[before:]) == [f"{x}-rte-seed{seed}" for x in ("elu", "softmax") for seed in (1, 2)]
    assert [x["seed"] for x in lines(places) if x["method"] == "elu"] == [0, 1, 2]


def test_without_the_folders_models_are_fine_tuned_again_and_rates_kept(child, places):
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    before = len(child.started)
    run(places | {"runs": places["runs"].parent / "others"}, methods=["elu"], tasks=["rte"], seeds=[1])
    assert names(child)[before:] == ["softmax-rte-seed1", "elu-rte-seed1"]
    assert "0.0003" in child.started[-1]


def test_runs_from_another_model_or_with_other_steps_are_not_mixed(child, places):
    run(places, methods=["elu"], tasks=["rte"], seeds=[0])
    (places["runs"].parent / "model").rename(places["runs"].parent / "other")
    with pytest.raises(ValueError, match=r"table1\.jsonl holds runs from model, not from other"):
        reproduce_table_1(places["runs"].parent / "other", Request(**places, methods=["elu"]))
    (places["runs"].parent / "other").rename(places["runs"].parent / "model")
    path = places["results"] / "table1.jsonl"
    *_, last = read_results(path, made_by="a test").values()
    settings = {**last.settings, "linearize": last.settings["linearize"] | {"distil_steps": 7}}
    write_results(path, [replace(last, settings=settings)])
    with pytest.raises(ValueError, match=r"holds a run of elu that was made linear in other steps"):
        run(places, methods=["softmax"], tasks=["rte"])


def test_a_run_that_fails_is_named_and_the_others_go_on(child, places):
    child.fails = {"elu-rte-seed0"}
    with pytest.raises(ValueError, match=r"1 runs are not finished: elu-rte-seed0; the same command"):
        run(places, methods=["softmax", "elu"], tasks=["rte"], seeds=[0])
    assert {x["method"] for x in lines(places)} == {"softmax"}
    child.fails = {"softmax-rte-seed1"}
    with pytest.raises(ValueError, match="2 runs are not finished: softmax-rte-seed1, elu-rte-seed1"):
        run(places, methods=["softmax", "elu"], tasks=["rte"], seeds=[1])


def test_the_other_options_of_a_method_reach_linearize(child, places):
    run(places | {"data_dir": None}, methods=["lln_diag"], tasks=["sst2"], seeds=[0])
    command = child.started[-1]
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
    cell = Cell("elu", "rte", 0)
    assert table1_methods.fine_tuning_cost(cell) == pytest.approx(70 * (2490 * 3 * (1 + 2 * 0.4) + 0.3 * 277))
    clock = table1_methods.Clock({"a": 3600.0, "b": 7200.0}, 2.0, 2)
    clock.print_time_left()
    clock.on_end(schedule.Planned(name="a", log=None, command=list, is_finished=bool, record=str), 3600.0)
    assert capsys.readouterr().err.splitlines() == ["2 jobs to go, about 3.0 hours", "1 jobs to go, about 1.0 hours"]


def result(method, task, seed, **metrics):
    origin = {"seed": seed, "commit": "abc", "threads": 1, "machine": {"processor": "P", "cores": 2}}
    settings = {"method": method, "task": task, "model": "m"}
    if method == "softmax":
        settings |= {"train_examples": 100}
        return Result(f"{method}-{task}-{seed}", origin, settings, {"metrics": metrics, "steps": 7})
    settings |= {"linearize": {"align_steps": 0, "distil_steps": 9, "tokens": 99}}
    summary = {"metrics": metrics, "softmax": dict.fromkeys(metrics, 0.8)}
    return Result(f"{method}-{task}-{seed}", origin, settings, summary)


def test_the_table(tmp_path):
    rows = [result("softmax", task, 0, accuracy=0.8, f1=0.9, matthews=0.4, spearman=0.9) for task in report.TITLES]
    rows += [result("elu", task, 0, accuracy=0.6) for task in report.OF_THE_PAPER]
    rows += [result("elu", "cola", seed, matthews=value, accuracy=1.0) for seed, value in enumerate((0.1, 0.2, 0.3))]
    write_results(tmp_path / "table1.jsonl", rows)
    made, markdown, picture = table("table1", results=tmp_path, out=tmp_path / "out")
    assert markdown.read_text() == made.markdown()
    assert picture.stat().st_size > 5_000
    found = {row[0]: dict(zip(made.columns, row, strict=True)) for row in made.rows}
    assert len(found) == 17
    elu, softmax = found["Linear Transformer (ELU)"], found["Softmax attention"]
    assert (elu["MNLI (paper)"], elu["avg (paper)"], elu["MNLI"]) == ("74.8", "82.8", "60.0")
    assert (elu["CoLA"], elu["MRPC"]) == ("20.0 ± 10.0", "-")
    assert (elu["of softmax, 4 tasks"], elu["of softmax, 8 tasks"]) == ("75.0%", "-")
    assert (softmax["MRPC"], softmax["STS-B"], softmax["IMDB"]) == ("90.0", "90.0", "80.0")
    assert softmax["of softmax, 8 tasks"] == "100.0%"
    assert found["Hedgehog"]["MNLI (paper)"] == found["Hedgehog"]["MNLI"] == "-"
    assert "in 9 steps (99 tokens)" in made.notes[0]
    assert "commit abc, seeds 0, 1, 2" in made.notes[-1]


def test_the_table_before_anything_is_recorded(tmp_path):
    made, *_ = table("table1", results=tmp_path, out=tmp_path / "out")
    assert all(set(row[6:]) == {"-"} for row in made.rows)
    assert "`lln reproduce table1` writes" in made.notes[0]
