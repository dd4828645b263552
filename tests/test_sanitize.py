"""`make sanitize` where it cannot run: it fails and names what is missing. What it finds is checked by itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sanitize" / "run.py"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for the compiler")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_without_the_runtimes_it_fails_and_names_the_packages(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-fsanitize*) echo cannot find -lasan >&2; exit 1;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    settings = {**os.environ, "CC": str(compiler), "LLN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=settings)
    assert done.returncode == 1
    for expected in ("libgcc-", "libasan libubsan", "cannot find -lasan"):
        assert expected in done.stderr
