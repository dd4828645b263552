"""Scores around two centres, on which the decomposed form rests; `lln.theory` is where to import this from."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lln import reference
from lln._theorems import ABSOLUTE, Check, close, described, finite_tokens
from lln.matching.curves import Form


@dataclass(frozen=True)
class ScoreParts:
    """q_i . k_j / sqrt(d) as the sum of three parts that broadcast to (..., N, M); see `decompose_scores`."""

    content: Tensor  # (..., N, M), (q_i - m_q) . (k_j - m_k) / sqrt(d)
    column: Tensor  # (..., 1, M), m_q . k_j / sqrt(d): the same for every query
    row: Tensor  # (..., N, 1), (q_i - m_q) . m_k / sqrt(d): the same for every key, so that softmax cancels it


def decompose_scores(query: Tensor, key: Tensor, query_center: Tensor, key_center: Tensor) -> ScoreParts:
    """The scores of query (..., N, d) and key (..., M, d) around any two centres (..., d):

        q_i . k_j = (q_i - m_q) . (k_j - m_k) + m_q . k_j + (q_i - m_q) . m_k

    Only the content depends on both i and j: `form="decomposed"` approximates that and has the column exactly.

    Args:
        query: (..., N, d).
        key: (..., M, d).
        query_center, key_center: m_q and m_k, (..., d).

    Returns:
        The three parts over sqrt(d), which sum up to the scores.

    Raises:
        ValueError: tokens that are not finite or do not belong together.

    Example:
        >>> query, key = torch.randn(2, 10, 4)
        >>> parts = lln.theory.decompose_scores(query, key, query.mean(dim=0), key.mean(dim=0))
        >>> (parts.content + parts.column + parts.row).allclose((query @ key.mT / 2).double(), atol=1e-5)
        True
    """
    query, key = finite_tokens(query, key)
    m_q, m_k = (
        _center(name, x, tokens)
        for name, x, tokens in (("query_center", query_center, query), ("key_center", key_center, key))
    )
    dq, dk, scale = query - m_q, key - m_k, math.sqrt(query.shape[-1])
    return ScoreParts(dq @ dk.mT / scale, m_q @ key.mT / scale, dq @ m_k.mT / scale)


@torch.no_grad()
def check_decomposition(
    query: Tensor, key: Tensor, *, query_center: Tensor | None = None, key_center: Tensor | None = None
) -> Check:
    """The three parts of `decompose_scores` sum up to q_i . k_j / sqrt(d), for any centres; by default the means.

    Measured in float64: to rounding, also around centres that are far from the means.

    Args:
        query: (..., N, d).
        key: (..., M, d).
        query_center, key_center: (..., d); left out, the means.

    Returns:
        The sum of the parts, the scores, and whether they agree.

    Raises:
        ValueError: tokens that are not finite or do not belong together.

    Example:
        >>> bool(lln.theory.check_decomposition(*torch.randn(2, 10, 4)).holds)
        True
    """
    query, key = finite_tokens(query, key)
    m_q = query.mean(dim=-2) if query_center is None else query_center
    m_k = key.mean(dim=-2) if key_center is None else key_center
    parts = decompose_scores(query, key, m_q, m_k)
    claimed = parts.content + parts.column + parts.row
    measured = query @ key.mT / math.sqrt(query.shape[-1])
    size = max(part.abs().max().item() for part in (parts.content, parts.column, parts.row))
    holds = close(claimed, measured, size).all(dim=-1).all(dim=-1)
    return Check("q . k = (q - m_q) . (k - m_k) + m_q . k + (q - m_q) . m_k", claimed, measured, holds)


@torch.no_grad()
def check_key_shift(query: Tensor, key: Tensor, shift: Tensor, *, form: Form = "decomposed") -> Check:
    """A vector added to all keys changes nothing, as in softmax attention, where it adds q_i . shift to a whole row.

    Compared are the matched matrices of `lln.reference` for query (..., N, d), key (..., M, d) and shift (d,) or
    (..., d). It holds for `form="decomposed"`: the centres move with the keys, and the column weight m_q . shift is the
    same for all keys. In the other forms it holds for a shift by the same number in all features only.

    Args:
        query: (..., N, d).
        key: (..., M, d).
        shift: (d,) or (..., d).
        form: "paper", "unbiased" or "decomposed".

    Returns:
        Both matrices, and whether they agree.

    Raises:
        ValueError: tokens that are not finite or do not belong together.

    Example:
        >>> query, key = torch.randn(2, 10, 4)
        >>> bool(lln.theory.check_key_shift(query, key, torch.randn(4)).holds)
        True
        >>> bool(lln.theory.check_key_shift(query, key, torch.randn(4), form="paper").holds)
        False
    """
    query, key = finite_tokens(query, key)
    moved = key + _center("shift", shift, key)

    def matrix(keys: Tensor) -> Tensor:
        inputs = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, keys))
        return reference.attention_matrix(*inputs, form=form).reshape(*query.shape[:-1], keys.shape[-2])

    claimed, measured = matrix(key), matrix(moved)
    size = 1 + moved.abs().max().item()  # k + shift is rounded, and with it the weights
    holds = ((claimed - measured).abs() <= ABSOLUTE * size).all(dim=-1).all(dim=-1)
    return Check("P(q, k + shift) = P(q, k)", claimed, measured, holds)


def _center(name: str, center: Tensor, tokens: Tensor) -> Tensor:
    """A vector (..., d) for tokens (..., N, d) as (..., 1, d) in float64."""
    features = tokens.shape[-1]
    if not isinstance(center, Tensor) or not center.is_floating_point() or center.shape[-1:] != (features,):
        raise ValueError(f"{name} must be a floating point tensor (..., {features}), got {described(center)}")
    return center.double()[..., None, :]
