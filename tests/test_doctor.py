"""`lln doctor`."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import lln.doctor
from lln.backends.cpu.build import BuildError
from lln.cli import app


def test_doctor_prints_versions_threads_and_backends() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    shown = dict(json.loads(done.stdout)["rows"])
    assert shown["torch"] == torch.__version__
    assert shown["threads of torch"] == str(torch.get_num_threads())
    assert shown["instruction set"] in ("avx512", "avx2", "portable")
    assert "torch: yes" in shown["backends on cpu"]
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert f"torch: {torch.__version__}" in lines


def test_doctor_without_the_command_line_and_with_a_wrong_variable() -> None:
    environment = os.environ | {"LLN_BACKEND": "other"}
    command = [sys.executable, "-m", "lln.doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "backends on cpu: error, LLN_BACKEND must be cpu, triton, torch or not set, got 'other'" in done.stdout


def test_doctor_reports_why_there_is_no_fused_code(monkeypatch) -> None:
    def fail() -> None:
        raise BuildError("no C compiler found")

    monkeypatch.setattr(lln.doctor, "load", fail)
    assert dict(lln.doctor.describe())["fused C code"] == "no, no C compiler found"


@pytest.mark.parametrize("reason", [None, "triton is too old"])
def test_doctor_reports_that_kernels_for_gpus_were_not_timed(monkeypatch, reason) -> None:
    monkeypatch.setattr(lln.doctor, "missing_reason", lambda: reason)
    shown = dict(lln.doctor.describe())["kernels for GPUs"]
    assert "not timed" in shown if reason is None else shown == f"no, {reason}"
