"""How the matching curves are measured: `lln calibrate` writes what `curves.py` reads.

Standard Gaussian queries and keys are drawn once for each head dimension and scaled, so that every curve is smooth, and
everything runs in float64 on seeded generators and is rounded at the end: the same table comes out bit for bit.

The forms share the draws and what is measured of softmax attention. The decomposed form has no curves of its own: on
inputs without means it is the unbiased form, and `matching_errors` measures it with the curves of that.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from lln import reference
from lln.checks import check_choice
from lln.matching.curves import FORMS, MATCHINGS, PUBLISHED_A, PUBLISHED_B, PUBLISHED_HEAD_DIM, Form, Matching

CALIBRATED_FORMS: tuple[Form, ...] = ("paper", "unbiased")
SEED = 20260711
DRAWS = 32
HEAD_DIMS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_KEYS = (16, 64, 256, 1024, 4096, 16384)
VARIANCE_KEYS = 1024  # the log-variance hardly depends on the number of keys
MAX_ROWS, MAX_ENTRIES = 1024, 2**17  # the draws of keys vary more than the rows of a draw
SPREADS = [2.0 ** (exponent / 4) for exponent in range(-20, 41)]  # 1/32 to 1024
SCORE_VARIANCES = [0.01 * 2.0 ** (exponent / 2) for exponent in range(25)]  # 0.01 to 41
DECIMALS = 5

# Entropy matching goes as far as this part of the largest measured entropy deficit; from there on s² is proportional to
# the score variance. In the paper's form no target is beyond that deficit. In the unbiased form it is about ln D: a
# query chooses a feature and attends to the keys whose largest feature it is. Near this limit s² hardly changes the
# entropy.
REACH: dict[Form, float] = {"paper": 1.0, "unbiased": 0.75}

# The published a and b come out for D = 64, a to 1 % and b to 5 %, when the line is fitted over these spreads: inputs
# with a standard deviation from about 0.35 to 3.1. `lln calibrate` shows how they move when the range does.
LINEAR_RANGE = (0.25, 19.0)
FIT_ENDS = (9.0, 12.0, 16.0, 19.0, 22.0, 26.0, 32.0)

ERROR_HEAD_DIMS = (8, 16, 32, 40, 64, 96, 128, 256)
ERROR_VARIANCES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 9.0)
ERROR_DRAWS = 8


def lln_probabilities(query: Tensor, key: Tensor, spread: float, *, form: Form = "paper") -> Tensor:
    """The LLN attention matrix of standard Gaussian queries and keys at a spread s²."""
    check_choice("form", form, CALIBRATED_FORMS)
    scale = math.sqrt(spread / 2)
    a, b = scale * query, scale * key
    if form == "unbiased":
        b = torch.log_softmax(b, dim=1)
    return two_softmax(a, b)


def two_softmax(a: Tensor, b: Tensor) -> Tensor:
    """The attention matrix (..., N, M) with the kernel exp(a_i) . exp(b_j), for a (..., N, D) and b (..., M, D)."""
    mass = torch.logsumexp(b, dim=-2, keepdim=True)
    return torch.softmax(a + mass, dim=-1) @ torch.softmax(b, dim=-2).mT


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


def log_spread_at(targets: list[float], curve: list[float], *, reach: float = 1.0) -> list[float]:
    """ln s² where a curve measured at SPREADS takes the values that are wanted at SCORE_VARIANCES.

    Between measured points the logarithms are joined by straight lines. For targets above `reach` times the last value
    of the curve s² is proportional to the score variance.
    """
    x = [math.log(value) for value in curve]
    if any(right <= left for left, right in pairwise(x)):
        raise ArithmeticError(f"the measured curve does not increase: {curve}")
    found: list[float] = []
    step = math.log(SCORE_VARIANCES[1] / SCORE_VARIANCES[0])
    for target in map(math.log, targets):
        if found and target > x[-1] + math.log(reach):
            found.append(round(found[-1] + step, DECIMALS))
            continue
        i = min(max(sum(value <= target for value in x) - 1, 0), len(x) - 2)
        weight = (target - x[i]) / (x[i + 1] - x[i])
        found.append(round((1 - weight) * math.log(SPREADS[i]) + weight * math.log(SPREADS[i + 1]), DECIMALS))
    return found


def fit_line(low: float, high: float, *, head_dim: int, points: int = 16, form: Form = "paper") -> tuple[float, float]:
    """a and b of the least-squares line Var(ln P) = a s² + b over evenly spaced spreads."""
    spreads = [low + (high - low) * i / (points - 1) for i in range(points)]
    matrix = partial(lln_probabilities, form=form)
    variances = measure(matrix, log_variance, spreads, head_dim=head_dim, num_keys=VARIANCE_KEYS)
    x, y = torch.tensor(spreads, dtype=torch.float64), torch.tensor(variances, dtype=torch.float64)
    a = (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()
    return round(a, DECIMALS), round((y.mean() - a * x.mean()).item(), DECIMALS)


def calibrate_head_dim(head_dim: int, on_step: Callable[[], None] = lambda: None) -> dict[Form, dict[str, Any]]:
    """The curves of each form for one head dimension; `on_step` is called 2 + len(NUM_KEYS) times."""
    matrices = {form: partial(lln_probabilities, form=form) for form in CALIBRATED_FORMS}
    curves: dict[Form, dict[str, Any]] = {form: {"linear": [], "variance": [], "entropy": []} for form in matrices}
    for form, matrix in matrices.items():
        variance = measure(matrix, log_variance, SPREADS, head_dim=head_dim, num_keys=VARIANCE_KEYS)
        curves[form]["variance"] = log_spread_at(SCORE_VARIANCES, variance)
    on_step()
    for form in matrices:
        curves[form]["linear"] = list(fit_line(*LINEAR_RANGE, head_dim=head_dim, form=form))
    on_step()
    for num_keys in NUM_KEYS:
        wanted = measure(softmax_probabilities, entropy_deficit, SCORE_VARIANCES, head_dim=head_dim, num_keys=num_keys)
        for form, matrix in matrices.items():
            entropy = measure(matrix, entropy_deficit, SPREADS, head_dim=head_dim, num_keys=num_keys)
            curves[form]["entropy"].append(log_spread_at(wanted, entropy, reach=REACH[form]))
        on_step()
    return curves


def calibrate(on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The whole table of `curves.json`: the paper's form, and below "forms" the others."""
    by_head_dim = [calibrate_head_dim(head_dim, on_step) for head_dim in HEAD_DIMS]
    curves: dict[str, dict[str, Any]] = {
        form: {name: [found[form][name] for found in by_head_dim] for name in MATCHINGS} for form in CALIBRATED_FORMS
    }
    return {
        "about": "ln s² over score variance for each head dimension (and key count), and a, b of eq. 10: lln calibrate",
        "seed": SEED,
        "draws": DRAWS,
        "head_dims": list(HEAD_DIMS),
        "num_keys": list(NUM_KEYS),
        "score_variance": {"start": SCORE_VARIANCES[0], "ratio": math.sqrt(2), "count": len(SCORE_VARIANCES)},
        **curves.pop("paper"),
        "forms": curves,
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
    """How far LLN attention is from softmax after each matching, on Gaussian inputs that calibration did not use.

    Two quantities: the log-variance, against the variance of the scores, and the entropy deficit, against softmax's.
    """
    rows = []
    for head_dim in ERROR_HEAD_DIMS:
        shape = (ERROR_DRAWS, 1, VARIANCE_KEYS, head_dim)
        generator = torch.Generator().manual_seed(SEED - head_dim)
        query, key = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        errors: dict[tuple[Form, Matching, str], list[float]] = {}
        for score_variance in ERROR_VARIANCES:
            q, k = query * score_variance**0.25, key * score_variance**0.25
            scores = q @ k.mT / math.sqrt(head_dim)
            wanted = _log_variance_and_deficit(torch.softmax(scores, dim=-1))
            wanted["log-variance"] = scores.var(dim=(-2, -1), correction=0).mean().item()
            for form, matching in product(FORMS, MATCHINGS):
                got = _log_variance_and_deficit(matched_probabilities(q, k, matching=matching, form=form))
                for quantity, value in got.items():
                    errors.setdefault((form, matching, quantity), []).append(value / wanted[quantity] - 1)
        rows += [
            {"form": form, "matching": matching, "quantity": quantity, "head_dim": head_dim, "errors": values}
            for (form, matching, quantity), values in errors.items()
        ]
        on_step()
    return rows


def matched_probabilities(query: Tensor, key: Tensor, *, matching: Matching, form: Form) -> Tensor:
    """The LLN attention matrix (B, H, N, M) of query (B, H, N, D) and key (B, H, M, D) after matching."""
    alpha, beta = reference.match_moments(query, key, matching=matching, form=form)
    centers = reference.centers_of(query, key, form=form)
    return two_softmax(*reference.features(query, key, alpha[..., None, None], beta[..., None, None], form, centers))


def _log_variance_and_deficit(matrices: Tensor) -> dict[str, float]:
    """Means over the matrices (draws, 1, N, M)."""
    deficits = [entropy_deficit(matrix) for matrix in matrices[:, 0]]
    return {
        "log-variance": sum(log_variance(matrix) for matrix in matrices[:, 0]) / len(matrices),
        "entropy": sum(deficits) / len(deficits),
    }
