"""Time and peak memory, measured so that a shared and noisy machine does little harm.

Times: all candidates in one process, in turns, so that what slows one slows the others; medians, quartiles and ratios
of medians. Memory: a new process for each measurement, its peak over what it held just before. `noise` tests whether
other programs keep the processors busy; `predict` estimates a measurement that is left out.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

# A turn lasts about so much of the whole time, and at most so many calls: a quick candidate needs more calls than a
# slow one for a steady median, also where a slow one leaves time for three turns only.
TURN_SHARE, TURN_CALLS = 1 / 8, 20
SLOW_CALL = 1.0  # seconds; slower calls need no call to warm up
BUSY = 0.25  # processors kept busy by others, from which on times are doubtful


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    repeats: int

    def row(self) -> dict[str, Any]:
        """As rows of results have it, in milliseconds."""
        return {
            "milliseconds": self.median * 1e3,
            "quartiles": [self.low * 1e3, self.high * 1e3],
            "repeats": self.repeats,
        }


def time_in_turns(
    candidates: Mapping[str, Callable[[], object]], *, seconds: float = 1.0, at_least: int = 3, at_most: int = 200
) -> dict[str, Timing]:
    """The time of each candidate over rounds in which each is called, after a call that is not counted.

    Rounds go on until they have taken `seconds` together, but at least and at most so often; a candidate that takes
    longer than that by itself runs twice.
    """
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    calls: dict[str, int] = {}
    for name, run in candidates.items():
        first = _seconds(run)
        if first > SLOW_CALL:
            taken[name].append(first)
        calls[name] = max(1, min(TURN_CALLS, int(seconds * TURN_SHARE / first)))
    started = time.perf_counter()
    for round_ in range(at_most):
        if round_ >= at_least and time.perf_counter() - started > seconds:
            break
        for name, run in candidates.items():
            if not (len(taken[name]) >= 2 and taken[name][0] > max(SLOW_CALL, seconds)):
                taken[name] += [_seconds(run) for _ in range(calls[name])]
    return {name: timing(times) for name, times in taken.items()}


def timing(times: Sequence[float]) -> Timing:
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return Timing(median(times), low, high, len(times))


def peak_memory(mechanism: str, *, tokens: int, heads: int, head_dim: int, options: Mapping[str, Any]) -> int:
    """Peak bytes of one call of a mechanism of the zoo, beyond the process, its inputs and the loaded libraries."""
    from lln.bench.new_process import in_new_process
    from lln.bench.peak import peak_of_call, zoo_call

    make = partial(zoo_call, mechanism, heads=heads, head_dim=head_dim, options=options)
    return in_new_process(peak_of_call, make, tokens).peak_bytes


def reset_peak() -> None:
    """Reset the peak of this process so far, where the system can (Linux)."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has held since `reset_peak`, or since its start."""
    if (found := _bytes_in("/proc/self/status", "VmHWM")) is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_bytes() -> int:
    """Memory that can be had without swapping; all there is where the system does not report it."""
    found = _bytes_in("/proc/meminfo", "MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else found


def _bytes_in(path: str, name: str) -> int | None:
    """The value of a line "name: number kB" of a file, if the system has it."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def noise(seconds: float = 0.5) -> dict[str, Any]:
    """The load average, and how many processors others keep busy while this process sleeps for a moment."""
    load = os.getloadavg()[0]
    before = _busy_seconds()
    time.sleep(seconds)
    after = _busy_seconds()
    busy = load if before is None or after is None else (after - before) / seconds
    return {"load_average": round(load, 2), "busy_processors": round(busy, 2), "quiet": busy <= BUSY}


def predict(lengths: Sequence[int], values: Sequence[float], length: int, *, quadratic: bool) -> float | None:
    """What the value would be at `length`: a + b N, or a + b N + c N², fitted with a, b, c >= 0 to relative errors.

    At least the largest value of a shorter input, which a fit to values that scatter can be below. None with fewer than
    two values, which give no growth.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    if len(values) < 2:
        return None
    powers = [1, 2] if quadratic and len(values) == 2 else [0, 1, 2] if quadratic else [0, 1]
    largest = float(max(lengths))  # powers of numbers around 1 keep the fit well conditioned
    rows = [[(n / largest) ** power / value for power in powers] for n, value in zip(lengths, values, strict=True)]
    coefficients, _ = nnls(torch.tensor(rows, dtype=torch.float64).numpy(), torch.ones(len(rows)).double().numpy())
    fitted = float(sum(c * (length / largest) ** power for c, power in zip(coefficients, powers, strict=True)))
    return max([fitted, *(value for n, value in zip(lengths, values, strict=True) if n <= length)])


def total_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _seconds(run: Callable[[], object]) -> float:
    _wait_for_gpu()
    before = time.perf_counter()
    run()
    _wait_for_gpu()
    return time.perf_counter() - before


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _busy_seconds() -> float | None:
    """Processor time of all programs since the system started."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, *rest = (int(number) for number in stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
