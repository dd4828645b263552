"""Measurements: what they count, what they leave out and why, and that they can be stopped and continued."""

import itertools
import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import lln
from lln.bench import attention, candidates, decode, measure, model, new_process, recording
from lln.bench.candidates import Setting
from lln.bench.new_process import in_new_process
from lln.bench.paper import paper_attention
from lln.bench.peak import peak_of_call
from lln.cli.bench import app
from lln.report.speed import attention_tables
from lln.results import Result, read_results

SMALL = {"setting": Setting(1, 8), "seconds": 0.01}


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_turns_alternate_and_quick_candidates_run_more_often(monkeypatch):
    now, order = 0.0, []
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now))

    def candidate(name, seconds):
        def call():
            nonlocal now
            now += seconds
            order.append(name)

        return call

    calls = {
        "quick": candidate("quick", 0.004),
        "slow": candidate("slow", 0.25),
        "very slow": candidate("very slow", 9),
    }
    timings = measure.time_in_turns(calls, seconds=0.4)
    turns = [name for name, _ in itertools.groupby(order)]
    assert turns == [*["quick", "slow", "very slow"] * 2, *["quick", "slow"] * 2]
    assert {name: timing.repeats for name, timing in timings.items()} == {"quick": 36, "slow": 3, "very slow": 2}
    assert timings["slow"] == measure.Timing(*[pytest.approx(0.25)] * 3, 3)


@pytest.mark.parametrize("quadratic", [False, True], ids=["linear", "quadratic"])
def test_predictions_follow_the_growth(quadratic):
    lengths = [128, 256, 512, 1024]
    curve = [3 + 0.5 * n + quadratic * 0.01 * n * n for n in (*lengths, 16384)]
    assert measure.predict(lengths, curve[:-1], 16384, quadratic=quadratic) == pytest.approx(curve[-1])
    assert measure.predict(lengths[:1], curve[:1], 16384, quadratic=quadratic) is None


def test_two_measurements_of_something_quadratic_suffice():
    assert measure.predict([64, 128], [64**2, 128**2], 1024, quadratic=True) == pytest.approx(1024**2)


def test_new_processes_answer_fail_and_end(monkeypatch):
    assert in_new_process(os.getpid) != in_new_process(os.getpid)
    assert in_new_process(torch.get_num_threads) == torch.get_num_threads()
    monkeypatch.setenv("LLN_BACKEND", "torch")
    assert in_new_process(os.getenv, "LLN_BACKEND") == "torch"
    monkeypatch.delenv("LLN_BACKEND")
    assert in_new_process(os.getenv, "LLN_BACKEND") is None
    assert in_new_process(print, "not an answer") is None
    with pytest.raises(ValueError, match="math domain error"):
        in_new_process(math.sqrt, -1.0)
    with pytest.raises(MemoryError, match="ended without an answer"):
        in_new_process(os._exit, 3)
    with pytest.raises(ChildProcessError, match="has ended; repeat the command"):
        in_new_process(os.killpg, 0, signal.SIGKILL)
    new_process.stop_server()
    assert in_new_process(abs, -2) == 2


def test_memory_is_what_was_allocated():
    setting = Setting(heads=4, head_dim=64)
    matrix, output = 4 * 1024**2 * 4, 4 * 1024 * 64 * 4
    for name, matrices in (("softmax_explicit", 2), ("floor", 0)):
        call = candidates.OwnInputs(name, setting, False)
        peak = in_new_process(peak_of_call, call, 1024)
        assert peak.peak_bytes == pytest.approx(matrices * matrix + output, abs=2 * output)
        assert peak.peak_bytes - peak.extra_bytes == output


def test_the_papers_formula_is_lln_attention_with_batch_statistics():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 50, 64) for _ in range(3))
    expected = lln.lln_attention(q, k, v, matching="linear", scope="batch")
    torch.testing.assert_close(paper_attention(q, k, v), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("setting", [Setting(3, 16), Setting(3, 16, causal=True), Setting(3, 16, "bfloat16")], ids=str)
def test_candidates_compute_what_their_names_state(setting):
    torch.manual_seed(0)
    inputs = candidates.random_inputs(setting, 96)
    outputs = {}
    for name in (*candidates.MECHANISMS, "rfa"):
        try:
            output, *gradients = candidates.make_call(name, setting, inputs, backward=True).run()
        except candidates.CannotRunError:
            if setting.causal and name in ("paper", "nystrom"):
                continue
            raise
        assert output.shape == inputs[0].shape
        assert output.isfinite().all()
        assert sum(x.numel() for x in gradients) == sum(x.numel() for x in inputs)
        (outputs[name],) = candidates.make_call(name, setting, inputs, backward=False).run()
    close = {"rtol": 2e-2, "atol": 2e-2} if setting.dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(outputs["softmax"], outputs["softmax_explicit"], **close)
    torch.testing.assert_close(outputs["lln"], outputs["lln_torch"], **close)
    torch.testing.assert_close(outputs["lln"], lln.lln_attention(*inputs, is_causal=setting.causal), **close)
    assert "LLN_BACKEND" not in os.environ
    for name, package in (("performer", "performer-pytorch"), ("nystrom", "nystrom-attention")):
        taken = name == "performer" or setting.dtype == "float32"
        assert candidates.origin(name, setting).startswith(package if taken else "lln.zoo")


def test_options_reach_the_mechanisms_that_have_them(quick, tmp_path):
    setting = Setting(3, 16, options={"block_size": 5, "num_features": 7})
    inputs = candidates.random_inputs(setting, 40)
    (blocks,) = candidates.make_call("lln_diag", setting, inputs, backward=False).run()
    torch.testing.assert_close(blocks, lln.lln_diag_attention(*inputs, block_size=5))
    (plain,) = candidates.make_call("lln", setting, inputs, backward=False).run()
    torch.testing.assert_close(plain, lln.lln_attention(*inputs))
    assert candidates.origin("performer", setting) == "lln.zoo"  # its package has no such option
    out = tmp_path / "a.jsonl"
    arguments = ("--mechanisms", "softmax,lln_diag", "--forward-only", "--out", str(out))
    done = run(*ATTENTION, *arguments, "--option", "block_size=8")
    assert done.exit_code == 0, done.output
    assert only_result(out).settings["options"] == {"block_size": 8}
    assert only_result(out).run == "attention-float32-block_size=8"
    for option, message in (
        ("blok=3", "none of softmax, lln_diag has an option blok"),
        ("block_size=abc", "the option block_size of lln_diag cannot be 'abc'"),
        ("block_size=0", "block_size must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*ATTENTION, *arguments, "--option", option)


def test_rows_are_complete_and_nothing_is_measured_twice():
    rows = list(attention.compare_attention((32, 16), ("softmax", "lln"), passes=attention.PASSES, **SMALL))
    places = [(row["pass"], row["tokens"], row["mechanism"]) for row in rows]
    assert places == list(itertools.product(attention.PASSES, (16, 32), ("softmax", "lln")))
    assert all(row["milliseconds"] > 0 and row["peak_bytes"] >= row["extra_bytes"] >= 0 for row in rows)
    assert rows[0]["ratio"] == 1.0
    more = attention.compare_attention((16, 32, 48), ("softmax", "lln"), done=rows, **SMALL)
    assert {(row["pass"], row["tokens"]) for row in more} == {("forward", 48)}


def test_what_is_too_slow_too_large_or_impossible_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(attention, "free_bytes", lambda: 10_000)
    names = ("softmax", "softmax_explicit", "nystrom")
    done = [
        {"pass": "forward", "tokens": n, "mechanism": "softmax", "milliseconds": float(n * n), "peak_bytes": 1}
        for n in (8, 16)
    ]
    causal = SMALL | {"setting": Setting(1, 8, causal=True)}
    rows = list(attention.compare_attention((128,), names, max_seconds=10, done=done, **causal))
    softmax, explicit, nystrom = (row["skipped"] for row in rows)
    assert softmax == "a call would take about 16 s, over the limit of 10 s"
    assert rows[0]["predicted_milliseconds"] == pytest.approx(128**2)
    assert "matrices would take" in explicit
    assert nystrom == "cannot run: it has no causal form"
    shown = attention_tables(Result("attention", {}, tables={"rows": rows}))
    assert shown[0].rows[0] == ["softmax (SDPA)", "~16,384"]
    assert any("over the limit" in note for note in shown[0].notes)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(recording, "noise", lambda: {"load_average": 3.0, "busy_processors": 2.0, "quiet": False})


ATTENTION = ("attention", "--lengths", "16,32", "--mechanisms", "softmax,lln", "--heads", "1", "--head-dim", "8")
ATTENTION = (*ATTENTION, "--seconds", "0.01")


def test_a_run_that_was_stopped_continues(quick, tmp_path, monkeypatch):
    out = tmp_path / "deep/a.jsonl"
    add, stop_after = recording.Recording.add, 3

    def add_and_stop(self, row):
        add(self, row)
        if len(self.rows) == stop_after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recording.Recording, "add", add_and_stop)
        assert CliRunner().invoke(app, [*ATTENTION, "--out", str(out)]).exit_code != 0
    kept = only_result(out)
    assert len(kept.rows) == stop_after

    done = run(*ATTENTION, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "Others keep 2 processors busy" in " ".join(done.output.split())
    content = only_result(out)
    assert len(content.rows) == 2 * 2 * 2
    assert content.rows[:2] == kept.rows[:2]
    assert len(content.origin["noise"]) == 2
    assert content.origin["command"].startswith(
        "lln bench attention --lengths 16,32 --mechanisms softmax,lln --heads 1"
    )
    assert {"commit", "machine", "threads", "seed", "kernel"} <= content.origin.keys()
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".csv", b"pass,tokens")):
        assert out.with_name(f"attention-float32{ending}").read_bytes().startswith(start)

    assert "already has all of this" in " ".join(run(*ATTENTION, "--out", str(out)).output.split())
    with pytest.raises(ValueError, match=r"measured with another setting .* --fresh"):
        run(*ATTENTION, "--max-seconds", "9", "--out", str(out))
    assert run(*ATTENTION, "--causal", "--out", str(out)).exit_code == 0
    assert list(read_results(out, made_by="")) == ["attention-float32", "attention-float32-causal"]
    with pytest.raises(ValueError, match="the goals are for 12 heads of 64"):
        run(*ATTENTION, "--goals")
    with pytest.raises(ValueError, match="no candidate is called 'sofmax'; there are: softmax"):
        run("attention", "--mechanisms", "sofmax")


def test_a_damaged_record_is_named(quick, tmp_path):
    out = tmp_path / "a.jsonl"
    out.write_text('{"command": "lln b"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl is damaged: .*; restore it, or make it again with `lln bench att"):
        run(*ATTENTION, "--out", str(out))


def test_json(quick):
    done = run(*ATTENTION, "--forward-only", "--json")
    tables = [json.loads(line) for line in done.stdout.splitlines()]
    assert tables[0]["columns"] == ["tokens", "16", "32"]
    assert [row[0] for row in tables[0]["rows"]] == ["softmax (SDPA)", "LLN"]


def only_result(path):
    (result,) = read_results(path, made_by="lln bench").values()
    return result


def test_decoding_holds_a_state_or_a_growing_cache(quick, tmp_path):
    torch.manual_seed(0)
    key, value = torch.randn(2, 1, 2, 21, 8).unbind()
    inside = decode._cache_call(key.clone(), value.clone(), copied=False)
    copied = decode._cache_call(key[:, :, :-1], value[:, :, :-1], copied=True)
    for mine, same in zip(inside.inputs, copied.inputs, strict=True):
        mine.copy_(same)
    torch.testing.assert_close(inside.run(), copied.run())

    out = tmp_path / "decode.jsonl"
    arguments = ["decode", "--lengths", "32,70", "--heads", "2", "--head-dim", "8", "--seconds", "0.05"]
    arguments += ["--out", str(out)]
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    rows = {(row["mechanism"], row["tokens"]): row for row in only_result(out).rows}
    assert set(rows) == set(itertools.product(decode.MECHANISMS, (32, 70)))
    for name in ("lln", "lln_diag"):
        assert rows[name, 32]["held_bytes"] == rows[name, 70]["held_bytes"]
    for name in ("cache", "cache_cat"):
        assert [rows[name, n]["held_bytes"] for n in (32, 70)] == [2 * 2 * 8 * 4 * n for n in (32, 70)]
    assert "already has all of this" in " ".join(run(*arguments).output.split())


def test_states_after_pieces_are_those_of_one_prefill(monkeypatch):
    monkeypatch.setattr(decode, "PIECE", 7)
    drawn = []
    monkeypatch.setattr(
        decode, "random_heads", lambda n, **sizes: drawn.append(torch.randn(3, 1, 1, n, 4)) or drawn[-1]
    )
    torch.manual_seed(0)
    (_, first), (_, last) = decode._states("lln", (5, 23), heads=1, head_dim=4)
    _, expected = lln.LLNState.empty(1, 1, 4).prefill(*torch.cat(drawn, dim=3))
    torch.testing.assert_close(last.values, expected.values)
    assert first.count.item() == 5
    assert last.count.item() == 23


def test_training_steps_are_measured_or_predicted(quick, tmp_path, monkeypatch):
    tiny = model.ModelSetting(layers=1, hidden_size=16, heads=2, vocabulary=50, block_size=8)
    monkeypatch.setattr(model, "ROBERTA_BASE", tiny)
    out = tmp_path / "model.jsonl"
    arguments = ["model", "--lengths", "16,48,4096", "--mechanisms", "eager,lln_diag"]
    arguments += ["--seconds", "0", "--max-seconds", "1e-9"]
    done = run(*arguments, "--out", str(out))
    assert done.exit_code == 0, done.output
    rows = only_result(out).rows
    assert [row["tokens"] for row in rows] == [16, 16, 48, 48, 4096, 4096]
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows[:4])
    assert all("over the limit" in row["skipped"] and row["predicted_seconds"] > 0 for row in rows[4:])
    assert "published" in done.output
    with pytest.raises(ValueError, match="no attention of this comparison is called 'flash'"):
        list(model.compare_training((16,), ("flash",)))


def test_training_steps_with_options(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "ROBERTA_BASE", model.ModelSetting(layers=1, hidden_size=16, heads=2, vocabulary=50))
    out = tmp_path / "model.jsonl"
    arguments = ["model", "--lengths", "16", "--mechanisms", "sdpa,lln_diag", "--seconds", "0", "--out", str(out)]
    assert run(*arguments, "--option", "block_size=8").exit_code == 0
    result = only_result(out)
    assert (result.run, result.settings["options"]) == ("model-block_size=8", {"block_size": 8})
    with pytest.raises(ValueError, match="block_size must be"):  # of the mechanism, in the process of the step
        run(*arguments, "--option", "block_size=0")
    with pytest.raises(ValueError, match="none of sdpa, lln_diag has an option size"):
        run(*arguments, "--option", "size=8")


def test_a_step_that_does_not_fit_is_a_reason_not_a_crash(monkeypatch):
    monkeypatch.setattr(model, "free_bytes", lambda: 2**20)
    tiny = model.ModelSetting(layers=1, hidden_size=64, heads=2, vocabulary=5000)
    (row,) = model.compare_training((2048,), ("eager",), setting=tiny)
    assert row["skipped"] == "did not fit into memory"
