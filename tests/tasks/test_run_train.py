"""Training: killed and continued, in several processes and pieces, in fp16, and what it measures."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers import empty_cache
from lln.tasks import trainer
from lln.tasks.config import TrainConfig
from lln.tasks.mlm import MlmConfig, train
from lln.tasks.run import RunFolder
from lln.tasks.trainer import fit

SMALL = {
    "attention": "lln_diag",
    "options": {"block_size": 8},
    "layers": 1,
    "width": 16,
    "heads": 2,
    "feedforward": 16,
    "length": 16,
    "vocab_size": 270,
    "batch_size": 4,
    "steps": 12,
    "log_every": 2,
    "save_every": 3,
    "eval_every": 5,
    "record_every": 4,
    "eval_examples": 5,
    "dropout": 0.2,
    "attention_dropout": 0.2,
}
CLOCK = ("seconds", "tokens_per_second", "eval_seconds")
# Runs in a process of its own. It ends as soon as the N-th checkpoint has all its files but not yet its name.
DIES_WHILE_SAVING = """
import os, signal
from pathlib import Path
rename, left = Path.rename, [int(os.environ["CHECKPOINTS"])]
def dying(self, target):
    if self.name.startswith(".partial-step"):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = dying
"""
TRAIN = """
import json, os, torch
from pathlib import Path
from lln.tasks.mlm import MlmConfig, train
torch.set_num_threads(1)
train(MlmConfig.preset("laptop", **json.loads(os.environ["CHANGES"])), out=Path(os.environ["OUT"]), quiet=True)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small text; what is made of it is cached beside it."""
    folder = tmp_path_factory.mktemp("source")
    words = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "in", "ok", "um")]
    rng = np.random.default_rng(0)
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(rng.choice(words, 40))}) + "\n" for _ in range(150)))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LLN_DATA", raising=False)
        empty_cache(folder, patch)
        yield str(path)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The folder of a run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small(source), out=folder, quiet=True)
    return folder


def small(source, **changes):
    return MlmConfig.preset("laptop", **SMALL | {"source": source} | changes)


def metrics(folder):
    """The lines of metrics.jsonl without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def start(source, out, script, **environment):
    changes = json.dumps(SMALL | {"source": source})
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"CHANGES": changes, "OUT": str(out), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def killed_by(process):
    output, _ = process.communicate()
    assert process.returncode < 0, output.decode()
    return -process.returncode


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["once", "twice"])
def test_killed_and_continued_is_bit_identical(source, whole, tmp_path, capfd, times):
    killed = tmp_path / "killed"
    if times == 2:
        process = start(source, killed, TRAIN)
        while process.poll() is None and not (killed / "checkpoints" / "step-3").exists():
            time.sleep(0.01)
        process.kill()  # somewhere behind step 3
        assert killed_by(process) == signal.SIGKILL

    process = start(source, killed, DIES_WHILE_SAVING + TRAIN, CHECKPOINTS="2" if times == 2 else "3")
    assert killed_by(process) == signal.SIGKILL
    assert list((killed / "checkpoints").glob(".partial-step-*"))

    # The newest checkpoint is damaged as well.
    newest, before = sorted((killed / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))[::-1]
    content = (newest / "optimizer.pt").read_bytes()
    (newest / "optimizer.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    capfd.readouterr()
    continued = train(small(source), out=killed)
    printed = " ".join(capfd.readouterr().err.split())
    assert f"Checkpoint {newest.name} is damaged (optimizer.pt has changed since it was written)" in printed
    assert f"from step {before.name[5:]} of 12." in printed

    assert (killed / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert metrics(killed) == metrics(whole)
    assert (killed / "records.jsonl").read_text() == (whole / "records.jsonl").read_text()
    assert continued["eval_loss"] == json.loads((whole / "summary.json").read_text())["eval_loss"]
    assert len(json.loads((killed / "provenance.json").read_text())["continued"]) == times


def test_packed_documents_continued_are_bit_identical(source, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    summary = train(small(source, pack=True, steps=7), out=whole, quiet=True)
    assert summary["tokens"] == 7 * 4 * 16  # as many as without
    save = RunFolder.save_checkpoint

    def stop(run, step, *args, **kwargs):
        save(run, step, *args, **kwargs)
        if step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        train(small(source, pack=True, steps=7), out=stopped, quiet=True)
    monkeypatch.setattr(RunFolder, "save_checkpoint", save)
    train(small(source, pack=True, steps=7), out=stopped, quiet=True)
    assert (stopped / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert metrics(stopped) == metrics(whole)
    assert (stopped / "records.jsonl").read_text() == (whole / "records.jsonl").read_text()


def test_what_a_run_leaves(source, whole):
    out, summary = whole, json.loads((whole / "summary.json").read_text())
    lines = metrics(out)
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [2, 3, 4, 6, 8, 9, 10, 12]  # also where checkpoints are
    assert [line["step"] for line in lines if "eval_loss" in line] == [5, 10, 12]
    assert {"learning_rate", "grad_norm", "tokens"} <= trained[0].keys()
    assert trained[-1]["tokens"] == summary["tokens"] == 12 * 4 * 16
    records = list(map(json.loads, (out / "records.jsonl").read_text().splitlines()))
    assert [(line["step"], line["head"]) for line in records] == [(step, head) for step in (0, 4, 8) for head in (0, 1)]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-12", "step-9"]
    assert list((out / "tensorboard").iterdir())
    assert summary["eval_loss"] == lines[-1]["eval_loss"]
    assert summary["attention"] == "lln_diag"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert train(small(source), out=out, quiet=True) == summary
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}.items() <= before.items()


def test_stopped_by_a_signal_goes_on(source, whole, tmp_path, monkeypatch):
    from lln.tasks.data.masking import MaskedDataset

    stopped = tmp_path / "stopped"
    handler = signal.getsignal(signal.SIGINT)
    example, seen = MaskedDataset.example, []

    def ctrl_c(self, index, epoch):
        seen.append(index)
        if len(seen) == 6 + 7 * 4:  # six for the fingerprint
            signal.raise_signal(signal.SIGINT)
        return example(self, index, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(MaskedDataset, "example", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            train(small(source), out=stopped, quiet=True)
    assert not (stopped / "summary.json").exists()
    assert (stopped / "checkpoints").exists()
    train(small(source), out=stopped, quiet=True)
    assert (stopped / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert signal.getsignal(signal.SIGINT) is handler


DIES_IN_THE_LAST_EVALUATION = """
import signal
from lln.tasks import trainer
evaluating = trainer.Display.evaluating
begun = 0
def dying(self, share):
    global begun
    begun += share == 0
    if begun == 3:  # after those of steps 5 and 10
        signal.raise_signal(signal.{})
    evaluating(self, share)
trainer.Display.evaluating = dying
"""


@pytest.mark.parametrize("how", ["SIGINT", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_stopped_in_the_last_evaluation_evaluates_again(source, whole, tmp_path, monkeypatch, how):
    stopped = tmp_path / "stopped"
    if how == "SIGINT":
        monkeypatch.setattr(trainer.Display, "evaluating", evaluating := trainer.Display.evaluating)
        exec(DIES_IN_THE_LAST_EVALUATION.format(how), {})
        with pytest.raises(KeyboardInterrupt):
            train(small(source), out=stopped, quiet=True)
        trainer.Display.evaluating = evaluating
    else:
        process = start(source, stopped, DIES_IN_THE_LAST_EVALUATION.format(how) + TRAIN)
        assert killed_by(process) == signal.SIGKILL
    assert (stopped / "checkpoints/step-12").exists()
    assert [line["step"] for line in metrics(stopped) if "eval_loss" in line] == [5, 10]
    train(small(source), out=stopped, quiet=True)
    assert metrics(stopped) == metrics(whole)
    for name in ("model/model.safetensors", "records.jsonl"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()
    assert [again["step"] for again in json.loads((stopped / "provenance.json").read_text())["continued"]] == [12]


def test_two_processes_give_the_same_curve(source, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    changes = {"dropout": 0.0, "attention_dropout": 0.0}
    train(small(source, **changes), out=one, quiet=True)
    script = tmp_path / "script.py"
    script.write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    given = {"CHANGES": json.dumps(SMALL | {"source": source} | changes), "OUT": str(two), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, env=os.environ | given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(metrics(one)) == len(metrics(two))
    for expected, found in zip(metrics(one), metrics(two), strict=True):
        assert found == pytest.approx(expected, rel=2e-4)


def test_pieces_give_the_same_curve(source, tmp_path):
    """The number of masked tokens differs from piece to piece, and the loss is the mean over all of them."""
    changes = {"dropout": 0.0, "attention_dropout": 0.0, "length": 9, "mask_probability": 0.3}
    train(small(source, **changes), out=tmp_path / "one", quiet=True)
    train(small(source, **changes, gradient_accumulation=4), out=tmp_path / "four", quiet=True)
    for expected, found in zip(metrics(tmp_path / "one"), metrics(tmp_path / "four"), strict=True):
        assert found == pytest.approx(expected, rel=2e-4)


def test_fp16_lowers_the_loss_scale_until_it_fits(source, tmp_path):
    out = tmp_path / "run"
    config = small(source, precision="fp16", loss_scale=2.0**40, scale_window=2, clip=0.0, log_every=1, steps=40)
    train(config, out=out, quiet=True)
    lines = [line for line in metrics(out) if "loss" in line]
    scales = [line["loss_scale"] for line in lines]
    assert scales[0] == 2.0**39
    assert lines[0]["grad_norm"] is None  # infinite
    assert min(scales) < 2.0**36
    assert any(after > before for before, after in pairwise(scales))
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert any(line["grad_norm"] is not None for line in lines)


def test_batches_that_do_not_divide(source, tmp_path):
    with pytest.raises(ValueError, match="batch_size 4 does not divide into 3 equal parts"):
        train(small(source, gradient_accumulation=3), out=tmp_path / "run", quiet=True)


def test_mechanisms_that_cannot_be_recorded_are_named(source, tmp_path, capfd):
    train(small(source, attention="elu", options={}, steps=2), out=tmp_path / "run")
    assert "No records of heads: elu is not among" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "run" / "records.jsonl").exists()


class Points:
    """Points of a plane and their quadrants."""

    def __init__(self, count, seed):
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.points)

    def example(self, index, epoch):
        x, y = self.points[index]
        return {"points": self.points[index], "labels": torch.tensor(int(x > 0) + 2 * int(y > 0))}


class Plain(nn.Module):
    """Not of transformers, with tied weights and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 4), nn.Linear(2, 4)
        self.outer.weight = self.inner.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, points, labels):
        self.calls += self.training
        logits = self.inner(points) + self.outer(points)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


@dataclass(frozen=True, kw_only=True)
class PlainConfig(TrainConfig):
    pass


def test_any_module_and_every_example_counts(tmp_path):
    torch.manual_seed(0)
    model, held_out = Plain(), Points(13, seed=2)
    config = PlainConfig(epochs=10.0, batch_size=4, learning_rate=0.1, record_every=0, precision="bf16")
    with RunFolder(tmp_path / "run", config.settings()) as run:
        summary = fit(
            model,
            run=run,
            config=config,
            train_data=Points(41, seed=1),
            eval_data=held_out,
            tokens=lambda batch: len(batch["labels"]),
            quiet=True,
        )
    assert summary["steps"] == 103  # ceil(10 * 41 / 4)
    assert model.calls == 103
    batch = [held_out.example(i, 0) for i in range(13)]
    points, labels = (torch.stack([example[key] for example in batch]) for key in ("points", "labels"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(points, labels)["logits"]
    assert summary["eval_accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).double().mean()))
    assert summary["eval_loss"] == pytest.approx(float(cross_entropy(logits.float(), labels)), rel=1e-2)
    assert summary["eval_accuracy"] > 0.7
    fresh = Plain()
    from safetensors.torch import load_model

    load_model(fresh, tmp_path / "run" / "model" / "model.safetensors")
    assert torch.equal(fresh.outer.weight, model.outer.weight)
    assert fresh.calls == 103


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "there must be something to train"),
        ({"steps": 5, "epochs": 1.0}, "give steps or epochs, one of them"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"keep_checkpoints": 1}, "keep_checkpoints must be at least 2"),
        ({"decay": "step"}, "decay must be one of linear, cosine, constant; got 'step'"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"attention": "lnn"}, "no mechanism is called 'lnn'"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        MlmConfig.preset("laptop", **changes)


def test_presets():
    assert MlmConfig.preset("laptop", epochs=2.0).steps is None
    with pytest.raises(ValueError, match="there is no preset 'phone'; there are: laptop, paper"):
        MlmConfig.preset("phone")
    with pytest.raises(TypeError, match="stesp"):
        MlmConfig.preset("laptop", stesp=5)


def test_what_a_preset_gives_a_mechanism_can_be_changed():
    learned = {"combine": "ratio", "share": 0.1}
    assert MlmConfig.preset("laptop").options == learned
    assert MlmConfig.preset("laptop", options={"block_size": 32}).options == learned | {"block_size": 32}
    assert MlmConfig.preset("laptop", options={"combine": "average"}).options == {"combine": "average"}
    assert MlmConfig.preset("laptop", attention="lln").options == {}
    assert MlmConfig.preset("paper").options == {}
