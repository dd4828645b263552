"""LLN attention in plain torch, linear in the number of tokens, on any device.

Everything rests on the two-softmax form of eq. 9. With a = alpha q, b = beta k and the log-mass of each feature
L_l = logsumexp_j b_jl over the keys,

    A = softmax over features of (a + L)      B = softmax over keys of b      out = A (Bᵀ V)

No epsilon is needed and nothing overflows, however long the sequence. Tokens pass through in pieces, so that beside
inputs, output and gradients only a piece's worth is in memory; the backward pass computes A and B again.

Here is full attention; causal attention is in `causal`, the block-diagonal companion in `blocks`, and what is kept of
the keys in `memory`.

Shapes: B batch, H heads, N queries, M keys, D features of a head, V value width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lln.kernels.blocks import block_diagonal_attention
from lln.kernels.causal import CAUSAL_CHUNK, causal_attention
from lln.kernels.memory import (
    Memory,
    absent,
    add_scale_gradient,
    collect,
    empty_memory,
    merge,
    recall,
    remember,
    repeat_heads,
    scaled_queries,
    scales,
    size_of_pieces,
    sum_groups,
    weighted_keys,
)
from lln.kernels.recompute import Attention, Inputs, Tensors
from lln.masks import blank
from lln.moments import chunks, cut, in_full_precision, pieces

__all__ = [
    "CAUSAL_CHUNK",
    "Memory",
    "absent",
    "block_diagonal_attention",
    "causal_attention",
    "collect",
    "empty_memory",
    "full_attention",
    "merge",
    "recall",
    "remember",
]


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor, keep: Tensor | None
) -> Tensor:
    """LLN attention of every query to every kept key."""
    return _FULL(query, key, value, alpha, beta, keep)[0]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor, keep: Tensor | None
) -> tuple[Tensors, Tensors]:
    memory = remember(key, value, beta, keep, heads=query.shape[1])
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
    *,
    memory: Memory,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, alpha and beta.

    Through A and S = Bᵀ V, with g the gradient of the output:

        da = A * (g Sᵀ - rowsum)       dS = Aᵀ g       dL = sum over queries of da
        db = B * (V dSᵀ + dL - sum over V of S * dS)   dV = B dS

    where rowsum makes each row of da sum to zero; in db, the sum over keys of B * (V dSᵀ) is the sum over V of S * dS.
    """
    heads = query.shape[1]
    mass, values = memory.mass[:, :, None], memory.values
    d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
    d_alpha, d_beta = (torch.zeros_like(x) for x in (alpha, beta))
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
    keys = weighted_keys(key, value, beta, keep, heads, size)
    columns = zip(chunks(key.shape[2], size), keys, pieces(key, keep, size), scales(beta, key, size), strict=True)
    for part, (b, v), (k, kept), scale in columns:
        B = b.sub_(mass).exp_()
        d_value[:, :, part] = blank(sum_groups(B @ d_values, groups), kept)
        db = (v @ d_values.mT).add_(shift).mul_(B)
        if wanted[4]:
            add_scale_gradient(d_beta, blank(db, kept), repeat_heads(k, groups), part, key.shape[2])
        d_key[:, :, part] = blank(sum_groups(db.mul_(scale), groups), kept)
    return d_query, d_key, d_value, d_alpha, d_beta


def _backward(inputs: Inputs, others: Tensors, gradients: Tensors, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    found = _gradients(gradients[0], *inputs, memory=Memory(*others), wanted=wanted)
    return *(x if is_wanted else None for x, is_wanted in zip(found, wanted[:5], strict=True)), None


_FULL = Attention(traced=lambda *inputs: _forward(*inputs)[0], forward=_forward, backward=_backward)
