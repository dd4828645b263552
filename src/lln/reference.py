"""The same functions on explicit matrices, one formula a line and no tricks: what all tests compare with.

Everything is written as the paper writes it, or as its words say it, sample by sample and head by head where that is
plainer: slow, O(N M D) memory, any float dtype (float64 for a yardstick). Where `lln.functional` has a mask, this has
indexing; where it has a recurrence, this has a loop over prefixes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.checks import check_block_size, check_choice, check_inputs
from lln.curves import Matching, matched_spread
from lln.functional import KINDS, Kind, broadcast_scale
from lln.masks import kept_tokens, read_paddings
from lln.moments import Scope, accumulator


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """softmax(q . k / sqrt(D)) v (eq. 1), with a matrix and without a trick."""
    return _weights(query, key, "softmax", key_padding_mask, is_causal).to(value.dtype) @ _heads(value, query)


def lln_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: Matching = "variance",
    scope: Scope = "sample",
) -> Tensor:
    """LLN attention (eq. 8)."""
    check_inputs(query, key, value, same_length="is_causal=True" if is_causal else None)
    matched = match_moments(
        query,
        key,
        matching=matching,
        scope=scope,
        key_padding_mask=key_padding_mask,
        query_padding_mask=query_padding_mask,
        is_causal=is_causal,
    )
    a = query * broadcast_scale("alpha", alpha, matched[0], query, heads=query.shape[1]).to(query.dtype)
    b = _heads(key, query) * broadcast_scale("beta", beta, matched[1], key, heads=query.shape[1]).to(key.dtype)
    log_kernel = torch.logsumexp(a[:, :, :, None] + b[:, :, None], dim=-1)  # ln of exp(a_i) . exp(b_j), (B, H, N, M)
    allowed = _allowed(query, key, key_padding_mask, is_causal)
    return (_normalise(log_kernel, allowed) @ _heads(value, query)).to(query.dtype)


def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention among tokens of the same block, where only kept tokens count."""
    check_block_size(block_size)
    check_inputs(query, key, value, same_length="block-diagonal attention")
    weights = _weights(query, key, "block_diagonal", key_padding_mask, is_causal, block_size=block_size)
    return (weights @ _heads(value, query)).to(query.dtype)


def lln_diag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: Matching = "variance",
    scope: Scope = "sample",
) -> Tensor:
    """The average of LLN and block-diagonal attention (figure 3)."""
    near = block_diagonal_attention(
        query, key, value, block_size=block_size, key_padding_mask=key_padding_mask, is_causal=is_causal
    )
    far = lln_attention(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        is_causal=is_causal,
        alpha=alpha,
        beta=beta,
        matching=matching,
        scope=scope,
    )
    return (far + near) / 2


def attention_matrix(query: Tensor, key: Tensor, *, kind: Kind = "lln", **options: Any) -> Tensor:
    """The attention matrix, as what the attention makes of the identity."""
    check_choice("kind", kind, KINDS)
    attention: Callable[..., Tensor] = {
        "softmax": softmax_attention,
        "lln": lln_attention,
        "block_diagonal": block_diagonal_attention,
        "lln_diag": lln_diag_attention,
    }[kind]
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], key.shape[2])
    return attention(query, key, identity, **options)


def match_moments(
    query: Tensor,
    key: Tensor,
    *,
    matching: Matching = "variance",
    scope: Scope = "sample",
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """alpha and beta (eq. 10) from the statistics of explicitly chosen tokens and their explicit scores."""
    keep_query, keep_key = read_paddings(query, key, key_padding_mask, query_padding_mask)
    key = _heads(key, query).detach().to(accumulator(key.dtype))
    query = query.detach().to(accumulator(query.dtype))
    batch, heads, tokens, head_dim = query.shape

    def kept(x: Tensor, keep: Tensor | None, sample: int, end: int | None = None) -> Tensor:
        return x[sample][:, :end] if keep is None else x[sample][:, :end][:, keep[sample][:end]]

    def scales(sigma_q: Tensor, sigma_k: Tensor, variance: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        count = torch.full_like(variance, num_keys)
        share = (matched_spread(variance, count, head_dim=head_dim, matching=matching) / 2).sqrt()
        return tuple(torch.where(sigma > 0, share / sigma, 0.0) for sigma in (sigma_q, sigma_k))  # type: ignore[return-value]

    def sigma(x: Tensor) -> Tensor:  # of all entries of each head
        return x.flatten(1).std(dim=1, correction=0) if x.numel() else x.new_zeros(x.shape[0])

    if scope == "batch":
        sigma_q = torch.cat([kept(query, keep_query, s).flatten() for s in range(batch)]).std()
        sigma_k = torch.cat([kept(key, keep_key, s).flatten() for s in range(batch)]).std()
        pairs = [
            scales(sigma_q, sigma_k, (sigma_q * sigma_k).square(), kept(key, keep_key, s).shape[1])
            for s in range(batch)
        ]
        alpha, beta = (torch.stack(list(x))[:, None].expand(batch, heads) for x in zip(*pairs, strict=True))
        return alpha, beta
    rows = []
    for s in range(batch):
        if is_causal:
            prefixes = [(kept(query, keep_key, s, t), kept(key, keep_key, s, t)) for t in range(1, tokens + 1)]
            steps = [scales(sigma(q), sigma(k), (sigma(q) * sigma(k)).square(), k.shape[1]) for q, k in prefixes]
            rows.append(tuple(torch.stack(list(x), dim=-1) for x in zip(*steps, strict=True)))
        else:
            q, k = kept(query, keep_query, s), kept(key, keep_key, s)
            scores = q @ k.mT / math.sqrt(head_dim)
            deviation = scores - scores.mean(dim=2, keepdim=True)  # softmax does not see the mean of a row
            variance = deviation.square().mean(dim=(1, 2)) if scores.numel() else scores.new_zeros(heads)
            rows.append(scales(sigma(q), sigma(k), variance, k.shape[1]))
    alpha, beta = (torch.stack(list(x)) for x in zip(*rows, strict=True))
    return alpha, beta


def _weights(
    query: Tensor,
    key: Tensor,
    kind: Kind,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    block_size: int | None = None,
) -> Tensor:
    scores = query @ _heads(key, query).mT / math.sqrt(query.shape[-1])
    allowed = _allowed(query, key, key_padding_mask, is_causal)
    if kind == "block_diagonal":
        assert block_size is not None
        _, keep = read_paddings(query, key, key_padding_mask, None)
        kept = kept_tokens(keep, query)
        block = (kept.cumsum(dim=1) - 1) // block_size
        same_block = block[:, None, :, None] == block[:, None, None, :]
        allowed = allowed & same_block & kept[:, None, :, None]  # a token that is not kept lies in no block
    return _normalise(scores, allowed)


def _allowed(query: Tensor, key: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Which key each query may see, (B, 1, N, M)."""
    _, keep = read_paddings(query, key, key_padding_mask, None)
    allowed = torch.ones(query.shape[0], 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    return allowed if keep is None else allowed & keep[:, None, None, :]


def _normalise(log_weights: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; zeros where none is."""
    masked = log_weights.masked_fill(~allowed, -math.inf)
    return torch.softmax(masked, dim=-1).masked_fill(~allowed, 0.0)


def _heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)
