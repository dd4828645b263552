"""A script in place of the compiler: it records each run and copies a library that was compiled before."""

import pytest

from lln.backends.cpu import build


@pytest.fixture(scope="module")
def compiled():
    return build.build(build.choose_flavour()).read_bytes()


@pytest.fixture
def compiler(tmp_path, monkeypatch, compiled):
    """A file with a line for each run of the compiler: the mode of the folder that it wrote to."""
    (tmp_path / "made.so").write_bytes(compiled)
    record = tmp_path / "runs"
    record.touch()
    script = tmp_path / "compiler"
    script.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo copies && exit 0
while [ "$1" != -o ]; do shift; done
place=$(dirname "$2")
case "$2" in *.o) touch "$2"; exit 0;; esac
{{ stat -c %a "$place" 2>/dev/null || stat -f %Lp "$place"; }} >> "{record}"
cp "{tmp_path}/made.so" "$2"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return record


@pytest.fixture
def folder(tmp_path, monkeypatch, compiler):
    """LLN_CACHE, which does not exist yet; temporary folders are below `tmp`."""
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "above" / "the cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "above" / "the cache"
