"""Loads the fused CPU code: that of the wheel, or else built with the system's C compiler, once.

The code (`cpu/`) does not depend on torch, so it builds in seconds and works with every version of torch. It is kept
under the user's cache folder, which `LLN_CACHE` moves, in a file named by the source, the compiler and the flags. A
library is loaded only if its contents match the SHA-256 in its name, one of the cache only if no other user can have
written it. The sum is part of the name so that a single rename puts both in place: they match even if processes are
stopped, or build at the same time.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from multiprocessing.util import Finalize
from pathlib import Path

from lln.backends.cpu import layout
from lln.backends.cpu.flavours import FLAGS, FLAVOURS
from lln.cache import cache_folder, trusted_folder, untrusted_reason


class BuildError(RuntimeError):
    """Why there is no fused CPU code on this machine."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library for this CPU, of the wheel if it has one, else built here; `BuildError` if it cannot be had.

    What is built here fits where that of the wheel does not, as with a C library other than the wheel was made for.
    """
    flavour = choose_flavour()
    shipped = shipped_library(flavour)
    if shipped is None:
        return open_library(build(flavour))
    damage = _damage(shipped)
    reason = f"{damage}: install lln-attention again"
    if damage is None:
        try:
            return open_library(shipped)
        except BuildError as error:
            reason = str(error)
    try:
        library = open_library(build(flavour))
    except BuildError as error:
        raise BuildError(f"{reason}; {error}") from error
    if damage is not None:
        warnings.warn(f"{reason}; until then the fused code is built here", stacklevel=2)
    return library


def shipped_library(flavour: str) -> Path | None:
    """The library that was compiled when the wheel was made; None where the package came as sources."""
    return next((Path(__file__).parent / "compiled").glob(f"fused-{flavour}-*.so"), None)


def _damage(library: Path) -> str | None:
    """What is wrong with the contents of a library, which may crash a process that loads it; None if nothing is."""
    try:
        content = library.read_bytes()
    except OSError as error:
        return str(error)
    is_whole = library.stem.rpartition("-")[2] == hashlib.sha256(content).hexdigest()
    return None if is_whole else f"{library} is damaged"


def open_library(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the built library does not load: {error}") from error
    if (problem := layout.difference(library)) is not None:
        raise BuildError(f"the library and layout.py do not fit together: {problem}")
    tensors, threads = [ctypes.c_void_p] * 4, ctypes.c_int64
    for name, further in (
        ("lln_forward", []),
        ("lln_backward", []),
        ("lln_advance", []),
        ("lln_forward_like", [*tensors, ctypes.c_void_p, threads]),
        ("lln_backward_like", [*tensors, ctypes.c_void_p, *tensors[:3], threads]),
        ("lln_step_like", [*tensors, threads]),
    ):
        getattr(library, name).argtypes = [ctypes.c_char_p, *further]
        getattr(library, name).restype = ctypes.c_int64
    _share_threads(library)
    return library


def choose_flavour() -> str:
    flags = cpu_flags()
    return next(name for name, (_, needs) in FLAVOURS.items() if needs <= flags)


def build(flavour: str) -> Path:
    """The library of a flavour: from the cache if it is there and undamaged, else built and put there.

    Where the cache cannot be used or trusted, the library lies in a temporary folder until the process ends.
    """
    compiler = _compiler()
    sources = sorted(
        (file.name, file.read_bytes()) for file in files("lln.backends.cpu").joinpath("src").iterdir() if file.is_file()
    )
    flags = [*FLAGS, *FLAVOURS[flavour][0]]
    key = hashlib.sha256(repr((sources, _version(compiler), flags, platform.machine())).encode()).hexdigest()[:16]
    prefix = f"fused-{flavour}-{key}-"
    unusable: dict[Path, str] = {}
    problem = None
    try:
        folder = trusted_folder(cache_folder() / "kernels")
        for library in sorted(file for file in folder.iterdir() if file.name.startswith(prefix)):
            reason = _unusable_reason(library)
            if reason is None:
                return library
            unusable[library] = reason
    except (OSError, ValueError) as error:
        problem = str(error)

    # Warnings come last: where they are errors, the next call finds the cache repaired.
    made = _compile(compiler, flags, sources)
    if problem is None:
        try:
            library = _keep(made, folder, prefix)
            for file in unusable.keys() - {library}:
                file.unlink(missing_ok=True)
        except OSError as error:
            problem = "; ".join([*unusable.values(), f"writing to {folder} failed: {error}"])
    if problem is not None:
        warnings.warn(
            f"the kernel cache is not used, because {problem}; the fused code was built for this process only. To "
            "build it once, correct this or set LLN_CACHE to a folder that only you can write to",
            stacklevel=2,
        )
        return made
    shutil.rmtree(made.parent, ignore_errors=True)
    if unusable:
        warnings.warn(f"{'; '.join(unusable.values())}: the fused code was rebuilt", stacklevel=2)
    return library


def _unusable_reason(library: Path) -> str | None:
    """Why a library of the cache must not be loaded; None if it can be."""
    try:
        if not stat.S_ISREG(library.lstat().st_mode):
            return f"{library} is not a regular file"
        if reason := untrusted_reason(library):
            return reason
    except OSError as error:
        return str(error)
    return _damage(library)


def _compile(compiler: str, flags: list[str], sources: list[tuple[str, bytes]]) -> Path:
    """The library in a new folder that only this user can read and that is removed when the process ends."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="lln-kernels-"))
        # Unlike `atexit`: not in a forked child, and at the end of a worker of multiprocessing as well.
        Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=0)
        for name, source in sources:
            (folder / name).write_bytes(source)
        # Relative names: the path of the folder must not enter the library, whose bytes would differ from run to run.
        units = [name for name, _ in sources if name.endswith(".c")]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda unit: _call(folder, [compiler, *flags, "-c", unit, "-o", f"{unit}.o"]), units))
        _call(folder, [compiler, *flags, "-shared", "-o", "fused.so", *(f"{unit}.o" for unit in units), "-lm"])
        made = folder / "fused.so"
        made.chmod(0o600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building the fused code failed: {error}") from error
    return made


def _call(folder: Path, command: list[str]) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")


def _keep(made: Path, folder: Path, prefix: str) -> Path:
    """Copy a library to the cache: all of it or nothing, also where the power fails."""
    content = made.read_bytes()
    library = folder / f"{prefix}{hashlib.sha256(content).hexdigest()}.so"
    descriptor, draft = tempfile.mkstemp(dir=folder, prefix=".fused-")  # with mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, library)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some network file systems have no such call, and a lost file is compiled again
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
    return library


def cpu_flags() -> set[str]:
    """What the CPU can do, as Linux names it; empty where that is not known, which gives the portable flavour."""
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
            return os.path.abspath(found)  # it is run in another folder
    raise BuildError("no C compiler found (looked for $CC, cc, gcc, clang)")


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error


def _share_threads(library: ctypes.CDLL) -> None:
    """Pass the entry points of torch's OpenMP library, so that both work with one team of threads.

    Two teams would compete for the cores. Where torch has no GNU OpenMP, the fused code stays in one thread.
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
