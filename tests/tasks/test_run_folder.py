"""Run folders: what they refuse, and what they keep when a disk or a process fails."""

import errno
import json
import os
from pathlib import Path

import pytest

from lln.tasks.presets import MlmConfig
from lln.tasks.run import RunFolder, open_run

SETTINGS = {"seed": 3, "steps": 5, "betas": (0.9, 0.98)}


@pytest.fixture
def run(tmp_path):
    with RunFolder(tmp_path / "run", SETTINGS) as run:
        yield run


def save(run, *steps, keep=2):
    for step in steps:
        run.save_checkpoint(step, {"model": f"weights {step}".encode(), "optimizer": b"moments"}, keep=keep)


def test_config_and_provenance(run):
    assert json.loads((run.path / "config.json").read_text()) == SETTINGS | {"betas": [0.9, 0.98]}
    origin = json.loads((run.path / "provenance.json").read_text())
    assert origin["seed"] == 3
    assert origin["command"].split()[0] == "lln"
    assert {"commit", "machine", "torch"} <= origin.keys()


def test_same_settings_continue_and_others_are_refused(run):
    run.close()
    with RunFolder(run.path, SETTINGS):
        pass
    with pytest.raises(ValueError, match=r"other settings: steps was 5, is 6; extra was None, is 1\."):
        RunFolder(run.path, SETTINGS | {"steps": 6, "extra": 1})


def test_other_data_are_refused(run):
    run.check_data({"train_examples": 5})
    run.check_data({"train_examples": 5})
    with pytest.raises(ValueError, match="other data: train_examples was 5, is 6"):
        run.check_data({"train_examples": 6})


def test_one_process_at_a_time(run):
    with pytest.raises(ValueError, match="another process is at work"):
        RunFolder(run.path, SETTINGS)
    run.close()
    RunFolder(run.path, SETTINGS).close()


def test_not_a_run_folder(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="holds other files"):
        RunFolder(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"letter\.txt is a file"):
        RunFolder(tmp_path / "letter.txt", SETTINGS)


def test_killed_before_the_config_was_written(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".partial-config.json").write_text("{")
    RunFolder(tmp_path, SETTINGS).close()
    assert (tmp_path / "config.json").exists()


def failed_start(path):
    with pytest.raises(ValueError, match="no data"), RunFolder(path, SETTINGS):
        raise ValueError("no data")


def test_a_failed_start_leaves_nothing(tmp_path):
    failed_start(tmp_path / "new" / "run")
    assert not list(tmp_path.iterdir())
    RunFolder(tmp_path / "new" / "run", SETTINGS | {"steps": 6}).close()


def test_a_failed_start_keeps_what_was_there(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    failed_start(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "checkpoints"]
    (tmp_path / "other").mkdir()
    failed_start(tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("begun", ["config.json", "metrics.jsonl", "summary.json", "checkpoints/step-2"])
def test_a_run_that_has_begun_is_kept(tmp_path, begun):
    if begun == "config.json":
        RunFolder(tmp_path / "run", SETTINGS).close()
    run = RunFolder(tmp_path / "run", SETTINGS)
    if begun.startswith("checkpoints"):
        save(run, 2)
    elif begun != "config.json":
        (run.path / begun).write_text('{"step": 1}\n')
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    assert (tmp_path / "run" / begun).exists()
    with pytest.raises(ValueError, match="other settings"):
        RunFolder(tmp_path / "run", SETTINGS | {"steps": 6})


def test_a_start_beside_another_removes_nothing(run):
    with pytest.raises(ValueError, match="another process is at work"):
        RunFolder(run.path, SETTINGS)
    assert (run.path / "config.json").exists()


@pytest.mark.parametrize("content", ["", '{"seed": 3, "ste', "[1]", "\xff"], ids=["empty", "cut", "list", "bytes"])
@pytest.mark.parametrize(
    ("name", "read", "remedy"),
    [
        ("config.json", lambda run: RunFolder(run.path, SETTINGS), "begin the run again in another folder"),
        ("data.json", lambda run: run.check_data({"train_examples": 5}), "remove it"),
        ("provenance.json", lambda run: run.note_continued(3), "remove it"),
        ("summary.json", lambda run: run.summary, "remove it"),
    ],
    ids=["config", "data", "provenance", "summary"],
)
def test_a_damaged_file_is_named(run, name, read, remedy, content):
    (run.path / name).write_text(content, encoding="latin-1")
    run.close()
    with pytest.raises(ValueError, match=rf"run/{name} is damaged: .*; .*{remedy}"):
        read(run)
    assert (run.path / name).exists()


def test_read_only(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=r"run cannot be written: Read-only file system; choose another, --out"):
        RunFolder(tmp_path / "run", SETTINGS)


def test_newest_checkpoints_are_kept(run):
    assert run.checkpoint() is None
    save(run, 2, 9, 10)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step-10", "step-9"]
    assert run.checkpoint().name == "step-10"


def damage_shorter(folder):
    (folder / "model").write_bytes(b"weig")


def damage_bit(folder):
    (folder / "model").write_bytes(b"weights 3"[::-1])


def damage_missing(folder):
    (folder / "optimizer").unlink()


def damage_manifest(folder):
    (folder / "manifest.json").write_text('{"files": ')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_shorter, "model has 4 bytes instead of 9"),
        (damage_bit, "model has changed since it was written"),
        (damage_missing, "optimizer: No such file or directory"),
        (damage_manifest, "manifest.json cannot be read"),
    ],
)
def test_damaged_checkpoint_falls_back(run, capsys, damage, reason):
    save(run, 2, 3)
    damage(run.path / "checkpoints" / "step-3")
    assert run.checkpoint().name == "step-2"
    assert capsys.readouterr().err == f"Checkpoint step-3 is damaged ({reason}): taking the one before.\n"
    save(run, 3)  # the continued run comes to that step again
    assert run.checkpoint().name == "step-3"


@pytest.mark.parametrize("call", [1, 2, 3], ids=["first file", "second file", "manifest"])
def test_full_disk_leaves_earlier_checkpoints(run, monkeypatch, call):
    save(run, 2, 3)
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match=r"No space left on device; step-3 is intact"):
            save(run, 4)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step-2", "step-3"]
    assert run.checkpoint().name == "step-3"


def test_rest_of_a_killed_writer_is_removed(run):
    save(run, 2)
    rest = run.path / "checkpoints" / ".partial-step-3"
    rest.mkdir()
    assert run.checkpoint().name == "step-2"
    assert not rest.exists()


def test_cut_leaves_no_step_twice(run):
    metrics, records = run.path / "metrics.jsonl", run.path / "records.jsonl"
    metrics.write_text("".join(f'{{"step": {i}, "loss": null}}\n' for i in (2, 4, 6)) + '{"step": 8, "lo')
    records.write_text("".join(f'{{"step": {i}}}\n' for i in (0, 3, 4, 5)))
    run.cut(4)  # four steps done: numbers 0 to 3 of the records
    assert [line["step"] for line in run.metrics()] == [2, 4]
    assert records.read_text() == '{"step": 0}\n{"step": 3}\n'


def test_finished(run):
    assert run.summary is None
    run.finish(lambda folder: (folder / "weights").touch(), {"eval_loss": 1.5})
    assert run.summary == {"eval_loss": 1.5}
    assert (run.path / "model" / "weights").exists()


def test_open_run_reports_that_it_is_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = MlmConfig.preset("laptop", attention="lln")
    with open_run("mlm", config, None, quiet=False) as run:
        run.finish(lambda folder: None, {})
    assert run.path == Path("runs/mlm-lln-seed0")
    with open_run("mlm", config, None, quiet=False):
        assert "runs/mlm-lln-seed0 is finished: nothing to do." in capsys.readouterr().err
