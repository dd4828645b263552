"""Jobs in processes of their own, several side by side, each with its share of the cores.

Ctrl-C and SIGTERM end all of them, after a checkpoint each. A job whose scheduler was killed stops in the same way.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lln.terminal import errors

POLL_SECONDS, PARENT_SECONDS = 0.5, 2.0
PARENT = "LLN_SCHEDULER"  # environment variable of a job: the process that started it


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job: `lln COMMAND`, and how to check that it is finished."""

    name: str
    log: Path
    command: Callable[[], list[str]]  # called when the job starts: it may depend on what earlier jobs found
    is_finished: Callable[[], bool]
    record: Callable[[], str]  # records what a finished job found, and returns a short text on it
    is_ready: Callable[[], bool] = lambda: True  # whether what it starts from is finished


def run_jobs(
    waiting: Sequence[Planned],
    *,
    side_by_side: int,
    on_end: Callable[[Planned, float], None] = lambda job, seconds: None,
) -> None:
    """Run jobs, those that are ready in their order. Jobs that fail, or wait for one that has, are named at the end."""
    left = list(waiting)
    is_main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    before = signal.signal(signal.SIGTERM, _interrupt) if is_main else None
    running: dict[str, tuple[Planned, subprocess.Popen[bytes], float]] = {}
    failed: list[Planned] = []
    try:
        while left or running:
            for job in [job for job in left if job.is_ready()][: side_by_side - len(running)]:
                left.remove(job)
                running[job.name] = (job, _start(job, side_by_side), time.monotonic())
                errors.print(f"{job.name}: started")
            if not running:
                break
            time.sleep(POLL_SECONDS)
            for job, process, began in list(running.values()):
                if process.poll() is None:
                    continue
                del running[job.name]
                if process.returncode != 0 or not job.is_finished():
                    failed.append(job)
                    errors.print(f"{job.name}: failed, see {job.log}")
                    continue
                seconds = time.monotonic() - began
                errors.print(f"{job.name}: {job.record()} after {seconds:.0f} s")
                on_end(job, seconds)
    finally:  # each saves a checkpoint and ends
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    if failed or left:
        missing = ", ".join(job.name for job in failed + left)
        raise ValueError(f"{len(failed + left)} runs are not finished: {missing}; the same command tries them again")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def threads_of_each(side_by_side: int) -> int:
    return max(1, (os.cpu_count() or 1) // side_by_side)


def _start(job: Planned, side_by_side: int) -> subprocess.Popen[bytes]:
    with job.log.open("ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads_of_each(side_by_side)), PARENT: str(os.getpid())}
        command = [sys.executable, "-m", "lln.cli", *job.command()]
        # A session of its own: Ctrl-C reaches it through this process, once, since a second signal ends it at once.
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def stop_with_scheduler() -> None:
    """In a job: have this process sent SIGTERM when the process that started it is gone."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    if (parent := os.environ.pop(PARENT, None)) is not None:
        threading.Thread(target=watch, args=(int(parent),), daemon=True).start()
