"""The wheel has the C code compiled, and runs it where there is no compiler; so does an install of the sources."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch, lln
from lln.backends.cpu.build import choose_flavour, load, shipped_library
x = torch.randn(1, 2, 50, 32)
assert shipped_library(choose_flavour()) is not None, lln.__file__
assert load()._name == str(shipped_library(choose_flavour()))
with lln.backends.use("cpu"):
    ours = lln.lln_attention(x, x, x)
torch.testing.assert_close(ours, lln.reference.lln_attention(x, x, x), atol=1e-4, rtol=1e-4)
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


def run_installed(package: Path, folder: Path) -> None:
    """Install into an empty environment that has torch and hatchling beside it, then run without programs in PATH."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    [site] = (folder / "venv/lib").glob("*/site-packages")
    # As a path it brings torch, but not what is installed there in editable form.
    (site / "beside.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    subprocess.run([*install, package], env=environment, check=True, capture_output=True)
    environment |= {"PATH": str(folder / "empty"), "LLN_CACHE": str(folder / "cache")}
    environment.pop("CC", None)
    done = subprocess.run([python, "-c", SCRIPT], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (folder / "cache").exists()  # nothing was built


def test_wheel_without_compiler(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert re.search(r"-py3-none-(manylinux_\d+_\d+|linux)_\w+\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "lln/backends/cpu/src/fused.c" in names  # the fallback
    assert "lln/report/web/heads.js" in names
    run_installed(wheel, tmp_path)


def test_source_distribution(built: Path, tmp_path: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    run_installed(sdist, tmp_path)
