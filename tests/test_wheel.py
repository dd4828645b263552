"""Wheels and sources, installed where there is a compiler and where there is none."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from lln.backends.cpu.build import cpu_flags
from lln.backends.cpu.flavours import FLAVOURS

ROOT = Path(__file__).parents[1]
# Attention by the library of the wheel for an instruction set.
COMPILED = """
import sys, torch, lln
from lln.backends.cpu import build
build.choose_flavour = lambda: sys.argv[1]
library = build.load()._name
assert f"lln/backends/cpu/compiled/fused-{sys.argv[1]}-" in library, library
x = torch.randn(1, 2, 50, 32)
with lln.backends.use("cpu"):
    ours = lln.lln_attention(x, x, x)
torch.testing.assert_close(ours, lln.reference.lln_attention(x, x, x), atol=1e-4, rtol=1e-4)
"""
# Without compiled code and without a compiler: plain torch, and the reason.
PLAIN = """
import warnings, torch, lln, lln.doctor
x = torch.randn(1, 2, 50, 32)
with warnings.catch_warnings(record=True) as caught:
    ours = lln.lln_attention(x, x, x)
assert ["no C compiler found" in str(x.message) for x in caught] == [True], caught
torch.testing.assert_close(ours, lln.reference.lln_attention(x, x, x), atol=1e-4, rtol=1e-4)
found = dict(lln.doctor.describe())
assert found["fused C code"].startswith("no, no C compiler found"), found
assert "cpu: no, no C compiler found" in found["backends on cpu"], found
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="wheels have compiled code on Linux alone"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"LLN_COMPILED": "1"}, check=True, capture_output=True)
    return folder


class Installed:
    """A package in an empty environment, which has torch and hatchling beside it."""

    def __init__(self, package: Path, folder: Path, *, compiler: bool) -> None:
        self.folder, self.python = folder, folder / "venv/bin/python"
        venv.create(folder / "venv", with_pip=True)
        [site] = (folder / "venv/lib").glob("*/site-packages")
        # As a path it brings torch, but not what is installed there in editable form.
        (site / "beside.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "CC")}
        self.without_programs = environment | {"PATH": str(folder / "empty"), "LLN_CACHE": str(folder / "cache")}
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
        command = [self.python, "-m", "pip", "install", *options, package]
        environment = environment if compiler else self.without_programs
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def run(self, script: str, *arguments: str) -> None:
        """Where there are no programs in PATH, and so no compiler."""
        command = [self.python, "-c", script, *arguments]
        done = subprocess.run(command, env=self.without_programs, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def runs_compiled_code(self) -> None:
        flags = cpu_flags()
        able = [name for name, (_, needs) in FLAVOURS.items() if needs <= flags]
        assert "portable" in able
        for flavour in able:
            self.run(COMPILED, flavour)
        assert not (self.folder / "cache").exists()  # nothing was built


def test_wheel_without_compiler(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert re.search(r"-py3-none-(manylinux_\d+_\d+|linux)_\w+\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "lln/backends/cpu/src/fused.c" in names  # the fallback
    assert "lln/report/web/heads.js" in names
    Installed(wheel, tmp_path, compiler=False).runs_compiled_code()


# Damage that would end the process, by SIGBUS, if the library were loaded.
HALVED = """
import os, warnings, torch, lln, lln.doctor
from lln.backends.cpu import build
library = build.shipped_library(build.choose_flavour())
os.truncate(library, library.stat().st_size // 2)
x = torch.randn(1, 2, 50, 32)
with warnings.catch_warnings(record=True) as caught:
    lln.lln_attention(x, x, x)
reason = f"{library} is damaged: install lln-attention again; no C compiler found"
assert [reason in str(x.message) for x in caught] == [True], caught
assert dict(lln.doctor.describe())["fused C code"].startswith(f"no, {reason}")
"""


def test_wheel_with_a_damaged_library(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    Installed(wheel, tmp_path, compiler=False).run(HALVED)


def test_source_distribution_with_compiler(built: Path, tmp_path: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    Installed(sdist, tmp_path, compiler=True).runs_compiled_code()


def test_sources_without_compiler(tmp_path: Path) -> None:
    """`pip install .`"""
    Installed(ROOT, tmp_path, compiler=False).run(PLAIN)


def test_source_distribution_has_what_the_tests_read(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a checkout")
    private = {".ci/run", ".clang-format", ".gitignore", ".pre-commit-config.yaml"}
    assert set(tracked.stdout.split()) - names - private == set()
