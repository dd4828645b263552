"""Builds the fused CPU code with the system's C compiler, once, and loads it.

The code (`cpu/`) knows nothing of torch, so it builds in seconds and serves every version of torch. What was built is
kept under the user's cache folder, in a file named by the source, the compiler and the flags; `LLN_CACHE` moves it.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from lln.cache import cache_folder

FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
    "-shared",
    "-fvisibility=hidden",
]
# The same source for vectors of 16, 8 or 4 floats; the first flavour whose needs the CPU meets is taken.
FLAVOURS = {
    "avx512": (["-march=x86-64-v4", "-mprefer-vector-width=512", "-DLANES=16"], {"avx512f", "avx512vl", "avx512bw"}),
    "avx2": (["-march=x86-64-v3", "-DLANES=8"], {"avx2", "fma", "f16c"}),
    "portable": (["-DLANES=4"], set()),
}


class BuildError(RuntimeError):
    """Why there is no fused CPU code on this machine."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library for this CPU; `BuildError` if it cannot be had."""
    return open_library(build(choose_flavour()))


def open_library(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the built library does not load: {error}") from error
    for name in ("lln_forward", "lln_backward"):
        getattr(library, name).argtypes = [ctypes.c_char_p]
        getattr(library, name).restype = ctypes.c_int64
    _share_threads(library)
    return library


def choose_flavour() -> str:
    flags = cpu_flags()
    return next(name for name, (_, needs) in FLAVOURS.items() if needs <= flags)


def build(flavour: str) -> Path:
    """The library of a flavour, built unless it is in the cache."""
    compiler = _compiler()
    sources = sorted(
        (file.name, file.read_bytes()) for file in files("lln.kernels").joinpath("cpu").iterdir() if file.is_file()
    )
    flags = [*FLAGS, *FLAVOURS[flavour][0]]
    key = hashlib.sha256(repr((sources, _version(compiler), flags, platform.machine())).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    library = folder / f"fused-{flavour}-{key}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as place:
            for name, source in sources:
                Path(place, name).write_bytes(source)
            made = Path(place, "fused.so")
            command = [compiler, *flags, "-o", str(made), str(Path(place, "fused.c")), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")
            made.replace(library)  # in one step: another process sees all of it or nothing
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building in {folder} failed: {error}") from error
    return library


def cpu_flags() -> set[str]:
    """What the CPU can do, in the words of Linux; empty where that is not known, which gives the portable flavour."""
    info = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return set()
    for line in info.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _compiler() -> str:
    if sys.platform == "win32":
        raise BuildError("the fused code is not built on Windows")
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    raise BuildError("no C compiler found (looked for $CC, cc, gcc, clang)")


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error


def _share_threads(library: ctypes.CDLL) -> None:
    """Hand over the entry points of torch's OpenMP library, so that both work with one team of threads.

    Two teams would fight for the cores. Where torch brings no GNU OpenMP, the fused code stays in one thread.
    """
    process = ctypes.CDLL(None)
    try:
        calls = [
            ctypes.cast(getattr(process, name), ctypes.c_void_p)
            for name in ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
        ]
    except AttributeError:
        return
    library.lln_use_threads.argtypes = [ctypes.c_void_p] * 4
    library.lln_use_threads(*calls)
