"""Puts the C code, compiled for each instruction set, into wheels.

Needs a C compiler on Linux. Elsewhere, and where compiling fails, the wheel has the sources alone, which are compiled
at first use; with LLN_COMPILED=1 in the environment that is an error instead.
"""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = Path("src/lln/backends/cpu")
OLDEST_GLIBC = (2, 17)  # what manylinux tags begin with


class CompiledWheel(BuildHookInterface):
    """Compiles the flavours of `flavours.py` and sets the tag that their symbols of glibc need."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        folder = Path(tempfile.mkdtemp(prefix="lln-wheel-"))
        try:
            made = compile_all(Path(self.root) / CPU, folder)
            tag = platform_tag(made)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if os.environ.get("LLN_COMPILED") == "1":
                raise
            self.app.display_warning(f"no compiled code in this wheel, it is compiled at first use: {error}")
            return
        self.folder = folder
        for file in made:
            build_data["force_include"][str(file)] = f"lln/backends/cpu/compiled/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)


def compile_all(source: Path, folder: Path) -> list[Path]:
    if sys.platform != "linux":
        raise RuntimeError(f"wheels have compiled code on Linux alone, this is {sys.platform}")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("there is no C compiler")
    known = runpy.run_path(str(source / "flavours.py"))
    units = sorted(file.name for file in (source / "src").glob("*.c"))
    made = []
    for flavour, (flags, needs) in known["FLAVOURS"].items():
        if needs and platform.machine() != "x86_64":
            continue
        library = folder / f"fused-{flavour}.so"
        command = [compiler, *known["FLAGS"], *flags, "-shared", "-s", "-o", str(library), *units, "-lm"]
        done = subprocess.run(command, cwd=source / "src", capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")
        # Loading checks the sum in the name.
        made.append(library.rename(folder / f"{library.stem}-{sha256(library.read_bytes()).hexdigest()}.so"))
    return made


def platform_tag(libraries: list[Path]) -> str:
    """manylinux with the newest version of glibc whose symbols the libraries use; linux for other C libraries."""
    found = {match for file in libraries for match in re.findall(rb"GLIBC_(\d+)\.(\d+)", file.read_bytes())}
    if not found:
        return f"linux_{platform.machine()}"
    major, minor = max(OLDEST_GLIBC, *((int(x), int(y)) for x, y in found))
    return f"manylinux_{major}_{minor}_{platform.machine()}"
