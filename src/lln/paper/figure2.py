"""Figure 2: entropy and spectral gap over temperature, for softmax, LLN and other kernels on the same inputs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lln import zoo
from lln.instruments import entropy, spectral_gap
from lln.matching.moments import measure_moments
from lln.paper.figure5 import OPTIONS
from lln.paper.figure5 import STYLES as CURVES
from lln.report.plot import GREY, PURPLE, VERMILLION, CurveStyle, Row, Setup, column, gaussian_inputs, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPERATURES = [0.35 * 10 ** (i / 11) for i in range(12)]  # 0.35 to 3.5: score variance 8.2 to 0.08
STYLES = {
    **CURVES,
    "elu": CurveStyle("ELU, linear", VERMILLION, "--"),
    "relu_kernel": CurveStyle("ReLU kernel", PURPLE, "-"),
    "relu": CurveStyle("ReLU, linear", PURPLE, "--"),
    "quadratic_kernel": CurveStyle("quadratic kernel", GREY, "-"),
    "quadratic": CurveStyle("quadratic, linear", GREY, "--"),
}

FLAT = ("lln_unmatched", "elu", "relu", "quadratic")  # too close to uniform attention to be distinguished at full scale


def concentration(mechanism: str, query: Tensor, key: Tensor) -> tuple[float, float]:
    """Entropy in bits and spectral gap of a mechanism; its matrix is what it makes of the identity as value."""
    if mechanism in CURVES:
        given = OPTIONS[mechanism]
        return entropy(query, key, **given).item(), spectral_gap(query, key, **given).item()
    identity = torch.eye(key.shape[2], dtype=key.dtype)[None, None]
    P = zoo.build(mechanism, num_heads=1, head_dim=query.shape[3])(query, key, identity)
    # With few features a ReLU can leave a query without any weight, and its row zero: count it as uniform.
    P = torch.where(P.sum(dim=-1, keepdim=True) == 0, 1 / key.shape[2], P)
    return entropy(P).item(), spectral_gap(P).item()


def count(setup: Setup) -> int:
    return len(TEMPERATURES) * len(STYLES)


def measure(setup: Setup) -> Iterator[Row]:
    """One draw of queries and keys, scaled so that the variance of their scores is 1 / temperature² (eq. 5)."""
    query, key = gaussian_inputs(setup)
    drawn = measure_moments(query, key).score_variance.item()
    for mechanism in STYLES:
        for temperature in TEMPERATURES:
            scale = (temperature**-2 / drawn) ** 0.25
            bits, gap = concentration(mechanism, query * scale, key * scale)
            yield {
                "mechanism": mechanism,
                "temperature": temperature,
                "score_variance": temperature**-2,
                "entropy_bits": bits,
                "spectral_gap": gap,
            }


def draw(setup: Setup, rows: list[Row]) -> "Figure":
    title = "Concentration over temperature: the same inputs for every mechanism"
    figure, (left, right) = panels(setup.footer(), title, 2, size=(11.0, 5.0))
    left_close, right_close = (axes.inset_axes((0.46, 0.09, 0.52, 0.36)) for axes in (left, right))
    for mechanism, curve in STYLES.items():
        x = column(rows, "temperature", mechanism=mechanism)
        for axes, close, name in ((left, left_close, "entropy_bits"), (right, right_close, "spectral_gap")):
            y = column(rows, name, mechanism=mechanism)
            curve.plot(axes, x, y)
            if mechanism in FLAT:
                curve.plot(close, x, y)
    left.set_title("(a) entropy of a row, mean (eq. 7)")
    left.set_ylabel("entropy [bits]")
    right.set_title(r"(b) spectral gap $1 - |\lambda_2|$")
    right.set_ylabel("spectral gap")
    for axes in (left_close, right_close):
        axes.set_xscale("log")
        axes.set_xticks([0.4, 1.0, 3.0], labels=["0.4", "1", "3"])
        axes.minorticks_off()
        axes.tick_params(labelsize=7.5)
        axes.set_title("close view of the flat curves", fontsize=8.0)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([0.4, 0.6, 1.0, 1.5, 2.0, 3.0], labels=["0.4", "0.6", "1", "1.5", "2", "3"])
        axes.minorticks_off()
        axes.set_xlabel(r"temperature $\tau = 1 / \sigma_{sm}$ of the softmax scores (log scale)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure
