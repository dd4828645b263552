"""What a page shows of one head beyond its numbers: rows of its attention, entropy by position, histogram of ln P."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lln.instruments.capture import Capture
from lln.instruments.rows import Rows

POSITIONS = 128  # means that the entropies of a longer text are reduced to
BINS, REACH = 50, 5.0  # of the histogram, which goes so many standard deviations to both sides of the mean
# Weights kept of all heads of a model, a byte each, so that the page of a large model stays small.
WEIGHTS = 900_000
MAX_QUERIES = 16


@dataclass(frozen=True)
class HeadDetails:
    """Details of one head; M keys, Q sampled queries.

    weights (Q, M): attention of the sampled queries.
    entropy (P,): bits, means over consecutive queries; P = min(N, 128).
    limit (P,): the same of uniform attention.
    histogram (50,): share of the entries of ln P in each bin, over mean ± 5 standard deviations; what is outside is
        in the first and last bin. Empty where ln P does not vary.
    """

    weights: Tensor
    entropy: Tensor
    limit: Tensor
    histogram: Tensor


def sample_queries(num_queries: int, num_keys: int, heads: int) -> list[int]:
    """Positions of the queries whose attention is kept: evenly spaced, the last one among them.

    Example:
        >>> sample_queries(100, 100, 144)[:3]
        [5, 12, 18]
    """
    count = min(MAX_QUERIES, num_queries, max(1, WEIGHTS // (heads * num_keys)))
    return [(i + 1) * num_queries // count - 1 for i in range(count)]


@torch.no_grad()
def head_details(capture: Capture, queries: list[int]) -> list[HeadDetails | None]:
    """Details of each captured head; None for heads without finite values, and for those that padding shortens."""
    if not (bool(capture.query.isfinite().all()) and bool(capture.key.isfinite().all())):
        return [None] * len(capture.heads)
    full = capture.query.shape[2], capture.key.shape[2]
    found: list[HeadDetails | None] = []
    for rows in capture.rows():
        is_full = (rows.num_rows, rows.num_columns) == full
        found += _details(rows, queries) if is_full else [None] * rows.heads
    return found


def _details(rows: Rows, queries: list[int]) -> list[HeadDetails]:
    weights = rows.block(torch.tensor(queries, device=rows.index.device)).double()
    entropies, limits, logs = [], [], []
    for index in rows.parts():
        block = rows.block(index)
        entropies.append(torch.special.entr(block).sum(dim=2, dtype=torch.float64))
        limits.append(rows.allowed(index).sum(dim=-1).double().log().expand(len(index)))
        log = rows.log_block(index).double()
        logs.append(log.masked_fill(~(rows.allowed(index) & log.isfinite()), torch.nan))
    bits = torch.log(torch.tensor(2.0, dtype=torch.float64))
    entropy, limit = torch.cat(entropies, dim=1) / bits, torch.cat(limits) / bits
    entropy, limit = _reduce(entropy), _reduce(limit[None])[0]
    histograms = [_histogram(x[x.isfinite()]) for x in torch.cat(logs, dim=1)]
    return [HeadDetails(weights[i], entropy[i], limit, histograms[i]) for i in range(rows.heads)]


def _reduce(values: Tensor) -> Tensor:
    """Means of consecutive values of (G, N), at most `POSITIONS` of them."""
    parts = min(POSITIONS, values.shape[1])
    ends = [values.shape[1] * i // parts for i in range(parts + 1)]
    return torch.stack([values[:, start:end].mean(dim=1) for start, end in pairwise(ends)], dim=1)


def _histogram(logs: Tensor) -> Tensor:
    sigma = logs.std(correction=0)
    # Below this, what varies is rounding of float32 numbers.
    if len(logs) < 2 or sigma <= 1e-6 * logs.mean().abs():
        return logs.new_zeros(0)
    z = ((logs - logs.mean()) / sigma).clamp(-REACH, REACH)
    return torch.histc(z, bins=BINS, min=-REACH, max=REACH) / len(logs)
