"""Matching curves: from the variance of softmax's scores to the spread s² that LLN attention needs.

The spread s² = alpha² sigma_q² + beta² sigma_k² (the paper's sigma-tilde squared, eq. 26) decides how concentrated an
LLN attention matrix is. Which spread behaves like softmax attention with score variance v depends on the head
dimension, a little on the number of keys, and on what should agree:

    linear      s² = (v - b) / a, eq. 10, a line through the measured log-variance
    variance    the log-variance of the matrix, Var(ln P)
    entropy     the mean entropy of its rows

No closed form is known for the last two, so they are measured on Gaussian inputs and shipped as `curves.json`;
`lln calibrate` makes that file and explains it. Between tabulated head dimensions and key counts the logarithm of
s² is interpolated; below and above the tabulated variances s² follows its limits, see `_narrow`.

Each form of LLN attention has its own curves. With a = alpha q, b = beta k, dq = q - m_q and dk = k - m_k,

    paper       b_jl = beta k_jl                                                                    (eq. 8)
    unbiased    b_jl = beta k_jl - logsumexp_l(beta k_jl)
    decomposed  b_jl = beta dk_jl - logsumexp_l(beta dk_jl) + m_q . k_j / sqrt(D),    a = alpha dq

Only the content of the decomposed form, dq . dk / sqrt(D), is approximated, and it is the unbiased form on centred
inputs, so that it has the same curves: v is then the variance of dq . dk / sqrt(D).
"""

import json
import math
from bisect import bisect_right
from importlib.resources import files
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lln.checks import check_choice

Matching = Literal["linear", "variance", "entropy"]
MATCHINGS: tuple[Matching, ...] = get_args(Matching)

Form = Literal["paper", "unbiased", "decomposed"]
FORMS: tuple[Form, ...] = get_args(Form)

# a and b of eq. 10 in the code that the paper published; they belong to head dimension 64 (see `lln calibrate`).
PUBLISHED_HEAD_DIM, PUBLISHED_A, PUBLISHED_B = 64, 0.14855178144710912, -0.35487039130661086

# Scores that vary more than this give a one-hot softmax in any precision; a limit keeps every later step finite.
MAX_SCORE_VARIANCE = 1e6

TABLE_PATH = files("lln.matching").joinpath("curves.json")
TABLE: dict[str, Any] = json.loads(TABLE_PATH.read_text()) if TABLE_PATH.is_file() else {}


def matched_spread(
    score_variance: Tensor, num_keys: Tensor, *, head_dim: int, matching: Matching, form: Form = "paper"
) -> Tensor:
    """The spread s² at which LLN attention over `num_keys` keys behaves like softmax with this score variance.

    Zero variance gives spread zero, uniform attention as softmax has it, except for `linear`, which gives -b/a. For
    `form="decomposed"` the variance is that of the content, dq . dk / sqrt(D).

    A row of the unbiased form has an entropy of at least about ln(N/D) nats, whatever the spread. Where that of softmax
    is so low that `entropy` matching comes near this limit (1024 keys: beyond v = 2.6 for D = 8 and 5 for D = 64), it
    stops, and s² is proportional to v from there on; see `lln.matching.calibration.REACH`.

    Raises:
        ValueError: matching or form is not one of `MATCHINGS` and `FORMS`.
    """
    check_choice("matching", matching, MATCHINGS)
    variance = score_variance.clamp(max=MAX_SCORE_VARIANCE)
    if matching == "linear":
        a, b = linear_constants(head_dim, form=form)
        return ((variance - b) / a).clamp(min=0.0)
    curve = torch.tensor(curve_rows(head_dim, matching, form=form), dtype=variance.dtype, device=variance.device)
    if curve.shape[0] == 1:
        row = torch.zeros_like(variance)
    else:
        counts = TABLE["num_keys"]
        step = math.log(counts[1] / counts[0])  # calibration chooses counts in a constant ratio
        row = ((num_keys.to(variance).clamp(min=1.0) / counts[0]).log() / step).clamp(0.0, len(counts) - 1.0)
    start, ratio = TABLE["score_variance"]["start"], TABLE["score_variance"]["ratio"]
    tiny = torch.finfo(variance.dtype).tiny
    column = (variance.clamp(min=tiny) / start).log() / math.log(ratio)
    inside = column.clamp(0.0, curve.shape[1] - 1.0)
    log_spread = _bilinear(curve, row, inside) + (column - inside) * math.log(ratio)
    if form != "paper":
        edge = _bilinear(curve, row, torch.zeros_like(inside))
        log_spread = torch.where(variance < start, _narrow(variance, edge, start, head_dim), log_spread)
    return torch.where(variance > 0, log_spread.exp(), variance)


def _narrow(variance: Tensor, edge: Tensor, start: float, head_dim: int) -> Tensor:
    """ln s² of the unbiased form below the tabulated variances, which begin at `start` with `edge`.

    For small spreads Var(ln P) of the paper's form is s²/(2D), all of it the weights of columns, so that s² is
    proportional to v. The other forms have s⁴/(4D), scores: to first order ln P_ij is alpha beta / D times the dot
    product of q_i and k_j (less the mean of its entries). What comes next is of the order of s², or sqrt(v); a lower
    power keeps s² from falling where the table, extrapolated to other head dimensions, begins far below that limit.
    """
    tiny = torch.finfo(variance.dtype).tiny
    limit = math.log(2 * math.sqrt(head_dim)) + variance.clamp(min=tiny).log() / 2
    at_start = math.log(2 * math.sqrt(head_dim * start))
    gap = edge - at_start
    power = (0.45 / gap.abs().clamp(min=1e-9)).clamp(max=0.5)
    return limit + gap * (variance / start) ** power


def linear_constants(head_dim: int, *, form: Form = "paper") -> tuple[float, float]:
    """a and b of eq. 10 and 11 for a head dimension; in the paper's form for 64 the published ones.

    Raises:
        ValueError: form is not one of `FORMS`.
    """
    pairs = form_table(form)["linear"]
    if form == "paper":
        pairs = [
            [PUBLISHED_A, PUBLISHED_B] if dim == PUBLISHED_HEAD_DIM else pair
            for dim, pair in zip(TABLE["head_dims"], pairs, strict=True)
        ]
    a, b = _between_head_dims(pairs, head_dim)
    return a, b


def curve_rows(head_dim: int, matching: Literal["variance", "entropy"], *, form: Form = "paper") -> list[list[float]]:
    """ln s² over the tabulated score variances: one row for `variance`, one for each of the key counts for `entropy`.

    Raises:
        ValueError: matching has no curve, or form is not one of `FORMS`.
    """
    check_choice("matching", matching, ("variance", "entropy"))
    table = form_table(form)
    if matching == "variance":
        rows = [_between_head_dims(table["variance"], head_dim)]
    else:
        counts = range(len(TABLE["num_keys"]))
        rows = [_between_head_dims([curve[n] for curve in table["entropy"]], head_dim) for n in counts]
    if TABLE["head_dims"][0] <= head_dim <= TABLE["head_dims"][-1]:
        return rows
    # Beyond the tabulated head dimensions a curve may come out with a dip, which the others have not.
    return [list(accumulate(row, lambda before, here: max(here, before + 1e-3))) for row in rows]


def form_table(form: Form) -> dict[str, Any]:
    """The part of the table with `linear`, `variance` and `entropy` of a form.

    Raises:
        ValueError: form is not one of `FORMS`.
    """
    check_choice("form", form, FORMS)
    if form == "paper":
        return TABLE
    curves: dict[str, Any] = TABLE["forms"]["unbiased"]  # also those of the decomposed form
    return curves


def _between_head_dims(rows: list[list[float]], head_dim: int) -> list[float]:
    """The row for a head dimension, linear in its logarithm between (and beyond) the tabulated ones."""
    dims = TABLE["head_dims"]
    if head_dim in dims:
        return rows[dims.index(head_dim)]
    left = min(max(bisect_right(dims, head_dim) - 1, 0), len(dims) - 2)
    weight = math.log(head_dim / dims[left]) / math.log(dims[left + 1] / dims[left])
    return [(1 - weight) * lower + weight * upper for lower, upper in zip(rows[left], rows[left + 1], strict=True)]


def _bilinear(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """`table` (rows, columns) at fractional indices that lie inside it."""
    rows, columns = table.shape
    top = row.floor().clamp(0, max(rows - 2, 0))
    left = column.floor().clamp(0, columns - 2)
    down, right = row - top, column - left
    bottom = (top + 1).clamp(max=rows - 1)
    flat = table.flatten()

    def along(line: Tensor) -> Tensor:
        index = (line * columns + left).nan_to_num().long()  # a NaN keeps its way through `right`
        return flat[index] * (1 - right) + flat[index + 1] * right

    if rows == 1:
        return along(top)
    return along(top) * (1 - down) + along(bottom) * down
