"""How concentrated attention is: entropy (eq. 7) and the variance of its rows (eq. 21)."""

from typing import Unpack

import torch
from torch import Tensor

from lln.instruments.reading import Options, measure
from lln.instruments.rows import Rows


def entropy(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """Mean entropy of the rows in bits (eq. 7), from 0 (each query attends to one key) to log2 M (all keys alike):

        H = -1/N sum_ij P_ij log2 P_ij

    Padding does not count; a sample without any kept token gives NaN.

    Args:
        attention: a stochastic matrix (..., N, M), or the query (B, H, N, D).
        key: the key (B, H_k, M, D), if `attention` is the query.
        options: those of `lln.attention_matrix`; an explicit matrix takes `key_padding_mask` and `is_causal` alone.

    Returns:
        A tensor with the leading dimensions of the input, (B, H) for query and key.

    Raises:
        ValueError: the input is no stochastic matrix, or query, key and options do not fit.

    Example:
        >>> entropy(torch.full((8, 8), 1 / 8))
        tensor(3.)
        >>> query, key = torch.randn(2, 1, 4, 100, 16)
        >>> entropy(query, key, kind="softmax").shape
        torch.Size([1, 4])
    """
    return measure(row_entropy, attention, key, options)


def variance(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """Mean variance of the rows (eq. 21), from 0 (uniform) to 1/M - 1/M² (one key a query):

        sigma_p² = 1/M sum_j (P_ij - 1/M)²

    With a causal mask M is the number of keys that the row may attend to.

    Args:
        attention, key, options: as in `lln.instruments.entropy`.

    Returns:
        A tensor with the leading dimensions of the input, (B, H) for query and key.

    Raises:
        ValueError: the input is no stochastic matrix, or query, key and options do not fit.

    Example:
        >>> variance(torch.eye(4))  # 1/4 - 1/16
        tensor(0.1875)
    """
    return measure(row_variance, attention, key, options)


def row_entropy(rows: Rows) -> Tensor:
    total = torch.zeros(rows.heads, dtype=torch.float64, device=rows.index.device)
    for index in rows.parts():
        total += torch.special.entr(rows.block(index)).sum(dim=(1, 2), dtype=torch.float64)
    return total / len(rows.index) / torch.log(torch.tensor(2.0, dtype=torch.float64))


def row_variance(rows: Rows) -> Tensor:
    total = torch.zeros(rows.heads, dtype=torch.float64, device=rows.index.device)
    for index in rows.parts():
        allowed = rows.allowed(index)
        count = allowed.sum(dim=-1, keepdim=True).double()
        block = rows.block(index)
        squares = (block - (1 / count).to(block.dtype)).square().masked_fill(~allowed, 0.0)
        total += (squares.sum(dim=2, dtype=torch.float64) / count[:, 0]).sum(dim=1)
    return total / len(rows.index)
