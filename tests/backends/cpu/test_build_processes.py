"""Fused code built by several processes at once, and what happens without a compiler."""

import os
import subprocess
import sys

import pytest

from lln.backends.cpu import build_problem

pytestmark = [
    pytest.mark.skipif(build_problem() is not None, reason="no C compiler"),
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners and modes of POSIX"),
]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for the compiler")
def test_without_a_compiler_it_warns_once_and_runs(tmp_path):
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit 0\necho no headers here >&2; exit 1\n')
    broken.chmod(0o755)
    script = """
import warnings, torch, lln
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(1, 1, 9, 8)
    lln.lln_attention(x, x, x); lln.lln_attention(x, x, x)
print(len(caught), caught[0].message)
print(lln.backends.explain(x, x, x))
"""
    settings = {**os.environ, "CC": str(broken), "LLN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=settings)
    first, *_, last = done.stdout.strip().splitlines()
    assert first.startswith("1 attention runs in plain torch, because")
    assert "no headers here" in done.stdout
    assert last.endswith("torch: yes")


def test_two_processes_build_at_once_and_a_child_of_fork_works(folder, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(compiler.read_text().replace("cp ", "sleep 3\ncp "))  # long enough for both to begin
    script = """
import os, torch, lln
torch.set_num_threads(2)
x = torch.randn(1, 4, 300, 8)
expected = lln.lln_attention(x, x, x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.allclose(lln.lln_attention(x, x, x), expected, atol=1e-5) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [x.wait(timeout=200) for x in both] == [0, 0]
    assert len(list((folder / "kernels").iterdir())) == 1
