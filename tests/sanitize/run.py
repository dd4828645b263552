"""Run the fused C code under the address and undefined-behaviour sanitizers: `make sanitize`.

    python tests/sanitize/run.py                every flavour that this CPU has
    python tests/sanitize/run.py avx2 37        one flavour, one case: to repeat what was found

The runtime of the address sanitizer must be loaded before anything else, so each flavour runs in a process of its own
(`cases.py`) with that runtime in LD_PRELOAD. It watches what torch allocates, too: the inputs and the results.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lln.backends.cpu import build

FOLDER = Path(__file__).parent
SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
FLAGS = [*SANITIZERS, "-O1", "-g", "-fno-omit-frame-pointer"]  # -O1: three times as fast to compile as -O3
# Fresh memory is all NaN, so that what is read before it is written shows in the results, in float32 and 16 bits alike.
FILL = "max_malloc_fill_size=1000000000:malloc_fill_byte=255"
# Python frees little at its end, so leaks cannot be distinguished; a call of abort() is to show where it was.
OPTIONS = {
    "ASAN_OPTIONS": f"detect_leaks=0:handle_abort=1:{FILL}",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def main(arguments: list[str]) -> int:
    build.FLAGS += FLAGS
    flavours = arguments[:1] or [name for name, (_, needs) in build.FLAVOURS.items() if needs <= build.cpu_flags()]
    failed = False
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(os.cpu_count()) as pool:
        settings = {**os.environ, **OPTIONS, "LD_PRELOAD": runtimes(Path(place))}
        for problem in pool.map(lambda flavour: run(flavour, Path(place), settings, arguments[1:]), flavours):
            failed |= problem
    return int(failed)


def runtimes(place: Path) -> str:
    """The libraries to load first: the runtimes, and that of C++, whose exceptions the address sanitizer wraps."""
    probe = place / "probe.so"
    command = [build._compiler(), "-shared", "-fPIC", *SANITIZERS, "-o", str(probe), "-x", "c", "-"]
    source = "#include <sanitizer/asan_interface.h>\nint probe(int x) { return x + 1; }"
    made = subprocess.run(command, input=source, capture_output=True, text=True)
    linked = subprocess.run(["ldd", str(probe)], capture_output=True, text=True).stdout if made.returncode == 0 else ""
    paths = {line.split()[0].split(".")[0]: line.split()[2] for line in linked.splitlines() if "=> /" in line}
    if not {"libasan", "libubsan"} <= paths.keys():
        version = subprocess.run([command[0], "-dumpversion"], capture_output=True, text=True).stdout.partition(".")[0]
        sys.exit(
            "make sanitize needs Linux, gcc and the runtimes of its sanitizers, libasan and libubsan: install package "
            f"libgcc-{version.strip()}-dev (Debian, Ubuntu) or libasan libubsan (Fedora); if cc is clang, set CC=gcc.\n"
            f"{' '.join(command)}: {made.stderr.strip() or linked.strip()}"
        )
    return f"{paths['libasan']} {paths['libubsan']} libstdc++.so.6"


def run(flavour: str, place: Path, settings: dict[str, str], only: list[str]) -> bool:
    """Build a flavour and run its cases; True if something was found."""
    library = build.build(flavour)
    faults = place / f"faults-{flavour}.so"
    source = Path(build.__file__).parent / "src"
    flags = [*build.FLAGS, *build.FLAVOURS[flavour][0], "-shared", f"-I{source}"]
    units = [FOLDER / "faults.c", source / "scratch.c"]
    subprocess.run([build._compiler(), *flags, "-o", str(faults), *map(str, units), "-lm"], check=True)
    command = [sys.executable, str(FOLDER / "cases.py"), flavour, str(library), str(faults), *only]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    last = done.stdout.strip().rpartition("\n")[2]
    found = f"failed in {last}\n{done.stderr}" if done.returncode != 0 else last
    sys.stderr.write(f"{flavour}: {found}\n")
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
