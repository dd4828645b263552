"""LLN attention of every query to every kept key.

Shapes: B batch, H heads, N queries, M keys, D features of a head, V value width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln.backends.torch.recompute import Attention, Inputs, Tensors
from lln.backends.torch.summary import (
    KeySummary,
    add_scale_gradient,
    recall,
    remember,
    repeat_heads,
    scaled_queries,
    scales,
    size_of_pieces,
    sum_groups,
    weighted_keys,
)
from lln.masks import blank
from lln.matching.moments import chunks, cut, pieces
from lln.precision import in_full_precision


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    keep: Tensor | None,
    weight: Tensor | None = None,
) -> Tensor:
    """LLN attention of every query to every kept key; `weight` (B, H, M) is added to beta k."""
    return _FULL(query, key, value, alpha, beta, keep, weight)[0]


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    keep: Tensor | None,
    weight: Tensor | None,
) -> tuple[Tensors, Tensors]:
    memory = remember(key, value, beta, keep, weight, heads=query.shape[1])
    return (recall(query, alpha, memory),), memory


@in_full_precision
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    keep: Tensor | None,
    weight: Tensor | None,
    *,
    memory: KeySummary,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, alpha, beta and weight.

    Through A and S = Bᵀ V, with g the gradient of the output:

        da = A * (g Sᵀ - rowsum)       dS = Aᵀ g       dL = sum over queries of da
        db = B * (V dSᵀ + dL - sum over V of S * dS)   dV = B dS

    where rowsum makes each row of da sum to zero; in db, the sum over keys of B * (V dSᵀ) is the sum over V of S * dS.
    """
    heads = query.shape[1]
    mass, values = memory.mass[:, :, None], memory.values
    d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
    d_alpha, d_beta = (torch.zeros_like(x) for x in (alpha, beta))
    d_weight = None if weight is None else torch.empty_like(weight)
    d_values, d_mass = torch.zeros_like(values), torch.zeros_like(mass)

    size = size_of_pieces(query, value, heads)
    tokens = chunks(query.shape[2], size)
    rows = zip(tokens, scaled_queries(query, alpha, size), cut(gradient, size), strict=True)
    for part, (q, scale), g in rows:
        g = g.to(values.dtype)
        A = torch.softmax(torch.addcmul(mass, q, scale), dim=-1)
        d_values += A.mT @ g
        da = (g @ values.mT).mul_(A)
        da.addcmul_(A, da.sum(dim=-1, keepdim=True), value=-1)
        d_mass += da.sum(dim=2, keepdim=True)
        if wanted[3]:
            add_scale_gradient(d_alpha, da, q, part, query.shape[2])
        d_query[:, :, part] = da.mul_(scale)

    shift = d_mass - (values * d_values).sum(dim=-1)[:, :, None]
    groups = heads // key.shape[1]
    size = size_of_pieces(key, value, heads)
    keys = weighted_keys(key, value, beta, keep, weight, heads, size)
    columns = zip(chunks(key.shape[2], size), keys, pieces(key, keep, size), scales(beta, key, size), strict=True)
    for part, (b, v), (k, kept), scale in columns:
        B = b.sub_(mass).exp_()
        d_value[:, :, part] = blank(sum_groups(B @ d_values, groups), kept)
        db = (v @ d_values.mT).add_(shift).mul_(B)
        if wanted[4]:
            add_scale_gradient(d_beta, blank(db, kept), repeat_heads(k, groups), part, key.shape[2])
        if d_weight is not None:
            d_weight[:, :, part] = blank(db, kept).sum(dim=-1)
        d_key[:, :, part] = blank(sum_groups(db.mul_(scale), groups), kept)
    return d_query, d_key, d_value, d_alpha, d_beta, d_weight


def _backward(inputs: Inputs, others: Tensors, gradients: Tensors, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    found = list(_gradients(gradients[0], *inputs, memory=KeySummary(*others), wanted=wanted))
    found.insert(5, None)  # of `keep`
    return [x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)]


_FULL = Attention(traced=lambda *inputs: _forward(*inputs)[0], forward=_forward, backward=_backward)
