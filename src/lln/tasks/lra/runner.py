"""`lln lra run`: a matrix of tasks, methods and seeds, each run in a process of its own, several side by side.

A run lives in a folder named after it and can be stopped at any moment: the same command goes on with what is
unfinished. A process whose parent is gone stops by itself, with a checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lln.instruments.records import read_records
from lln.tasks.config import parse_options
from lln.tasks.lra.examples import TASKS
from lln.tasks.lra.recipe import RESULT, LraConfig, read_data, read_result, recipe
from lln.tasks.run import CONFIG, check_same, make_folder, write_json

METHODS = ("softmax", "reformer", "performer", "skyformer", "lln", "lln_diag")
POLL_SECONDS = 1.0
RESULTS = "lra.json"

# What is heard of the matrix: a run's configuration, the steps done, and a word ("loss 1.234", "accuracy 38.1 %").
Tell = Callable[[LraConfig, int, str], None]


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """A method and its options, as lln_diag or lln_diag:block_size=128:matching=entropy."""
    name, *options = text.split(":")
    return name, parse_options(options, flag=f"{name}:")


def matrix(
    tasks: Sequence[str] = tuple(TASKS),
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0,),
    *,
    preset: str = "laptop",
    **changes: Any,
) -> list[LraConfig]:
    """The configurations of all runs, with equal budgets for all methods of a task; `changes` hold for all of them."""
    parsed = [parse_method(method) for method in methods]
    runs = [
        recipe(preset, task, name, seed=seed, options=options, **changes)
        for seed in seeds
        for task in tasks
        for name, options in parsed
    ]
    if len({run.name for run in runs}) < len(runs):
        raise ValueError("a task, a method or a seed is named twice")
    if not runs:
        raise ValueError("name at least one task, one method and one seed")
    return runs


def run_matrix(
    runs: Sequence[LraConfig], *, out: Path, data_dir: Path | None = None, jobs: int = 1, tell: Tell | None = None
) -> list[dict[str, Any]]:
    """Do what is unfinished, `jobs` runs at a time; returns the results of all.

    `out`/lra.json has those of every finished run in the folder, also if the matrix is stopped before its end. A
    run that fails does not keep the others from going on; at the end it is a RuntimeError.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    for run in runs:  # a folder's name does not say the budget
        begun = out / run.name / CONFIG
        if begun.exists():
            check_same(begun, run.settings(), "settings")
    make_folder(out, "--out")
    tell = tell or (lambda run, step, word: None)
    todo = [run for run in runs if not (out / run.name / RESULT).exists()]
    for run in runs:
        if run not in todo:
            tell(run, run.steps or 0, _word(read_result(out / run.name)))
    for config in {run.task: run for run in todo}.values():
        read_data(config, data_dir)  # what is missing is said now, and what is generated is made once
    _collect(out)
    failed: list[str] = []
    working: list[_Worker] = []
    with _asked_to_stop_as_interrupt():
        try:
            while todo or working:
                while todo and len(working) < jobs:
                    working.append(_Worker.start(todo.pop(0), out, data_dir, threads=max(1, _cores() // jobs)))
                time.sleep(POLL_SECONDS)
                for worker in list(working):
                    step, word, ended = worker.look()
                    if ended:
                        working.remove(worker)
                        _collect(out)
                        if not (worker.folder / RESULT).exists():
                            failed.append(f"{worker.config.name} (see {worker.log})")
                            word = f"failed: {worker.last_words()}"
                    tell(worker.config, step, word)
        finally:
            for worker in working:
                worker.process.terminate()
            for worker in working:
                worker.process.wait()
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")
    return [read_result(out / run.name) for run in runs]


def _collect(out: Path) -> None:
    write_json(out / RESULTS, [read_result(path.parent) for path in sorted(out.glob(f"*/{RESULT}"))])


@dataclass
class _Worker:
    config: LraConfig
    folder: Path
    log: Path
    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls, config: LraConfig, out: Path, data_dir: Path | None, *, threads: int) -> "_Worker":
        folder, log = out / config.name, out / f"{config.name}.log"
        job = {"config": config.settings(), "out": str(folder), "data_dir": str(data_dir) if data_dir else None}
        command = [sys.executable, "-m", "lln.tasks.lra.worker", json.dumps(job)]
        with log.open("ab") as file:
            # A session of its own: Ctrl-C reaches it through this process, once.
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
            )
        return cls(config, folder, log, process)

    def look(self) -> tuple[int, str, bool]:
        """The steps done, a word on how it goes, and whether it has ended."""
        ended = self.process.poll() is not None
        if ended and (self.folder / RESULT).exists():
            return self.config.steps or 0, _word(read_result(self.folder)), True
        try:
            lines = [line for line in read_records(self.folder / "metrics.jsonl") if line.get("loss") is not None]
        except (FileNotFoundError, ValueError):  # not begun; or damaged, which the run itself refuses
            lines = []
        step = int(lines[-1]["step"]) if lines else 0
        word = f"loss {lines[-1]['loss']:.3f}" if lines else "starting"
        return step, "testing" if step == self.config.steps else word, ended

    def last_words(self) -> str:
        if self.process.returncode == -signal.SIGKILL:
            return "it was killed; if memory ran out, fewer --jobs need less"
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.returncode}"


def _word(result: dict[str, Any]) -> str:
    return f"accuracy {result['accuracy']:.2%} in {result['seconds'] / 60:.1f} min"


def _cores() -> int:
    return os.cpu_count() or 1


@contextmanager
def _asked_to_stop_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the matrix as Ctrl-C does: the runs are asked to stop and leave a checkpoint."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
