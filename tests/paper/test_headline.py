"""The headline numbers: from whatever is recorded, and not more."""

import json
import shutil
from pathlib import Path

from lln.bench.measure import predict
from lln.paper import headline
from lln.report.speed import credible
from lln.results import Result, write_results

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_nothing_recorded(tmp_path):
    assert headline.make(tmp_path).rows == []
    assert headline.picture_rows(tmp_path) == []
    assert headline.draw(tmp_path).axes


def test_recorded_numbers(tmp_path):
    shutil.copy(RESULTS / "attention.jsonl", tmp_path)
    table = headline.make(tmp_path)
    assert all(row[0].startswith("attention of ") for row in table.rows)
    lines = [json.loads(line) for line in (RESULTS / "attention.jsonl").read_text().splitlines()]
    [run] = [line for line in lines if line["run"] == headline.ATTENTION]
    times = {
        row["mechanism"]: row["milliseconds"]
        for row in run["rows"]
        if (row["pass"], row["tokens"]) == ("forward", 16384) and "milliseconds" in row
    }
    [shown] = [row for row in table.rows if "16,384 tokens, forward (" in row[0]]
    assert float(shown[1].replace(",", "")) == float(f"{times['softmax']:.0f}")
    assert f"({times['softmax'] / times['lln']:.0f}x)" in shown[2]


def line(run, rows, steps):
    origin = {"command": "lln", "commit": "0", "seed": 0, "machine": {"processor": "x", "cores": 1}, "threads": 1}
    return {"run": run, **origin, "settings": {"steps": steps}, "rows": rows}


def test_models_of_any_number_and_kind(tmp_path):
    encoder = [{"stage": "calibrate", "length": n, "cosine": 0.5 + n / 1024} for n in (32, 512)]
    decoder = [
        {"stage": stage, "length": 256, "loss": loss, "softmax_loss": 2.0}
        for stage, loss in (("calibrate", 3.0), ("align", 2.7), ("distil", 2.5))
    ]
    runs = [
        line("minilm-lln-calibrated", encoder, 0),
        line("minilm-hedgehog", encoder, 0),
        line("unheard-of-model", decoder, None),
        line("stories15m-lln_diag", decoder, None),
    ]
    (tmp_path / "linearized.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    rows = {row[0]: row[1:4] for row in headline.make(tmp_path).rows}
    assert list(rows.values()) == [["1", "1.000", "-"], ["2.000", "-", "3.000"], ["2.000", "-", "2.500"]]
    [bar] = headline.picture_rows(tmp_path)
    assert (bar["tokens"], bar["value"]) == (512, 1.0)


def test_glue_counts_once_all_tasks_are_there(tmp_path):
    from lln.paper.table1 import EIGHT, METRIC

    origin = {"seed": 0, "commit": "abc", "threads": 1, "machine": {"cores": 2, "processor": "P"}}

    def runs(method, share):
        found = []
        for task in EIGHT:
            metric = METRIC.get(task, "accuracy")
            began = {} if method == "softmax" else {"softmax": {metric: 0.8}}
            summary = {"metrics": {metric: 0.8 * share}} | began
            found.append(Result(f"{method}-{task}", origin, {"method": method, "task": task}, summary))
        return found

    def write(lines):
        write_results(tmp_path / "table1.jsonl", lines)

    write([*runs("softmax", 1.0), *runs("lln_diag_ours", 0.95)[:-1]])
    assert headline.glue_shares(tmp_path) == {}
    write([*runs("softmax", 1.0), *runs("lln_diag_ours", 0.95), *runs("lln_diag", 0.5)])
    made = headline.make(tmp_path)
    assert made.rows[0][1:4] == ["100%", "-", "95.0%"]
    assert made.notes[-1].startswith("GLUE: 1 of 2 cores of P for each run, commit abc, seeds 0. LLN+Diag has blocks")
    assert [round(row["value"], 6) for row in headline.picture_rows(tmp_path)] == [0.95]


def test_a_longer_input_is_never_predicted_to_take_less():
    assert predict([1, 2, 4], [1.0, 2.0, 40.0], 8, quadratic=False) >= 40.0
    rows = [
        {"mechanism": "a", "pass": "forward", "tokens": 4, "milliseconds": 40.0},
        {"mechanism": "a", "pass": "forward", "tokens": 8, "predicted_milliseconds": 30.0, "skipped": "too long"},
        {"mechanism": "b", "pass": "forward", "tokens": 8, "predicted_milliseconds": 30.0},
    ]
    without = {key: rows[1][key] for key in ("mechanism", "pass", "tokens", "skipped")}
    assert credible(rows) == [rows[0], without, rows[2]]
