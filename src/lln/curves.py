"""Matching curves: from the variance of softmax's scores to the spread s² that LLN attention needs.

The spread s² = alpha² sigma_q² + beta² sigma_k² (the paper's sigma-tilde squared, eq. 26) decides how concentrated an
LLN attention matrix is. Which spread behaves like softmax attention with score variance v depends on the head
dimension, a little on the number of keys, and on what should agree:

    linear      s² = (v - b) / a, eq. 10, a line through the measured log-variance
    variance    the log-variance of the matrix, Var(ln P)
    entropy     the mean entropy of its rows

No closed form is known for the last two, so they are measured on Gaussian inputs and shipped as `curves.json`;
`lln calibrate` makes that file anew and explains it. Between tabulated head dimensions and key counts the logarithm of
s² is interpolated; below and above the tabulated variances s² is proportional to v, which is its limit on both sides.
"""

import json
import math
from bisect import bisect_right
from importlib.resources import files
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Matching = Literal["linear", "variance", "entropy"]
MATCHINGS: tuple[Matching, ...] = get_args(Matching)

# a and b of eq. 10 in the code that the paper published; they belong to head dimension 64 (see `lln calibrate`).
PUBLISHED_HEAD_DIM, PUBLISHED_A, PUBLISHED_B = 64, 0.14855178144710912, -0.35487039130661086

# Scores that vary more than this give a one-hot softmax in any precision; a limit keeps every later step finite.
MAX_SCORE_VARIANCE = 1e6

TABLE_PATH = files("lln").joinpath("curves.json")
TABLE: dict[str, Any] = json.loads(TABLE_PATH.read_text()) if TABLE_PATH.is_file() else {}


def matched_spread(score_variance: Tensor, num_keys: Tensor, *, head_dim: int, matching: Matching) -> Tensor:
    """The spread s² at which LLN attention over `num_keys` keys behaves like softmax with this score variance.

    Zero variance gives spread zero, uniform attention as softmax has it, except for `linear`, which gives -b/a.
    """
    variance = score_variance.clamp(max=MAX_SCORE_VARIANCE)
    if matching == "linear":
        a, b = linear_constants(head_dim)
        return ((variance - b) / a).clamp(min=0.0)
    start, ratio = TABLE["score_variance"]["start"], TABLE["score_variance"]["ratio"]
    if matching == "variance":
        rows = [_between_head_dims(TABLE["variance"], head_dim)]
        row = torch.zeros_like(variance)
    else:
        counts = TABLE["num_keys"]
        rows = [_between_head_dims([curve[n] for curve in TABLE["entropy"]], head_dim) for n in range(len(counts))]
        step = math.log(counts[1] / counts[0])  # calibration chooses counts in a constant ratio
        row = ((num_keys.to(variance).clamp(min=1.0) / counts[0]).log() / step).clamp(0.0, len(counts) - 1.0)
    curve = torch.tensor(rows, dtype=variance.dtype, device=variance.device)
    tiny = torch.finfo(variance.dtype).tiny
    column = (variance.clamp(min=tiny) / start).log() / math.log(ratio)
    inside = column.clamp(0.0, curve.shape[1] - 1.0)
    log_spread = _bilinear(curve, row, inside) + (column - inside) * math.log(ratio)
    return torch.where(variance > 0, log_spread.exp(), variance)


def linear_constants(head_dim: int) -> tuple[float, float]:
    """a and b of eq. 10 and 11 for a head dimension; for 64 the published ones."""
    pairs = [
        [PUBLISHED_A, PUBLISHED_B] if dim == PUBLISHED_HEAD_DIM else pair
        for dim, pair in zip(TABLE["head_dims"], TABLE["linear"], strict=True)
    ]
    a, b = _between_head_dims(pairs, head_dim)
    return a, b


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
