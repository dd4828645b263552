"""The command as its user meets it: good input, bad input, and an interrupt."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import lln.calibration
import lln.report.demo
import lln.report.demo_training
from lln import cli


def run(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def small_demo(monkeypatch, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} is followed by {i + 1}, " * 9}) + "\n" for i in range(200)))
    small = {"source": str(text), "vocab_size": 300, "steps": 4, "eval_every": 2, "save_every": 4, "record_every": 2}
    small |= {"layers": 1, "width": 16, "heads": 1, "feedforward": 16, "length": 32}
    monkeypatch.setattr(lln.report.demo_training, "SETTINGS", lln.report.demo_training.SETTINGS | small)
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lln.report.demo, "TEMPERATURES", (1.0, 0.5))
    monkeypatch.setattr(lln.report.demo, "TOKENS", 32)
    monkeypatch.setattr(lln.report.demo, "LENGTHS", (512,))


def test_demo_writes_tables_and_pictures(small_demo, tmp_path):
    done = run("demo", "--out", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    concentration = json.loads((tmp_path / "new/concentration.json").read_text())
    assert {row["attention"] for row in concentration["rows"]} == {"softmax", "unmatched", "variance", "entropy"}
    assert {"commit", "machine", "seed", "command"} <= concentration.keys()
    cost = json.loads((tmp_path / "new/cost.json").read_text())
    assert {row["mechanism"] for row in cost["rows"]} == {"softmax", "lln", "lln_diag"}
    assert all(row["peak_bytes"] > 0 and row["milliseconds"] > 0 for row in cost["rows"])
    for part in ("concentration", "cost", "training"):
        assert (tmp_path / f"new/{part}.png").read_bytes()[1:4] == b"PNG"
    assert "LLN unmatched" in done.output
    assert "speed-up" in done.output
    assert "tokens/s" in done.output
    for attention in ("softmax", "lln_diag"):
        assert (tmp_path / f"new/training/{attention}/summary.json").is_file()


def test_demo_shows_that_matching_matches(small_demo):
    rows = {(row["temperature"], row["attention"]): row for row in lln.report.demo.concentration_rows(0)}
    for temperature in (1.0, 0.5):
        softmax, unmatched, variance, entropy = (
            rows[temperature, name] for name in ("softmax", "unmatched", "variance", "entropy")
        )
        assert variance["log_variance"] == pytest.approx(softmax["log_variance"], rel=0.25)
        assert unmatched["log_variance"] < 0.2 * softmax["log_variance"]
        for column in ("entropy_bits", "spectral_gap"):
            distance = abs(entropy[column] - softmax[column])
            assert distance < abs(unmatched[column] - softmax[column])


@pytest.mark.skipif(os.name != "posix", reason="sends an interrupt")
def test_an_interrupted_demo_keeps_what_was_finished(tmp_path):
    command = [sys.executable, "-m", "lln.cli", "demo", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.time() + 120
    while not (tmp_path / "concentration.png").exists() and time.time() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert json.loads((tmp_path / "concentration.json").read_text())["rows"]
    assert (tmp_path / "concentration.png").exists()


def test_an_interrupt_inside_a_part_writes_the_rows_so_far(small_demo, tmp_path):
    def stop(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lln.report.demo.run_part("concentration", tmp_path, seed=0, on_row=stop)
    assert len(json.loads((tmp_path / "concentration.json").read_text())["rows"]) == 1


def test_calibrate_explains(monkeypatch):
    monkeypatch.setattr(lln.calibration, "DRAWS", 1)
    monkeypatch.setattr(lln.calibration, "FIT_ENDS", (19.0,))
    monkeypatch.setattr(lln.calibration, "ERROR_HEAD_DIMS", (8,))
    monkeypatch.setattr(lln.calibration, "ERROR_VARIANCES", (1.0,))
    monkeypatch.setattr(lln.calibration, "ERROR_DRAWS", 1)
    done = run("calibrate", "--explain-only")
    assert done.exit_code == 0, done.output
    for text in ("0.14855", "-0.35487", "published", "variance", "entropy", "linear"):
        assert text in done.output


def test_calibrate_says_whether_the_table_is_the_shipped_one(monkeypatch, tmp_path):
    for name, value in (("FIT_ENDS", ()), ("ERROR_HEAD_DIMS", ())):
        monkeypatch.setattr(lln.calibration, name, value)
    from lln.curves import TABLE, TABLE_PATH

    monkeypatch.setattr(lln.calibration, "calibrate", lambda on_step: TABLE)
    done = run("calibrate", "--out", str(tmp_path / "curves.json"))
    assert "identical" in done.output
    assert (tmp_path / "curves.json").read_text() == TABLE_PATH.read_text()
    monkeypatch.setattr(lln.calibration, "calibrate", lambda on_step: TABLE | {"seed": 1})
    assert "not the shipped one" in " ".join(run("calibrate").output.split())


def test_zoo():
    assert "transnormer_t1" in run("zoo").output
    assert "Toeplitz" in run("zoo", "tnn").output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["zoo", "nothing"], "no mechanism is called 'nothing'"),
        (["bench", "attention", "--lengths", "1,x"], "positive numbers separated by commas"),
        (["bench", "attention", "--lengths", "0"], "positive numbers separated by commas"),
        (["bench", "attention", "--dtype", "int8"], "dtype must be one of float32, bfloat16"),
        (["figure", "99"], "there is no figure 99"),
        (["figure", "2", "--tokens", "1"], "tokens must be an int from 16"),
    ],
    ids=str,
)
def test_mistakes_are_words_not_tracebacks(arguments, text):
    done = subprocess.run([sys.executable, "-m", "lln.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    output = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert text in output
    assert "Traceback" not in output
