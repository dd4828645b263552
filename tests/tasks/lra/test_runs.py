"""Runs and matrices of runs: budgets, results, what is finished stays, what fails is said; tables and pictures."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from lln import lra_cli
from lln.tasks.lra import bench, runner, tables
from lln.tasks.lra.examples import TASKS
from lln.tasks.lra.recipe import BUDGETS, RESULT, read_result, recipe, train
from lln.tasks.lra.runner import RESULTS, matrix, parse_method, run_matrix

TINY = {"steps": 3, "batch_size": 2, "save_every": 2, "log_every": 1}


@pytest.fixture
def data_dir(tmp_path):
    """Published ListOps files of very short expressions, seven for the test."""
    folder = tmp_path / "data" / "listops"
    folder.mkdir(parents=True)
    for split, count in (("train", 6), ("val", 4), ("test", 7)):
        rows = "".join(f"[MAX {n % 10} {'0 ' * n}]\t{n % 10}\n" for n in range(count))
        (folder / f"basic_{split}.tsv").write_text("Source\tTarget\n" + rows)
    return tmp_path / "data"


def test_paper_preset_is_the_published_configuration():
    published = {
        "text": (32, 1e-4, 80),
        "listops": (32, 1e-4, 1000),
        "retrieval": (16, 2e-4, 800),
        "pathfinder": (128, 2e-4, 312),
        "image": (256, 1e-4, 175),
    }
    for task, (batch, rate, warmup) in published.items():
        config = recipe("paper", task, "lln_diag")
        assert (config.steps, config.batch_size, config.learning_rate) == (50_000, batch, rate)
        assert (config.warmup_steps, config.weight_decay, config.dropout) == (warmup, 0.0, 0.1)
        assert (config.examples, config.dashes, config.evaluate_on) == (None, None, "test")
        assert not config.standardise


@pytest.mark.parametrize("preset", list(BUDGETS))
def test_equal_budgets(preset):
    runs = matrix(preset=preset, seeds=[0, 1])
    assert len(runs) == 5 * 6 * 2
    for task in TASKS:
        budgets = {
            json.dumps({k: v for k, v in run.settings().items() if k not in ("attention", "options", "seed")})
            for run in runs
            if run.task == task
        }
        assert len(budgets) == 1


def test_methods_with_options():
    assert parse_method("lln") == ("lln", {})
    assert parse_method("lln_diag:block_size=128:matching=entropy") == (
        "lln_diag",
        {"block_size": 128, "matching": "entropy"},
    )
    run = recipe("laptop", "text", "reformer", seed=3, options={"rounds": 4})
    assert run.options == {"rounds": 4, "shared_qk": True}
    assert run.name == "text-reformer-rounds=4-seed3"
    assert recipe("laptop", "text", "reformer").name == "text-reformer-seed0"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_method("lln:block"), "name=value"),
        (lambda: matrix(["text", "text"]), "twice"),
        (lambda: matrix([]), "at least one task"),
        (lambda: matrix(["speech"]), "no task is called"),
        (lambda: matrix(methods=["magic"]), "no mechanism is called 'magic'"),
        (lambda: matrix(methods=["lln:magic=1"]), "lln has no option magic; its options are: matching: Literal"),
        (lambda: matrix(methods=["lln:alpha=much"]), "the option alpha of lln cannot be 'much'; expected alpha: float"),
        (lambda: matrix(methods=["lln_diag:block_size=0"]), "block_size must be at least 1"),
        (lambda: matrix(methods=["lln:alpha=1:alpha=2"]), "alpha is given twice"),
        (lambda: next(bench.compare(["text", "speech"], ["softmax"])), "no task is called 'speech'"),
        (lambda: next(bench.compare(["text"], ["softmax", "magic"])), "no mechanism is called 'magic'"),
        (lambda: matrix(preset="phone"), "there are: paper, laptop"),
        (lambda: matrix(evaluate_on="train"), "valid or test"),
    ],
)
def test_wrong_matrix(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_run_counts_every_test_example(tmp_path, data_dir):
    config = recipe("laptop", "listops", "lln_diag", **TINY)
    out = tmp_path / config.name
    result = train(config, out=out, data_dir=data_dir, quiet=True)
    assert result["evaluated_examples"] == 7  # in batches of two
    assert round(result["accuracy"] * 7, 6).is_integer()
    assert [step for step, _ in result["loss"]] == [1, 2, 3]
    assert result["settings"]["learning_rate"] == config.learning_rate
    assert result["source"] == "published files"
    assert {"commit", "machine", "torch"} <= set(result["provenance"])
    assert read_result(out) == result
    written = (out / RESULT).stat().st_mtime_ns
    assert train(config, out=out, data_dir=None, quiet=True) == result  # finished: no data is needed
    assert (out / RESULT).stat().st_mtime_ns == written


def test_matrix_goes_on_where_it_was(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.1)
    runs = matrix(["listops"], ["softmax", "lln"], **TINY)
    train(runs[0], out=tmp_path / runs[0].name, data_dir=data_dir, quiet=True)
    started = []
    start = runner._Worker.start.__func__
    monkeypatch.setattr(
        runner._Worker, "start", classmethod(lambda cls, run, *a, **k: started.append(run) or start(cls, run, *a, **k))
    )
    told = []
    results = run_matrix(runs, out=tmp_path, data_dir=data_dir, tell=lambda *word: told.append(word))
    assert started == runs[1:]
    assert [result["attention"] for result in results] == ["softmax", "lln"]
    assert json.loads((tmp_path / RESULTS).read_text()) == results[::-1]  # sorted by name
    table = tables.table_5(tmp_path)
    assert table.columns == ["", "ListOps (2k)"]
    assert table.rows == [
        ["Softmax", f"38.05 / {100 * results[0]['accuracy']:.2f}"],
        ["LLN", f"- / {100 * results[1]['accuracy']:.2f}"],
    ]
    assert told[0][2].startswith("accuracy")
    assert told[-1][:2] == (runs[1], 3)
    assert run_matrix(runs[:1], out=tmp_path) == results[:1]
    assert len(json.loads((tmp_path / RESULTS).read_text())) == 2  # what other commands did is not lost
    longer = matrix(["listops"], ["softmax", "lln"], **TINY | {"steps": 4})
    with pytest.raises(ValueError, match=r"seed0 holds a run with other settings: steps was 3, is 4\."):
        run_matrix(longer, out=tmp_path, data_dir=data_dir)
    assert started == runs[1:]


def test_damaged_files_of_a_run(tmp_path, data_dir):
    (run,) = matrix(["listops"], ["softmax"], **TINY)
    folder = tmp_path / run.name
    result = train(run, out=folder, data_dir=data_dir, quiet=True)
    (folder / RESULT).write_text('{"task": ')
    with pytest.raises(ValueError, match=rf"{RESULT} is damaged: .*; remove it"):
        run_matrix([run], out=tmp_path, data_dir=data_dir)
    (folder / RESULT).unlink()
    assert train(run, out=folder, data_dir=data_dir, quiet=True)["accuracy"] == result["accuracy"]
    worker = runner._Worker(run, folder, tmp_path / "log", SimpleNamespace(poll=lambda: None))
    assert worker.look() == (3, "testing", False)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    assert worker.look() == (2, "loss 1.500", False)
    (folder / "metrics.jsonl").write_text('{"step"\n')
    assert worker.look() == (0, "starting", False)


def test_a_stopped_matrix_leaves_what_is_finished(tmp_path, data_dir, monkeypatch):
    runs = matrix(["listops"], ["softmax", "lln"], **TINY)
    done = train(runs[0], out=tmp_path / runs[0].name, data_dir=data_dir, quiet=True)
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_matrix(runs, out=tmp_path, data_dir=data_dir)
    assert json.loads((tmp_path / RESULTS).read_text()) == [done]


def test_a_failed_run_is_said(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.05)
    runs = matrix(["listops"], ["softmax"], **TINY)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"1 of 1 runs failed: listops-softmax-seed0 \(see .*\.log\)"):
        run_matrix(runs, out=tmp_path / "runs", data_dir=data_dir)


def test_the_command(tmp_path, data_dir):
    def run(*arguments):
        return CliRunner().invoke(lra_cli.lra, ["run", "--data-dir", str(data_dir), *arguments])

    out = tmp_path / "runs"
    command = ["--tasks", "listops", "--methods", "lln_diag:block_size=8", "--seeds", "3", "--out", str(out)]
    done = run(*command, "--steps", "2", "--batch-size", "2", "--standardise", "--evaluate-on", "valid")
    assert done.exit_code == 0, done.output
    assert "listops-lln_diag-block_size=8-seed3: step 2/2, accuracy" in done.output
    assert "lln table 5" not in done.output  # which is of test accuracies
    (result,) = json.loads((out / RESULTS).read_text())
    asked = {"steps": 2, "batch_size": 2, "standardise": True, "seed": 3, "options": {"block_size": 8}}
    assert asked.items() <= result["settings"].items()
    for arguments, message in (
        (["--seeds", "one"], "--seeds takes numbers"),
        (["--tasks", "listops,"], "--tasks takes names"),
        (["--tasks", "listops", "--dashes", "6"], "dashes are for pathfinder, not for listops"),
    ):
        refused = run("--out", str(tmp_path / "refused"), *arguments)
        assert isinstance(refused.exception, ValueError)
        assert message in str(refused.exception)


def test_the_line_of_a_run_follows_it(tmp_path):
    config = recipe("laptop", "listops", "lln", **TINY)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    worker = runner._Worker(config, tmp_path, tmp_path / "run.log", process)
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.5 * step}) + "\n" for step in (1, 2, 3)]
    assert worker.look() == (0, "starting", False)
    metrics.write_text("".join(lines[:2]) + lines[2][:4])  # as it is being written
    assert worker.look() == (2, "loss 1.000", False)
    metrics.write_text("".join(lines))
    assert worker.look() == (3, "testing", False)
    metrics.write_text(lines[0])  # killed while testing, continued from an earlier step
    assert worker.look() == (1, "loss 0.500", False)
    process.kill()
    process.wait()
    assert worker.look() == (1, "loss 0.500", True)
    assert worker.last_words() == "it was killed; if memory ran out, fewer --jobs need less"


def recorded(tmp_path):
    machine = {"machine": {"processor": "P", "cores": 2, "system": "S"}, "threads": 1, "torch": "T", "commit": "C"}
    results = [
        {
            "task": task,
            "attention": method,
            "options": {"block_size": 8} if seed == 2 else {},
            "accuracy": 0.5 + 0.01 * number + 0.1 * seed,
            "seed": seed,
            "evaluated_on": "test",
            "source": "wikipedia passages, ours" if task == "retrieval" else "somewhere",
            "steps": 10,
            "seconds": 200.0,
            "evaluations": [{"eval_seconds": 40.0}],
            "settings": {"batch_size": 2, "learning_rate": 1e-3},
            "provenance": machine,
        }
        for number, task in enumerate(TASKS)
        for method in ("softmax", "lln_diag")
        for seed in (0, 1, 2)  # the last with options of its own, and so a row of its own
    ]
    (tmp_path / RESULTS).write_text(json.dumps(results))
    rows = [
        {"task": task, "method": method, "batch": 2, "milliseconds": 100.0 * scale, "peak_bytes": scale * 2**20}
        for task in TASKS
        for method, scale in (("softmax_explicit", 20), ("lln_diag", 2))
    ]
    (tmp_path / tables.COSTS).write_text(json.dumps(machine | {"rows": rows}))


def test_tables(tmp_path):
    recorded(tmp_path)
    five = tables.table_5(tmp_path)
    cells = {row[0]: row[1:] for row in five.rows}
    assert cells["Softmax"][:2] == ["60.41 / 55.00", "38.05 / 56.00"]
    assert cells["LLN + Diag"][-1] == "57.86 / 57.00"
    assert cells["LLN + Diag, block_size = 8"] == [
        "- / 70.00",
        "- / 71.00",
        "- / 72.00",
        "- / 73.00",
        "- / 74.00",
        "- / 72.00",
    ]
    assert [row[0] for row in five.rows][-2:] == ["LLN + Diag", "LLN + Diag, block_size = 8"]
    assert cells["Reformer"][-1] == "57.67 / -"
    assert "wikipedia passages, ours" in five.notes[0]
    four = tables.table_4(tmp_path)
    cells = {row[0]: row[1:] for row in four.rows}
    assert cells["Softmax (explicit), time"][0] == "7.05 / 10.00"
    assert cells["Softmax (explicit), memory"][0] == "10.43 / 10.00"
    assert cells["Reformer, time"][0] == "1.51 / -"
    assert cells["LLN + Diag, ms a step"] == ["200"] * 5
    four.picture(tmp_path / "four.png")
    assert (tmp_path / "four.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="is missing: it is recorded with `lln lra bench`"):
        tables.table_4(tmp_path / "nowhere")


def test_a_table_compares_equal_budgets(tmp_path):
    recorded(tmp_path)
    path = tmp_path / RESULTS
    results = json.loads(path.read_text())
    assert "listops: 10 steps of 2 at 0.001; " in tables.table_5(tmp_path).notes[1]
    listops = [result for result in results if result["task"] == "listops"]
    listops[-1]["settings"] |= {"log_every": 7, "standardise": False}  # of no consequence; what the others had unsaid
    listops[-1]["provenance"]["commit"] = "D"
    path.write_text(json.dumps(results))
    assert (
        tables.table_5(tmp_path)
        .notes[2]
        .endswith("commit C, D. The times of the 30 runs, with their tests, add up to 2.0 hours.")
    )
    settings = listops[0]["settings"]
    path.write_text(json.dumps([listops[0] | {"settings": settings | {"standardise": True}}]))
    assert "listops: 10 steps of 2 at 0.001, means standardised. " in tables.table_5(tmp_path).notes[1]
    for name, change in (
        ("steps", {"steps": 11}),
        ("learning_rate", {"settings": settings | {"learning_rate": 3e-3}}),
        ("standardise", {"settings": settings | {"standardise": True}}),
    ):
        path.write_text(json.dumps([*results, listops[0] | change]))
        with pytest.raises(ValueError, match=rf"runs of listops had unequal budgets \({name}\)"):
            tables.table_5(tmp_path)


def test_bench_at_published_lengths(monkeypatch):
    assert {task: bench.batch_size(task) for task in TASKS} == {
        "text": 2,
        "listops": 4,
        "retrieval": 1,
        "pathfinder": 8,
        "image": 8,
    }
    made = []
    monkeypatch.setattr(
        bench,
        "training_step",
        lambda task, method, **sizes: made.append((task, method, sizes["length"], sizes["batch"])) or (lambda: None),
    )
    monkeypatch.setattr(bench, "peak_memory", lambda task, method, **_: {"softmax": 30, "lln": 10}[method])
    rows = list(bench.compare(["text"], ["softmax", "lln"], seconds=0.0, at_least=1))
    assert made == [("text", "softmax", 4000, 2), ("text", "lln", 4000, 2)]
    assert [row["memory_ratio"] for row in rows] == [1.0, 3.0]


def test_memory_of_a_step_holds_the_explicit_matrices():
    layers, heads, tokens, float_bytes = 2, 2, 1024, 4
    peak = bench.peak_memory("pathfinder", "softmax_explicit", length=tokens, batch=1)
    assert layers * heads * tokens**2 * float_bytes < peak < 20 * heads * tokens**2 * float_bytes


def test_show_prints_and_draws(tmp_path, data_dir, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)
    invoke = CliRunner().invoke
    shown = invoke(lra_cli.data, ["show", "listops", "--count", "2", "--data-dir", str(data_dir), "--split", "test"])
    assert shown.exit_code == 0, shown.output
    assert "[MAX 1 0 ]" in shown.output
    assert "label 1: 1" in shown.output
    shown = invoke(lra_cli.data, ["show", "pathfinder", "--count", "1", "--dashes", "6"])
    assert shown.exit_code == 0, shown.output
    picture = [line for line in shown.output.splitlines() if len(line) == 64 and set(line) <= set(" ░▒▓█")]
    assert len(picture) == 32
    assert "".join(picture).count("█") > 4
    out = tmp_path / "pictures" / "few.png"
    drawn = invoke(lra_cli.data, ["show", "pathfinder", "--count", "1", "--dashes", "6", "--out", str(out)])
    assert drawn.exit_code == 0, drawn.output
    from PIL import Image

    with Image.open(out) as image:
        pixels = np.asarray(image)[6:-6:6, 6:-6:6]
    assert pixels.shape == (32, 32)
    assert pixels.max() == 255
    refused = invoke(lra_cli.data, ["show", "listops", "--out", str(out), "--data-dir", str(data_dir)])
    assert isinstance(refused.exception, ValueError)
    assert "no pictures" in str(refused.exception)
