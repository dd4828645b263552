"""Where a number comes from: the machine, the versions and the commit that every recorded result has.

`read_json` reads back what was recorded.
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance(*, seed: int, command: str) -> dict[str, Any]:
    return {
        "command": command,
        "commit": commit(),
        "seed": seed,
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def read_json(path: Path, remedy: str) -> Any:
    """The object of a JSON file that was written here.

    Raises:
        ValueError: if the file is damaged; the message names the file and what to do, which is `remedy`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also bytes that are not UTF-8
        raise ValueError(f"{path} is damaged: {error}; {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected a dict, got {content!r:.80}; {remedy}")
    return content


def processor() -> str:
    """The name of the processor, as far as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit that this library is checked out at, with "+" if its code changed since (results may have); None if it
    was installed elsewhere.
    """
    package = Path(__file__).resolve().parent
    try:
        top, sha = _git(package, "rev-parse", "--show-toplevel", "--short", "HEAD").split()
        if Path(top) / "src" / "lln" != package:  # a virtual environment may lie inside somebody else's repository
            return None
        return sha + ("+" if _git(package, "status", "--porcelain", ".") else "")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", os.fspath(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
