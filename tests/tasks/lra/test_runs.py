"""Runs on the Long Range Arena: presets, results, the tables made of them, what a step costs, and pictures."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from lln.cli import app
from lln.paper import table4, table5
from lln.results import Result, read_results, write_results
from lln.tasks.lra import bench
from lln.tasks.lra.config import OPTIONS, LraConfig
from lln.tasks.lra.registry import TASKS
from lln.tasks.lra.train import train

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
        config = LraConfig.preset("paper", task=task, attention="lln_diag")
        assert (config.steps, config.batch_size, config.learning_rate) == (50_000, batch, rate)
        assert (config.warmup_steps, config.weight_decay, config.dropout) == (warmup, 0.0, 0.1)
        assert (config.examples, config.dashes, config.evaluate_on) == (None, None, "test")
        assert not config.standardise


def test_mechanisms_have_the_options_of_the_comparison_and_others_if_given():
    config = LraConfig.preset("laptop", task="text", attention="reformer", options={"rounds": 4})
    assert config.options == {"rounds": 4, "shared_qk": True}
    assert LraConfig.preset("laptop", task="text", attention="lln_diag").options == {}  # the paper's average


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LraConfig.preset("laptop", task="speech"), "give steps or epochs|no task is called"),
        (lambda: LraConfig.preset("phone"), "there are: laptop, paper"),
        (lambda: LraConfig.preset("laptop", evaluate_on="train"), "evaluate_on must be one of valid, test"),
        (lambda: next(bench.compare(["text", "speech"], ["softmax"])), "no task is called 'speech'"),
        (lambda: next(bench.compare(["text"], ["softmax", "magic"])), "no mechanism is called 'magic'"),
    ],
)
def test_wrong_requests(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_run_counts_every_test_example(tmp_path, data_dir):
    config = LraConfig.preset("laptop", task="listops", attention="lln_diag", **TINY)
    summary = train(config, out=tmp_path / "run", data_dir=data_dir, quiet=True)
    assert summary["eval_examples"] == 7  # in batches of two
    assert round(summary["eval_accuracy"] * 7, 6).is_integer()
    assert (summary["source"], summary["train_examples"], summary["steps"]) == ("published files", 6, 3)
    assert train(config, out=tmp_path / "run", data_dir=None, quiet=True) == summary  # finished: no data is needed
    longer = LraConfig.preset("laptop", task="listops", attention="lln_diag", **TINY | {"steps": 4})
    with pytest.raises(ValueError, match=r"holds a run with other settings: steps was 3, is 4\."):
        train(longer, out=tmp_path / "run", data_dir=data_dir, quiet=True)


def test_the_command_trains_and_records(tmp_path, data_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        small = ["--steps", "2", "--batch-size", "2", "--data-dir", str(data_dir)]
        return CliRunner().invoke(app, ["train", "lra", "--task", "listops", *small, *arguments])

    record = tmp_path / "results" / "table5.jsonl"
    for method in ("softmax", "lln"):
        done = run("--attention", method, "--record", str(record), "--quiet")
        assert done.exit_code == 0, done.output
        assert done.output == ""
    done = run("--attention", "lln_diag", "--option", "block_size=8", "--seed", "3", "--evaluate-on", "valid")
    assert done.exit_code == 0, done.output
    assert "listops lln_diag step 2: validation loss" in done.output
    found = read_results(record, made_by="")
    assert list(found) == ["lra-listops-softmax-seed0", "lra-listops-lln-seed0"]
    table = table5.make(tmp_path / "results")
    assert table.columns == ["", "ListOps (2k)"]
    accuracies = [100 * result.summary["eval_accuracy"] for result in found.values()]
    assert table.rows == [["Softmax", f"38.05 / {accuracies[0]:.2f}"], ["LLN", f"- / {accuracies[1]:.2f}"]]
    settings = json.loads((tmp_path / "runs" / "lra-listops-lln_diag-seed3" / "config.json").read_text())
    asked = {"steps": 2, "batch_size": 2, "seed": 3, "options": {"block_size": 8}, "evaluate_on": "valid"}
    assert asked.items() <= settings.items()
    assert "dashes are for pathfinder, not for listops" in run("--dashes", "6", "--out", "refused").stderr
    assert not (tmp_path / "refused").exists()


def origin(commit="C"):
    machine = {"processor": "P", "cores": 2, "system": "S"}
    return {"command": "lln", "machine": machine, "threads": 1, "torch": "T", "commit": commit, "seed": 0}


def recorded(folder):
    """Accuracies with three seeds, the last with options of its own and so with a row of its own; and costs."""
    results = [
        Result(
            f"{task}-{method}-{seed}",
            origin(),
            {
                "task": task,
                "attention": method,
                "options": {"block_size": 8} if seed == 2 else {},
                "seed": seed,
                "evaluate_on": "test",
                "batch_size": 2,
                "learning_rate": 1e-3,
            },
            {
                "eval_accuracy": 0.5 + 0.01 * number + 0.1 * seed,
                "source": "wikipedia passages, ours" if task == "retrieval" else "somewhere",
                "steps": 10,
                "seconds": 200.0,
            },
            {"evaluations": [{"eval_seconds": 40.0}]},
        )
        for number, task in enumerate(TASKS)
        for method in ("softmax", "lln_diag")
        for seed in (0, 1, 2)
    ]
    write_results(folder / "table5.jsonl", results)
    rows = [
        {"task": task, "method": method, "batch": 2, "milliseconds": 100.0 * scale, "peak_bytes": scale * 2**20}
        for task in TASKS
        for method, scale in (("softmax_explicit", 20), ("lln_diag", 2))
    ]
    write_results(folder / "table4.jsonl", [Result("lra", origin(), tables={"rows": rows})])
    return results


def test_tables(tmp_path):
    recorded(tmp_path)
    five = table5.make(tmp_path)
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
    four = table4.make(tmp_path)
    cells = {row[0]: row[1:] for row in four.rows}
    assert cells["Softmax (explicit), time"][0] == "7.05 / 10.00"
    assert cells["Softmax (explicit), memory"][0] == "10.43 / 10.00"
    assert cells["Reformer, time"][0] == "1.51 / -"
    assert cells["LLN + Diag, ms a step"] == ["200"] * 5
    four.picture(tmp_path / "four.png")
    assert (tmp_path / "four.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="is missing; `lln bench lra --out results/table4"):
        table4.make(tmp_path / "nowhere")


def test_a_table_compares_equal_budgets(tmp_path):
    results = recorded(tmp_path)
    path = tmp_path / "table5.jsonl"

    def note(number, *results):
        write_results(path, results)
        return table5.make(tmp_path).notes[number]

    def changed(result, origin=None, summary=None, **settings):
        values = (origin or result.origin, {**result.settings, **settings}, {**result.summary, **(summary or {})})
        return Result(f"{result.run} again", *values, result.tables)

    assert "listops: 10 steps of 2 at 0.001; " in note(1, *results)
    listops = [result for result in results if result.settings["task"] == "listops"]
    # Of no consequence; what the others had without saying so; another commit.
    same = changed(listops[-1], origin("D"), log_every=7, standardise=False)
    ending = "commit C, D. The times of the 31 runs, with their tests, add up to 2.1 hours."
    assert note(2, *results, same).endswith(ending)
    alone = note(1, changed(listops[0], standardise=True))
    assert "listops: 10 steps of 2 at 0.001, means standardised. " in alone
    for name, change in (
        ("steps", {"summary": {"steps": 11}}),
        ("learning_rate", {"learning_rate": 3e-3}),
        ("standardise", {"standardise": True}),
    ):
        with pytest.raises(ValueError, match=rf"runs of listops had unequal budgets \({name}\)"):
            note(0, *results, changed(listops[0], **change))


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


def test_bench_gives_each_method_the_options_that_it_has(monkeypatch, tmp_path):
    made = {}

    def training_step(task, method, *, options, **sizes):
        made[method] = options
        return lambda: None

    monkeypatch.setattr(bench, "training_step", training_step)
    monkeypatch.setattr(bench, "peak_memory", lambda task, method, *, options, **_: len(options) + 1)
    arguments = [
        "bench",
        "lra",
        "--tasks",
        "text",
        "--mechanisms",
        "softmax_explicit,reformer,lln_diag",
        "--seconds",
        "0",
    ]
    done = CliRunner().invoke(app, [*arguments, "--option", "rounds=4", "--option", "block_size=32", "--json"])
    assert done.exit_code == 0, done.output
    assert made == {
        "softmax_explicit": {},
        "reformer": OPTIONS["reformer"] | {"rounds": 4},
        "lln_diag": {"block_size": 32},
    }
    out = tmp_path / "table4.jsonl"
    done = CliRunner().invoke(app, [*arguments, "--option", "block_size=32", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (result,) = read_results(out, made_by="").values()
    assert (result.run, result.settings["options"]) == ("lra-block_size=32", {"block_size": 32})
    done = CliRunner().invoke(app, [*arguments, "--option", "blocks=32"])
    assert "none of softmax_explicit, reformer, lln_diag has an option blocks" in done.stderr


def test_memory_of_a_step_holds_the_explicit_matrices():
    layers, heads, tokens, float_bytes = 2, 2, 1024, 4
    peak = bench.peak_memory("pathfinder", "softmax_explicit", length=tokens, batch=1, options={})
    assert layers * heads * tokens**2 * float_bytes < peak < 20 * heads * tokens**2 * float_bytes


def test_show_prints_and_draws(tmp_path, data_dir, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)

    def show(*arguments):
        return CliRunner().invoke(app, ["lra", "data", "show", *arguments])

    shown = show("listops", "--count", "2", "--data-dir", str(data_dir), "--split", "test")
    assert shown.exit_code == 0, shown.output
    assert "[MAX 1 0 ]" in shown.output
    assert "label 1: 1" in shown.output
    shown = show("pathfinder", "--count", "1", "--dashes", "6")
    assert shown.exit_code == 0, shown.output
    picture = [line for line in shown.output.splitlines() if len(line) == 64 and set(line) <= set(" ░▒▓█")]
    assert len(picture) == 32
    assert "".join(picture).count("█") > 4
    out = tmp_path / "pictures" / "few.png"
    drawn = show("pathfinder", "--count", "1", "--dashes", "6", "--out", str(out))
    assert drawn.exit_code == 0, drawn.output
    from PIL import Image

    with Image.open(out) as image:
        pixels = np.asarray(image)[6:-6:6, 6:-6:6]
    assert pixels.shape == (32, 32)
    assert pixels.max() == 255
    refused = show("listops", "--out", str(out), "--data-dir", str(data_dir))
    assert "listops has no pictures: --out is for pathfinder and image" in refused.stderr
