"""The scheduler of runs: a stop reaches every job once, and a job does not outlive its scheduler."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lln.tasks import schedule
from lln.tasks.schedule import Planned, run_jobs


class Endless:
    """A process that runs until it is stopped."""

    def __init__(self, command, **options):
        assert options["start_new_session"]
        self.calls = []
        ENDLESS.append(self)

    def poll(self):
        return None

    def terminate(self):
        self.calls.append("terminate")

    def wait(self):
        self.calls.append("wait")


ENDLESS: list[Endless] = []


def test_a_stop_signals_every_job_once_and_waits_for_it(monkeypatch, tmp_path):
    ENDLESS.clear()
    monkeypatch.setattr(subprocess, "Popen", Endless)
    monkeypatch.setattr(schedule.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    jobs = [
        Planned(name=name, log=tmp_path / name, command=lambda: ["zoo"], is_finished=lambda: False, record=str)
        for name in ("a", "b", "c")
    ]
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, side_by_side=2)
    assert [job.calls for job in ENDLESS] == [["terminate", "wait"]] * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_stops_when_its_scheduler_is_gone(tmp_path):
    job = f"""
import signal, sys, time
from lln.tasks import schedule
schedule.PARENT_SECONDS = 0.1
def stop(*signal): open({str(tmp_path / "stopped")!r}, "w").close(); sys.exit()
signal.signal(signal.SIGTERM, stop)
schedule.stop_with_scheduler()
open({str(tmp_path / "started")!r}, "w").close()
time.sleep(60)
"""
    scheduler = f"""
import os, subprocess, sys, time
environment = os.environ | {{{schedule.PARENT!r}: str(os.getpid())}}
subprocess.Popen([sys.executable, "-c", {job!r}], env=environment, start_new_session=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", scheduler])
    wait_for(tmp_path / "started")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(tmp_path / "stopped")


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
