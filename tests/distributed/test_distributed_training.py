"""`lln train mlm --sequence-parallel`: the curve of one process, also after a process was killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("accelerate")

from lln.tasks.mlm import MlmConfig, train

FLAGS = {
    "options": {"block_size": 8},
    "layers": 1,
    "width": 16,
    "heads": 2,
    "feedforward": 16,
    "length": 40,
    "vocab_size": 270,
    "batch_size": 4,
    "steps": 12,
    "log_every": 2,
    "save_every": 3,
    "eval_every": 5,
    "eval_examples": 5,
    "record_every": 0,
}
# The command, in which rank 1 is killed after step 5, and after a restart after step 8.
DYING = """
import os, signal, sys
from lln.tasks import trainer
step_end = trainer._Flow.on_step_end
def dying(self, args, state, *rest, **kwargs):
    if state.global_step == (5, 8)[int(os.environ["TORCHELASTIC_RESTART_COUNT"])] and args.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step_end(self, args, state, *rest, **kwargs)
trainer._Flow.on_step_end = dying
from lln.cli import main
main()
"""
CLOCK = ("seconds", "tokens_per_second", "eval_seconds")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLN_BACKEND", "torch")  # processes with this cache would build the C code again
    monkeypatch.delenv("LLN_DATA", raising=False)
    words = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "in", "ok", "um")]
    rng = np.random.default_rng(0)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(rng.choice(words, 40))}) + "\n" for _ in range(150)))
    return path


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: x for name, x in line.items() if name not in CLOCK} for line in lines]


def torchrun(script, source, out):
    flags = {name: x for name, x in FLAGS.items() if name != "options"} | {"source": source, "out": out}
    words = [word for name, x in flags.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    launch += ["--max-restarts", "1"]
    return subprocess.run(
        [
            *launch,
            str(script),
            "train",
            "mlm",
            *words,
            "--option",
            "block_size=8",
            "--sequence-parallel",
            "2",
            "--quiet",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
def test_a_run_over_two_processes_is_killed_and_continued(source, tmp_path):
    """Rank 1 is killed twice: torchrun continues from the checkpoint, then one process does."""
    script, one, two = tmp_path / "script.py", tmp_path / "one", tmp_path / "two"
    script.write_text(DYING)
    config = MlmConfig.preset("laptop", source=str(source), **FLAGS)
    train(config, out=one, quiet=True)
    done = torchrun(script, source, two)
    assert done.returncode != 0
    assert f"Signal {signal.SIGKILL.value}" in done.stderr or "rank 1 did not take part" in done.stderr, done.stderr
    assert Path(two, "checkpoints", "step-6").exists()
    train(config, out=two, quiet=True)
    assert [x["step"] for x in json.loads((two / "provenance.json").read_text())["continued"]] == [3, 6]
    for expected, found in zip(metrics(one), metrics(two), strict=True):
        assert found == pytest.approx(expected, rel=2e-5)


def test_what_cannot_be_shared_is_refused(source, tmp_path):
    config = {"source": str(source), **FLAGS}
    with pytest.raises(ValueError, match="sequence_parallel is for lln and lln_diag"):
        MlmConfig.preset("laptop", **config | {"attention": "elu", "options": {}, "sequence_parallel": 2})
    with pytest.raises(ValueError, match="sequence_parallel 2 does not divide 1 processes"):
        train(MlmConfig.preset("laptop", **config, sequence_parallel=2), out=tmp_path / "run", quiet=True)
