"""Figure 5: mean and variance of ln P against proposition 3.1, and what moment matching does to LLN's variance."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lln.functional import attention_matrix
from lln.matching.moments import measure_moments
from lln.report.plot import BLACK, BLUE, GREEN, ORANGE, SKY, CurveStyle, Row, Setup, column, gaussian_inputs, panels
from lln.theory import softmax_log_moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS = 3
INPUT_VARIANCES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)
STYLES = {
    "softmax": CurveStyle("softmax", BLACK, "-", "o"),
    "lln_variance": CurveStyle("LLN, variance matching", BLUE, "--", "s"),
    "lln_entropy": CurveStyle("LLN, entropy matching", SKY, "-.", "^"),
    "lln_linear": CurveStyle("LLN, linear matching (eq. 10)", GREEN, ":", "D"),
    "lln_unmatched": CurveStyle(r"LLN, unmatched ($\alpha = \beta = 1$)", ORANGE, "-", "v"),
}
OPTIONS: dict[str, dict[str, Any]] = {  # of `lln.attention_matrix` and the instruments, for each curve
    "softmax": {"kind": "softmax"},
    "lln_variance": {"kind": "lln", "matching": "variance"},
    "lln_entropy": {"kind": "lln", "matching": "entropy"},
    "lln_linear": {"kind": "lln", "matching": "linear"},
    "lln_unmatched": {"kind": "lln", "alpha": 1.0, "beta": 1.0},
}


def count(setup: Setup) -> int:
    return len(INPUT_VARIANCES) * len(STYLES)


def measure(setup: Setup) -> Iterator[Row]:
    """Means over the draws; theory takes the score variance of the inputs as drawn, with the paper's C_cross in it."""
    inputs = [gaussian_inputs(setup, draw) for draw in range(DRAWS)]
    for variance in INPUT_VARIANCES:
        scaled = [(query * variance**0.5, key * variance**0.5) for query, key in inputs]
        score = sum(measure_moments(query, key).score_variance.item() for query, key in scaled) / DRAWS
        theory = softmax_log_moments(score, num_keys=setup.tokens)
        for curve in STYLES:
            logs = [attention_matrix(query, key, **OPTIONS[curve]).log() for query, key in scaled]
            yield {
                "curve": curve,
                "input_variance": variance,
                "score_variance": score,
                "log_variance": sum(log.var(correction=0).item() for log in logs) / DRAWS,
                "log_mean": sum(log.mean().item() for log in logs) / DRAWS,
                "theory_log_variance": theory.variance if curve == "softmax" else "",
                "theory_log_mean": theory.mean if curve == "softmax" else "",
            }


def draw(setup: Setup, rows: list[Row]) -> "Figure":
    figure, (left, middle, right) = panels(
        setup.footer(), "Distribution of the attention matrix over the variance of its inputs", 3, size=(12.5, 4.2)
    )
    x = column(rows, "input_variance", curve="softmax")
    for axes, name, symbol, unit in (
        (left, "log_variance", "Var(ln P)", "nats²"),
        (middle, "log_mean", "mean of ln P", "nats"),
    ):
        axes.plot(x, column(rows, name, curve="softmax"), "o", color=BLACK, markersize=5.5, label="softmax, measured")
        theory = column(rows, f"theory_{name}", curve="softmax")
        axes.plot(x, theory, "--", color=ORANGE, label="proposition 3.1")
        axes.set_ylabel(f"{symbol} [{unit}]")
        axes.legend(loc="upper left" if name == "log_variance" else "upper right")
    left.set_title(r"(a) variance; theory: $\sigma_{sm}^2$")
    middle.set_title(r"(a) mean; theory: $-\ln N - \sigma_{sm}^2 / 2$")
    for curve, line in STYLES.items():
        line.plot(right, x, column(rows, "log_variance", curve=curve))
    right.set_title("(b) before and after moment matching")
    right.set_ylabel("Var(ln P) [nats²]")
    for axes in (left, middle, right):
        axes.set_xlabel(r"input variance $\sigma_q^2 = \sigma_k^2$")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", title="panel (b)")
    return figure
