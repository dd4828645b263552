"""Time and peak memory, measured so that a shared and noisy machine does little harm.

Times: all candidates in one process, in turns, so that what slows one slows the others; medians, quartiles and ratios
of medians. Memory: a fresh process for each measurement, its peak over what it held just before.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    repeats: int


def time_in_turns(
    candidates: Mapping[str, Callable[[], object]], *, seconds: float = 1.0, at_least: int = 3, at_most: int = 200
) -> dict[str, Timing]:
    """The time of each candidate over rounds in which each runs once, after a round that is not counted.

    Rounds go on until they have taken `seconds` together, but at least and at most so often.
    """
    for run in candidates.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    started = time.perf_counter()
    for round_ in range(at_most):
        if round_ >= at_least and time.perf_counter() - started > seconds:
            break
        for name, run in candidates.items():
            before = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - before)
    return {name: _timing(times) for name, times in taken.items()}


def peak_memory(mechanism: str, *, tokens: int, heads: int, head_dim: int, backward: bool = False) -> int:
    """Peak bytes of one call of a mechanism of the zoo, beyond the process, its inputs and the loaded libraries."""
    job = {"mechanism": mechanism, "tokens": tokens, "heads": heads, "head_dim": head_dim, "backward": backward}
    command = [sys.executable, "-m", "lln.bench.peak", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {job} failed:\n{done.stderr.strip()}")
    return int(done.stdout)


def reset_peak() -> None:
    """Forget the peak of this process so far, where the system can (Linux)."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has held since `reset_peak`, or since its start."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _timing(times: list[float]) -> Timing:
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return Timing(median(times), low, high, len(times))
