"""How the matching curves are measured: `lln calibrate` writes what `curves.py` reads.

Standard Gaussian queries and keys are drawn once for each head dimension and scaled, so that every curve is smooth, and
everything runs in float64 on seeded generators and is rounded at the end: the same table comes out bit for bit.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lln.curves import MATCHINGS, PUBLISHED_A, PUBLISHED_B, PUBLISHED_HEAD_DIM, Matching
from lln.functional import attention_matrix
from lln.moments import measure_moments

SEED = 20260711
DRAWS = 32
HEAD_DIMS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_KEYS = (16, 64, 256, 1024, 4096, 16384)
VARIANCE_KEYS = 1024  # the log-variance hardly depends on the number of keys
MAX_ROWS, MAX_ENTRIES = 1024, 2**17  # the draws of keys vary more than the rows of a draw
SPREADS = [2.0 ** (exponent / 4) for exponent in range(-20, 41)]  # 1/32 to 1024
SCORE_VARIANCES = [0.01 * 2.0 ** (exponent / 2) for exponent in range(25)]  # 0.01 to 41
DECIMALS = 5

# The published a and b come out for D = 64, a to 1 % and b to 5 %, when the line is fitted over these spreads: inputs
# with a standard deviation from about 0.35 to 3.1. `lln calibrate` shows how they move when the range does.
LINEAR_RANGE = (0.25, 19.0)
FIT_ENDS = (9.0, 12.0, 16.0, 19.0, 22.0, 26.0, 32.0)

ERROR_HEAD_DIMS = (8, 16, 32, 40, 64, 96, 128, 256)
ERROR_VARIANCES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 9.0)
ERROR_DRAWS = 8


def lln_probabilities(query: Tensor, key: Tensor, spread: float) -> Tensor:
    """The LLN attention matrix of standard Gaussian queries and keys at a spread s²."""
    scale = math.sqrt(spread / 2)
    mass = torch.logsumexp(scale * key, dim=0)
    return torch.softmax(scale * query + mass, dim=1) @ torch.softmax(scale * key, dim=0).T


def softmax_probabilities(query: Tensor, key: Tensor, score_variance: float) -> Tensor:
    """The softmax attention matrix of standard Gaussian queries and keys whose scores have this variance."""
    return torch.softmax(query @ key.T * math.sqrt(score_variance / query.shape[1]), dim=1)


def log_variance(probabilities: Tensor) -> float:
    variance: float = probabilities.log().var(correction=0).item()
    return variance


def entropy_deficit(probabilities: Tensor) -> float:
    """How far the mean row entropy is below that of uniform attention, in nats."""
    rows = -torch.special.xlogy(probabilities, probabilities).sum(dim=1)
    deficit: float = math.log(probabilities.shape[1]) - rows.mean().item()
    return deficit


def draws(head_dim: int, num_keys: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = min(MAX_ROWS, MAX_ENTRIES // num_keys)
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(SEED + 1000 * head_dim + draw)
        query = torch.randn(rows, head_dim, generator=generator, dtype=torch.float64)
        yield query, torch.randn(num_keys, head_dim, generator=generator, dtype=torch.float64)


def measure(
    matrix: Callable[[Tensor, Tensor, float], Tensor],
    statistic: Callable[[Tensor], float],
    settings: list[float],
    *,
    head_dim: int,
    num_keys: int,
) -> list[float]:
    """A statistic of an attention matrix over a list of settings, the mean of all draws."""
    sums = [0.0] * len(settings)
    for query, key in draws(head_dim, num_keys):
        for i, setting in enumerate(settings):
            sums[i] += statistic(matrix(query, key, setting))
    return [total / DRAWS for total in sums]


def log_spread_at(targets: list[float], curve: list[float]) -> list[float]:
    """ln s² where a curve measured at SPREADS takes the target values; straight lines between logarithms."""
    x = [math.log(value) for value in curve]
    if any(right <= left for left, right in pairwise(x)):
        raise ArithmeticError(f"the measured curve does not increase: {curve}")
    found = []
    for target in map(math.log, targets):
        i = min(max(sum(value <= target for value in x) - 1, 0), len(x) - 2)
        weight = (target - x[i]) / (x[i + 1] - x[i])
        found.append(round((1 - weight) * math.log(SPREADS[i]) + weight * math.log(SPREADS[i + 1]), DECIMALS))
    return found


def fit_line(low: float, high: float, *, head_dim: int, points: int = 16) -> tuple[float, float]:
    """a and b of the least-squares line Var(ln P) = a s² + b over evenly spaced spreads."""
    spreads = [low + (high - low) * i / (points - 1) for i in range(points)]
    variances = measure(lln_probabilities, log_variance, spreads, head_dim=head_dim, num_keys=VARIANCE_KEYS)
    x, y = torch.tensor(spreads, dtype=torch.float64), torch.tensor(variances, dtype=torch.float64)
    a = (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()
    return round(a, DECIMALS), round((y.mean() - a * x.mean()).item(), DECIMALS)


def calibrate_head_dim(head_dim: int, on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The curves of one head dimension; `on_step` is called 2 + len(NUM_KEYS) times."""
    variance = measure(lln_probabilities, log_variance, SPREADS, head_dim=head_dim, num_keys=VARIANCE_KEYS)
    on_step()
    line = fit_line(*LINEAR_RANGE, head_dim=head_dim)
    on_step()
    entropy = []
    for num_keys in NUM_KEYS:
        wanted = measure(softmax_probabilities, entropy_deficit, SCORE_VARIANCES, head_dim=head_dim, num_keys=num_keys)
        curve = measure(lln_probabilities, entropy_deficit, SPREADS, head_dim=head_dim, num_keys=num_keys)
        entropy.append(log_spread_at(wanted, curve))
        on_step()
    return {"linear": list(line), "variance": log_spread_at(SCORE_VARIANCES, variance), "entropy": entropy}


def calibrate(on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The whole table of `curves.json`."""
    curves = [calibrate_head_dim(head_dim, on_step) for head_dim in HEAD_DIMS]
    return {
        "about": "ln s² over score variance for each head dimension (and key count), and a, b of eq. 10: lln calibrate",
        "seed": SEED,
        "draws": DRAWS,
        "head_dims": list(HEAD_DIMS),
        "num_keys": list(NUM_KEYS),
        "score_variance": {"start": SCORE_VARIANCES[0], "ratio": math.sqrt(2), "count": len(SCORE_VARIANCES)},
        "linear": [curve["linear"] for curve in curves],
        "variance": [curve["variance"] for curve in curves],
        "entropy": [curve["entropy"] for curve in curves],
    }


def dump(table: dict[str, Any]) -> str:
    """The table as text, a curve a line."""
    text = json.dumps(table, indent=1, ensure_ascii=False)
    for _ in range(3):  # innermost lists of numbers go on one line
        text = _join_numbers(text)
    return text + "\n"


def _join_numbers(text: str) -> str:
    return re.sub(r"\[\s+((?:-?[\d.e-]+,\s+)*-?[\d.e-]+)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)


def published_range(on_step: Callable[[], None] = lambda: None) -> list[dict[str, float]]:
    """How a and b for D = 64 depend on the range of the fit, with their distance from the published ones."""
    rows = []
    for high in FIT_ENDS:
        a, b = fit_line(LINEAR_RANGE[0], high, head_dim=PUBLISHED_HEAD_DIM)
        rows.append({"high": high, "a": a, "b": b, "a_off": a / PUBLISHED_A - 1, "b_off": b / PUBLISHED_B - 1})
        on_step()
    return rows


def matching_errors(on_step: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """How far LLN attention is from softmax after each matching, on Gaussian inputs that calibration has not seen.

    Two quantities: the log-variance, against the variance of the scores, and the entropy deficit, against softmax's.
    """
    rows = []
    for head_dim in ERROR_HEAD_DIMS:
        shape = (ERROR_DRAWS, 1, VARIANCE_KEYS, head_dim)
        generator = torch.Generator().manual_seed(SEED - head_dim)
        query, key = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        errors: dict[tuple[Matching, str], list[float]] = {}
        for score_variance in ERROR_VARIANCES:
            q, k = query * score_variance**0.25, key * score_variance**0.25
            wanted = _log_variance_and_deficit(attention_matrix(q, k, kind="softmax"))
            wanted["log-variance"] = measure_moments(q, k).score_variance.mean().item()
            for matching in MATCHINGS:
                got = _log_variance_and_deficit(attention_matrix(q, k, matching=matching))
                for quantity, value in got.items():
                    errors.setdefault((matching, quantity), []).append(value / wanted[quantity] - 1)
        rows += [
            {"matching": matching, "quantity": quantity, "head_dim": head_dim, "errors": values}
            for (matching, quantity), values in errors.items()
        ]
        on_step()
    return rows


def _log_variance_and_deficit(matrices: Tensor) -> dict[str, float]:
    """Means over the matrices (draws, 1, N, M)."""
    deficits = [entropy_deficit(matrix) for matrix in matrices[:, 0]]
    return {
        "log-variance": sum(log_variance(matrix) for matrix in matrices[:, 0]) / len(matrices),
        "entropy": sum(deficits) / len(deficits),
    }
