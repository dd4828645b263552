"""Figure 7: histograms of ln P for softmax, matched and unmatched LLN attention, with the normal that fits each."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lln.functional import attention_matrix
from lln.instruments import lognormality
from lln.paper.figure5 import OPTIONS
from lln.paper.figure5 import STYLES as CURVES
from lln.report.plot import VERMILLION, Row, Setup, column, gaussian_inputs, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("softmax", "lln_variance", "lln_unmatched")
BINS = 60
WIDTH = 5.0  # standard deviations to either side of the mean


def count(setup: Setup) -> int:
    return BINS * len(SHOWN)


def measure(setup: Setup) -> Iterator[Row]:
    """Density of ln P in each bin, the fitted normal's in its middle, and how far from normal the whole is.

    Queries and keys are standard normal, so the scores have a variance of about 1.
    Entries outside the bins count in the total.
    """
    query, key = gaussian_inputs(setup)
    for curve in SHOWN:
        P = attention_matrix(query, key, **OPTIONS[curve])
        fit = lognormality(P)
        mean, deviation = fit.mean.item(), math.sqrt(fit.variance.item())
        edges = torch.linspace(mean - WIDTH * deviation, mean + WIDTH * deviation, BINS + 1, dtype=torch.float64)
        counts = torch.histogram(P.log().flatten(), edges).hist
        width = 2 * WIDTH * deviation / BINS
        for i in range(BINS):
            z = ((edges[i] + edges[i + 1]).item() / 2 - mean) / deviation
            yield {
                "curve": curve,
                "left": edges[i].item(),
                "right": edges[i + 1].item(),
                "density": counts[i].item() / (P.numel() * width),
                "normal_density": math.exp(-z * z / 2) / (deviation * math.sqrt(2 * math.pi)),
                "log_mean": mean,
                "log_variance": deviation**2,
                "skewness": fit.skewness.item(),
                "excess_kurtosis": fit.excess_kurtosis.item(),
                "ks_distance": fit.ks_distance.item(),
            }


def draw(setup: Setup, rows: list[Row]) -> "Figure":
    figure, stack = panels(setup.footer(), "Histograms of ln P at score variance about 1", 3, size=(8.0, 7.0), rows=3)
    for axes, curve in zip(stack, SHOWN, strict=True):
        left, right, density, normal = (
            column(rows, name, curve=curve) for name in ("left", "right", "density", "normal_density")
        )
        color = CURVES[curve].color
        axes.stairs(density, [*left, right[-1]], fill=True, color=color, alpha=0.45, label="measured")
        middle = [(low + high) / 2 for low, high in zip(left, right, strict=True)]
        axes.plot(middle, normal, "--", color=VERMILLION, label="fitted normal")
        about = {name: column(rows, name, curve=curve)[0] for name in rows[0] if name not in ("curve", "left", "right")}
        axes.set_title(CURVES[curve].label)
        axes.text(
            1.02,
            0.95,
            f"mean {about['log_mean']:.3f}\nvariance {about['log_variance']:.3f}\nskewness {about['skewness']:+.3f}\n"
            f"excess kurtosis {about['excess_kurtosis']:+.3f}\nKS distance {about['ks_distance']:.4f}",
            transform=axes.transAxes,
            va="top",
        )
        axes.set_ylabel("density [1/nat]")
    low = min(column(rows, "left"))
    high = max(column(rows, "right"))
    for axes in stack:
        axes.set_xlim(low, high)
    stack[-1].set_xlabel("ln P [nats]")
    stack[-1].legend(loc="upper left")
    return figure
