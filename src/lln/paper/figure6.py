"""Figure 6: the variance of the logarithm of a sum of d log-normal variables, against Fenton and against a line."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lln.report.plot import BLUE, GREEN, ORANGE, VERMILLION, Row, Setup, column, panels
from lln.theory import broad_slope, log_normal_sum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = 16384  # sums, whatever the number of tokens: a variance is known to about one per cent
MODERATE = [0.2 + 0.1 * i for i in range(11)]  # the range of the paper's figure 6a
BROAD = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 24.0]
FIT_FROM = 10.0  # below, the curve still bends: a line from 4 on misses its first point by a third for d = 64
PANELS = ("moderate", "broad")
STYLES = ((BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (VERMILLION, ":", "D"))


def terms(setup: Setup) -> list[int]:
    """Numbers of summands: the head dimension, and a sixteenth, a quarter and four times as many."""
    return [max(2, setup.head_dim // 16), max(3, setup.head_dim // 4), setup.head_dim, 4 * setup.head_dim]


def count(setup: Setup) -> int:
    return len(terms(setup)) * (len(MODERATE) + len(BROAD))


def measure(setup: Setup) -> Iterator[Row]:
    """One sample of standard normals for each d, scaled, so that every curve is smooth."""
    for d in terms(setup):
        logs = _log_sums(setup, d, MODERATE + BROAD)
        for variance, log in zip(MODERATE, logs, strict=False):
            theory = log_normal_sum(variance, terms=d)
            expected: Row = {"theory_log_variance": theory.variance, "theory_log_mean": theory.mean}
            yield _row("moderate", d, variance, log, expected)
        broad = logs[len(MODERATE) :]
        slope, intercept = _line([(x, log[1]) for x, log in zip(BROAD, broad, strict=True) if x >= FIT_FROM])
        for variance, log in zip(BROAD, broad, strict=True):
            line: Row = {"theory_log_variance": slope * variance + intercept, "slope": slope, "intercept": intercept}
            yield _row("broad", d, variance, log, line)


def _row(panel: str, d: int, variance: float, log: tuple[float, float], theory: Row) -> Row:
    measured: Row = {"panel": panel, "terms": d, "variance": variance, "log_variance": log[1], "log_mean": log[0]}
    return measured | dict.fromkeys(("theory_log_variance", "theory_log_mean", "slope", "intercept"), "") | theory


def _log_sums(setup: Setup, d: int, variances: list[float]) -> list[tuple[float, float]]:
    """Mean and variance of ln sum exp(s z) over the sample, for each s²; the sample comes in parts of at most 8 MB."""
    generator = torch.Generator().manual_seed(setup.seed * 1000 + d)
    part = max(1, 2**20 // d)
    logs: list[list[Tensor]] = [[] for _ in variances]
    for start in range(0, SAMPLES, part):
        z = torch.randn(min(part, SAMPLES - start), d, generator=generator, dtype=torch.float64)
        for log, variance in zip(logs, variances, strict=True):
            log.append((math.sqrt(variance) * z).exp().sum(dim=1).log())  # s z stays below 40: no overflow
    joined = [torch.cat(log) for log in logs]
    return [(log.mean().item(), log.var().item()) for log in joined]


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    slope = (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()
    return slope, (y.mean() - slope * x.mean()).item()


def draw(setup: Setup, rows: list[Row]) -> "Figure":
    title = "Variance of the logarithm of a sum of d log-normal variables"
    about = f"{SAMPLES} sums of independent exp(z), z normal with variance s²"
    figure, (left, middle, right) = panels(setup.footer(about), title, 3, size=(12.4, 4.4))
    for d, (color, line, marker) in zip(terms(setup), STYLES, strict=True):
        moderate, broad = ([row for row in rows if row["terms"] == d and row["panel"] == p] for p in PANELS)
        x, y, theory = (column(moderate, name) for name in ("variance", "log_variance", "theory_log_variance"))
        left.plot(x, y, linestyle="none", marker=marker, color=color)
        left.plot(x, theory, linestyle=line, color=color)
        excess = [100 * (claimed / measured - 1) for claimed, measured in zip(theory, y, strict=True)]
        middle.plot(x, excess, linestyle=line, marker=marker, color=color)
        x, y = (column(broad, name) for name in ("variance", "log_variance"))
        right.plot(x, y, linestyle="none", marker=marker, color=color)
        fitted = [row for row in broad if float(row["variance"]) >= FIT_FROM]
        right.plot(*(column(fitted, name) for name in ("variance", "theory_log_variance")), linestyle=line, color=color)
        a, b = float(broad[0]["slope"]), float(broad[0]["intercept"])
        label = f"d = {d}\n(b): {a:.3f} s² - {-b:.2f}\nlimit of the slope: {broad_slope(d):.3f}"
        right.plot([], [], linestyle=line, marker=marker, color=color, label=label)
    left.set_title("(a) moderate: measured (markers), Fenton (lines)")
    left.set_yscale("log")
    middle.set_title("(a) error of Fenton's formula")
    middle.set_ylabel("Fenton / measured - 1 [%]")
    right.set_title(f"(b) broad: measured (markers), fit from s² = {FIT_FROM:g}")
    for axes in (left, middle, right):
        axes.set_xlabel("variance s² of each logarithm [nats²]")
    for axes in (left, right):
        axes.set_ylabel("variance of ln Σ exp(z) [nats²]")
    figure.legend(loc="outside right center", labelspacing=1.2)
    return figure
