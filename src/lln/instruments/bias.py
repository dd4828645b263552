"""What separates biased from unbiased concentration (section 3.2.2): the parts of the entropy deficit.

Rows can be concentrated in two ways. Either all of them attend to the same few columns (biased: the output hardly
depends on the query, and the spectral gap is large although entropy is low), or each attends to columns of its own
(unbiased). With p̄ the mean row, u the uniform one and KL in bits, the entropy that is missing splits exactly:

    log2 M - H(P)  =  KL(p̄ || u)  +  1/N sum_i KL(p_i || p̄)
    deficit           biased         unbiased: the mutual information of query and key

Causal rows attend to different keys, so u becomes the uniform row over the keys that row i may attend to, and ū the
mean of those: biased = KL(p̄ || ū), which the joint convexity of KL keeps between 0 and the deficit.
"""

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from lln.instruments.reading import Options, measure
from lln.instruments.rows import Rows


@dataclass(frozen=True)
class Concentration:
    """limit = entropy + biased + unbiased, in bits; each has the leading dimensions of the attention."""

    limit: Tensor  # the entropy of uniform attention: log2 M, or its mean over causal rows
    entropy: Tensor
    biased: Tensor
    unbiased: Tensor

    @property
    def bias_share(self) -> Tensor:
        """biased / (biased + unbiased): 1 if all rows are the same, 0 if all columns get the same, NaN if uniform."""
        return self.biased / (self.biased + self.unbiased)


def bias(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """How far the matrix leans to particular columns, in bits: KL(p̄ || u) of the mean row p̄ from the uniform one.

    0 when every key gets the same attention in total (uniform, identity, any permutation), log2 M when all rows attend
    to one key. It is the biased part of the entropy deficit; `concentration` gives all parts.

    Args:
        attention, key, options: as in `lln.instruments.entropy`.

    Returns:
        A tensor with the leading dimensions of the input, (B, H) for query and key.

    Raises:
        ValueError: the input is no stochastic matrix, or query, key and options do not fit.

    Example:
        >>> bias(torch.eye(4))
        tensor(0.)
        >>> bias(torch.eye(4)[[2, 2, 2, 2]])  # all rows attend to one key
        tensor(2.)
    """
    return concentration(attention, key, **options).biased


def concentration(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> Concentration:
    """The entropy of uniform attention, the entropy of this one, and the two parts of their difference, in bits.

    Args:
        attention, key, options: as in `lln.instruments.entropy`.

    Returns:
        `Concentration`, whose fields are tensors with the leading dimensions of the input.

    Raises:
        ValueError: the input is no stochastic matrix, or query, key and options do not fit.

    Example:
        >>> found = concentration(torch.eye(4))
        >>> found.limit, found.unbiased, found.bias_share
        (tensor(2.), tensor(2.), tensor(0.))
    """
    return Concentration(*measure(entropy_parts, attention, key, options, fields=4).unbind(dim=-1))


def entropy_parts(rows: Rows) -> Tensor:
    """limit, entropy, biased and unbiased of each head, (G, 4)."""
    zeros = torch.zeros(rows.heads, rows.num_columns, dtype=torch.float64, device=rows.index.device)
    received, expected = zeros, zeros[:1]
    entropy, limit = zeros.new_zeros(rows.heads), zeros.new_zeros(1)
    for index in rows.parts():
        block, allowed = rows.block(index), rows.allowed(index)
        count = allowed.sum(dim=-1, keepdim=True).double()
        times = len(index) / len(allowed)  # rows that attend to the same keys are given once
        received = received + block.sum(dim=1).double()
        expected = expected + (allowed / count).sum(dim=0) * times
        entropy = entropy + torch.special.entr(block).sum(dim=(1, 2), dtype=torch.float64)
        limit = limit + count.log().sum() * times
    n = len(rows.index)
    mean, uniform = received / n, expected / n
    deficit = (limit - entropy) / n
    biased = (torch.special.xlogy(mean, mean) - torch.special.xlogy(mean, uniform)).sum(dim=1)
    # Rounding may leave a part slightly below zero.
    biased = biased.clamp(min=0.0)
    unbiased = (deficit - biased).clamp(min=0.0)
    return torch.stack((limit.expand_as(entropy) / n, entropy / n, biased, unbiased), dim=-1) / math.log(2)
