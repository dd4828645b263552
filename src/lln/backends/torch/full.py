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
    attend_summary,
    repeat_heads,
    scaled_queries,
    scales,
    size_of_pieces,
    sum_groups,
    summarize,
    weighted_keys,
)
from lln.masks import fill_padding
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
    memory = summarize(key, value, beta, keep, weight, heads=query.shape[1])
    return (attend_summary(query, alpha, memory),), memory


@in_full_precision
def query_gradients(
    gradient: Tensor, query: Tensor, alpha: Tensor, memory: KeySummary, *, wants_alpha: bool
) -> tuple[Tensor, Tensor, KeySummary]:
    """The gradients of query and alpha, and of the memory, dL and dS, from the gradient g of the output.

        da = A * (g Sᵀ - rowsum)       dS = Aᵀ g       dL = sum over queries of da

    where rowsum makes each row of da sum to zero.
    """
    mass, values = memory.mass[:, :, None], memory.values
    d_query, d_alpha = torch.empty_like(query), torch.zeros_like(alpha)
    d_values, d_mass = torch.zeros_like(values), torch.zeros_like(mass)
    size = size_of_pieces(query, values, query.shape[1])
    tokens = chunks(query.shape[2], size)
    rows = zip(tokens, scaled_queries(query, alpha, size), cut(gradient, size), strict=True)
    for part, (q, scale), g in rows:
        g = g.to(values.dtype)
        A = torch.softmax(torch.addcmul(mass, q, scale), dim=-1)
        d_values += A.mT @ g
        da = (g @ values.mT).mul_(A)
        da.addcmul_(A, da.sum(dim=-1, keepdim=True), value=-1)
        d_mass += da.sum(dim=2, keepdim=True)
        if wants_alpha:
            add_scale_gradient(d_alpha, da, q, part, query.shape[2])
        d_query[:, :, part] = da.mul_(scale)
    return d_query, d_alpha, KeySummary(d_mass[:, :, 0], d_values)


@in_full_precision
def key_gradients(
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    keep: Tensor | None,
    weight: Tensor | None,
    *,
    mass: Tensor,
    d_values: Tensor,
    shift: Tensor,
    wants_beta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of key, value, beta and weight from those of the memory, dS and `shift` = dL - sum over V of S dS.

        db = B * (V dSᵀ + shift)       dV = B dS       B = exp(b - L), with `mass` L

    The sum over keys of B * (V dSᵀ) is the sum over V of S * dS.
    """
    heads, mass, shift = mass.shape[1], mass[:, :, None], shift[:, :, None]
    d_key, d_value, d_beta = torch.empty_like(key), torch.empty_like(value), torch.zeros_like(beta)
    d_weight = None if weight is None else torch.empty_like(weight)
    groups, size = heads // key.shape[1], size_of_pieces(key, value, heads)
    keys = weighted_keys(key, value, beta, keep, weight, heads, size)
    columns = zip(chunks(key.shape[2], size), keys, pieces(key, keep, size), scales(beta, key, size), strict=True)
    for part, (b, v), (k, kept), scale in columns:
        B = b.sub_(mass).exp_()
        d_value[:, :, part] = fill_padding(sum_groups(B @ d_values, groups), kept)
        db = (v @ d_values.mT).add_(shift).mul_(B)
        if wants_beta:
            add_scale_gradient(d_beta, fill_padding(db, kept), repeat_heads(k, groups), part, key.shape[2])
        if d_weight is not None:
            d_weight[:, :, part] = fill_padding(db, kept).sum(dim=-1)
        d_key[:, :, part] = fill_padding(sum_groups(db.mul_(scale), groups), kept)
    return d_key, d_value, d_beta, d_weight


def _backward(inputs: Inputs, others: Tensors, gradients: Tensors, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    query, key, value, alpha, beta, keep, weight = inputs
    memory = KeySummary(*others)
    d_query, d_alpha, found = query_gradients(gradients[0], query, alpha, memory, wants_alpha=wanted[3])
    shift = found.mass - (memory.values * found.values).sum(dim=-1)
    d_key, d_value, d_beta, d_weight = key_gradients(
        key,
        value,
        beta,
        keep,
        weight,
        mass=memory.mass,
        d_values=found.values,
        shift=shift,
        wants_beta=wanted[4],
    )
    found_all = (d_query, d_key, d_value, d_alpha, d_beta, None, d_weight)  # None: of `keep`
    return [x if is_wanted else None for x, is_wanted in zip(found_all, wanted, strict=True)]


_FULL = Attention(traced=lambda *inputs: _forward(*inputs)[0], forward=_forward, backward=_backward)
