"""How log-normal attention is: the statistics of ln P (propositions 3.1 and 4.1)."""

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from lln.instruments.reading import Options, measure
from lln.instruments.rows import MatrixRows, Rows

# The histogram of standardised ln P, when entries are too many to sort: from -8 to 8, of which a normal distribution
# leaves out 1e-15. A distance that is read at the edges is too small by 0.4 x (bin width) at most: 0.0004.
BINS, REACH = 16384, 8.0
# Up to so many entries of a head are sorted, also when they come from query and key.
EXACT_ENTRIES = 2**20


@dataclass(frozen=True)
class LogNormality:
    """Statistics of ln P over all entries that are not zero; each has the leading dimensions of the attention.

    Skewness and excess kurtosis are 0 for a log-normal matrix. They and the distance are NaN if all entries are equal.
    """

    mean: Tensor
    variance: Tensor
    skewness: Tensor
    excess_kurtosis: Tensor
    ks_distance: Tensor  # largest difference to the distribution function of the fitted log-normal, 0 to 1
    zeros: Tensor  # share of the entries that are zero and have no logarithm


def lognormality(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> LogNormality:
    """Mean, variance, skewness and excess kurtosis of ln P, and its Kolmogorov-Smirnov distance to the fitted normal.

        D = sup_x |F(x) - Phi((x - mean) / sigma)|

    Moments are those of the population (divided by the number of entries). The distance is exact for an explicit matrix
    and up to 2^20 entries a head; beyond, it comes from a histogram and is too small by 0.0004 at most. Entries that a
    mask excludes do not count.

    Args:
        attention, key, options: as in `lln.instruments.entropy`.

    Returns:
        `LogNormality`, whose fields are tensors with the leading dimensions of the input.

    Raises:
        ValueError: the input is no stochastic matrix, or query, key and options do not fit.

    Example:
        >>> query, key = torch.randn(2, 1, 4, 100, 64)
        >>> found = lognormality(query, key, kind="softmax")
        >>> bool((found.ks_distance < 0.05).all())
        True
    """
    return LogNormality(*measure(statistics, attention, key, options, fields=6).unbind(dim=-1))


def statistics(rows: Rows) -> Tensor:
    """The six fields of `LogNormality` for each head, (G, 6)."""
    zero = torch.zeros(rows.heads, dtype=torch.float64, device=rows.index.device)
    count, entries, total = zero, 0, zero
    for index in rows.parts():
        logs, present = _logarithms(rows, index)
        count = count + present.sum(dim=(1, 2))
        entries += int(rows.allowed(index).expand(len(index), -1).sum())
        total = total + logs.sum(dim=(1, 2), dtype=torch.float64)
    mean = total / count
    powers = [zero] * 3
    for index in rows.parts():
        logs, present = _logarithms(rows, index)
        deviation = (logs.double() - mean[:, None, None]).masked_fill_(~present, 0.0)
        square = deviation.square()
        terms = (square, square * deviation, square * square)
        powers = [power + term.sum(dim=(1, 2)) for power, term in zip(powers, terms, strict=True)]
    second, third, fourth = (power / count for power in powers)
    # Below this, what varies is rounding.
    constant = second <= (torch.finfo(logs.dtype).eps * 4 * mean.abs()).square()
    second = second.masked_fill(constant, 0.0)
    sigma = second.sqrt()
    distance = _distance(rows, mean, sigma.masked_fill(constant, 1.0), count)
    shape = (third / sigma**3, fourth / second.square() - 3, distance)
    skewness, kurtosis, distance = (x.masked_fill(constant, torch.nan) for x in shape)
    return torch.stack((mean, second, skewness, kurtosis, distance, 1 - count / entries), dim=-1)


def _logarithms(rows: Rows, index: Tensor) -> tuple[Tensor, Tensor]:
    """ln P with zeros in place of what is not there, and what is there."""
    logs = rows.log_block(index)
    present = rows.allowed(index) & logs.isfinite()
    return logs.masked_fill(~present, 0.0), present


def _distance(rows: Rows, mean: Tensor, sigma: Tensor, count: Tensor) -> Tensor:
    if isinstance(rows, MatrixRows) or len(rows.index) * rows.num_columns <= EXACT_ENTRIES:
        return _exact_distance(rows, mean, sigma)
    histogram = torch.zeros(rows.heads, BINS + 2, dtype=torch.float64, device=mean.device)
    for index in rows.parts():
        logs, present = _logarithms(rows, index)
        z = (logs - mean[:, None, None].to(logs.dtype)) / sigma[:, None, None].to(logs.dtype)
        bins = ((z + REACH) * (BINS / (2 * REACH))).floor_().clamp_(-1, BINS).int() + 1
        for head in range(rows.heads):
            histogram[head] += torch.bincount(bins[head][present[head]], minlength=BINS + 2)
    edges = torch.linspace(-REACH, REACH, BINS + 1, dtype=torch.float64, device=mean.device)
    below = histogram.cumsum(dim=1)[:, :-1] / count[:, None]
    distance: Tensor = (below - torch.special.ndtr(edges)).abs()
    return distance.amax(dim=1)


def _exact_distance(rows: Rows, mean: Tensor, sigma: Tensor) -> Tensor:
    parts = [_logarithms(rows, index) for index in rows.parts()]
    logs, present = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
    distances = []
    for head in range(rows.heads):
        z = ((logs[head][present[head]].double() - mean[head]) / sigma[head]).sort().values
        normal = torch.special.ndtr(z)
        above = torch.arange(1, len(z) + 1, dtype=torch.float64, device=z.device) / max(len(z), 1)
        gap = torch.maximum(above - normal, normal - above + 1 / max(len(z), 1))
        distances.append(gap.amax() if len(z) else gap.new_tensor(torch.nan))
    return torch.stack(distances)
