"""The same functions on explicit matrices, one formula a line, without optimisations: what all tests compare with.

Everything is written as the paper writes it, or as it is described there, sample by sample and head by head where that
is plainer: slow, O(N M D) memory, any float dtype (float64 to compare with). Where `lln.functional` has a mask, this
has indexing; where it has a recurrence, this has a loop over prefixes; packed sequences are computed one by one.

Shapes: B batch, H query heads, H_k key heads, N queries, M keys, D features of a head.
"""

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from lln.checks import check_block_size, check_choice, check_inputs
from lln.functional import KINDS, Kind
from lln.masks import kept_tokens, read_paddings
from lln.matching.curves import Form, Matching
from lln.matching.moments import Scope
from lln.problem import NEARS, Centers, FarOptions, Near, NearOptions, Options, read_key_weight, with_signature
from lln.reference.inputs import allowed_pairs, broadcast_scale, normalise, packed, repeat_heads
from lln.reference.matching import centers_of, features, match_moments

__all__ = [
    "attention_matrix",
    "block_diagonal_attention",
    "centers_of",
    "features",
    "lln_attention",
    "lln_diag_attention",
    "match_moments",
    "softmax_attention",
]


@packed
def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """softmax(q . k / sqrt(D)) v (eq. 1), with an explicit matrix.

    Args:
        query, key, value, key_padding_mask, is_causal, cu_seqlens: as in `lln.lln_attention`.

    Returns:
        (B, H, N, Dv).

    Raises:
        TypeError, ValueError: masks or sequences that do not fit the tokens.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 9, 8)
        >>> output = lln.reference.softmax_attention(query, key, value)
        >>> output.allclose(torch.nn.functional.scaled_dot_product_attention(query, key, value), atol=1e-6)
        True
    """
    return _weights(query, key, key_padding_mask, is_causal).to(value.dtype) @ repeat_heads(value, query)


@packed
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
    form: Form = "paper",
    centers: Centers | None = None,
    key_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """LLN attention (eq. 8) in one of three forms: the weight of key j for query i is proportional to

        exp(a_i) . exp(b_j)

    with a and b of `features`. Alpha and beta are constants to autograd, centres are not: means of the sample are part
    of the function.

    Args:
        query, key, value, key_padding_mask, query_padding_mask, is_causal, alpha, beta, matching, scope: as in
            `lln.lln_attention`.
        form: "paper", "unbiased" or "decomposed".
        centers: m_q and m_k of the decomposed form, (H, D) or (B, H, D) and (H_k, D) or (B, H_k, D); by default the
            means of each sample over its kept queries and its kept keys, which causal attention cannot use.
        key_weight: log-weights of the keys, (B, H, M) or 1 in place of B or H: added to all features of b.
        cu_seqlens: for inputs of batch 1 that hold several sequences one after the other, where each starts and the
            last ends: int32 (sequences + 1,), as in flash-attention. Statistics and centres are those of a sequence.

    Returns:
        (B, H, N, Dv) in the dtype of the query.

    Raises:
        TypeError, ValueError: input that does not fit, an unknown form, centres for another form than "decomposed", or
            none for a causal one.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
        >>> exact = lln.reference.lln_attention(query, key, value, is_causal=True)
        >>> lln.lln_attention(query, key, value, is_causal=True).allclose(exact)
        True
    """
    check_inputs(query, key, value, same_length="is_causal=True" if is_causal else None)
    paddings: dict[str, Any] = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
    matched = match_moments(
        query, key, matching=matching, scope=scope, is_causal=is_causal, form=form, centers=centers, **paddings
    )
    means = centers_of(query, key, form=form, centers=centers, is_causal=is_causal, **paddings)
    scale_q = broadcast_scale("alpha", alpha, matched[0], query, heads=query.shape[1]).to(query.dtype)
    scale_k = broadcast_scale("beta", beta, matched[1], key, heads=query.shape[1]).to(key.dtype)
    a, b = features(query, key, scale_q, scale_k, form, means)
    if key_weight is not None:
        b = b + read_key_weight(key_weight, query, key)[..., None].to(b.dtype)
    log_kernel = torch.logsumexp(a[:, :, :, None] + b[:, :, None], dim=-1)  # ln of exp(a_i) . exp(b_j), (B, H, N, M)
    allowed = allowed_pairs(query, key, key_padding_mask, is_causal)
    return (normalise(log_kernel, allowed) @ repeat_heads(value, query)).to(query.dtype)


@packed
def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    near: Near = "blocks",
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Softmax attention among near tokens, where only kept tokens count; i and j are their numbers, from 0 on.

    - `near="blocks"`: i attends to j where i // block_size = j // block_size;
    - `near="window"`: i attends to j from i - (block_size - 1) // 2 to i + block_size // 2: block_size tokens, fewer at
      the ends; with `is_causal=True` from i - block_size + 1 to i.

    Args:
        query, key, value, block_size, near, key_padding_mask, is_causal, cu_seqlens: as in
            `lln.block_diagonal_attention`.

    Returns:
        (B, H, N, Dv) in the dtype of the query.

    Raises:
        TypeError, ValueError: input that does not fit, or near is neither.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 9, 8)
        >>> output = lln.reference.block_diagonal_attention(query, key, value, block_size=9)
        >>> torch.equal(output, lln.reference.softmax_attention(query, key, value))
        True
    """
    check_block_size(block_size)
    check_choice("near", near, NEARS)
    check_inputs(query, key, value, same_length="block-diagonal attention")
    weights = _weights(query, key, key_padding_mask, is_causal, block_size=block_size, near=near)
    return (weights @ repeat_heads(value, query)).to(query.dtype)


@packed
@with_signature(Options)
def lln_diag_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
    """The average of LLN and block-diagonal attention (figure 3).

    Args:
        query, key, value, **options: as in `lln.lln_diag_attention`.

    Returns:
        (B, H, N, Dv) in the dtype of the query.

    Raises:
        TypeError, ValueError: as `lln_attention` and `block_diagonal_attention`.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 9, 8)
        >>> exact = lln.reference.lln_diag_attention(query, key, value, block_size=4)
        >>> lln.lln_diag_attention(query, key, value, block_size=4).allclose(exact, atol=1e-5)
        True
    """
    given: dict[str, Any] = dict(options)
    close_options, far_options = (
        {name: x for name, x in given.items() if name in kind.__annotations__} for kind in (NearOptions, FarOptions)
    )
    close = block_diagonal_attention(query, key, value, **close_options)
    far = lln_attention(query, key, value, **far_options)
    return (far + close) / 2


def attention_matrix(query: Tensor, key: Tensor, *, kind: Kind = "lln", **options: Any) -> Tensor:
    """The attention matrix, as what the attention makes of the identity.

    Args:
        query, key, kind: as in `lln.attention_matrix`.
        **options: those of the attention.

    Returns:
        (B, H, N, M).

    Raises:
        TypeError, ValueError: an unknown kind, and as the attention.

    Example:
        >>> query, key = torch.randn(2, 1, 2, 9, 8)
        >>> lln.reference.attention_matrix(query, key, kind="lln", form="unbiased").shape
        torch.Size([1, 2, 9, 9])
    """
    check_choice("kind", kind, KINDS)
    attention: Callable[..., Tensor] = {
        "softmax": softmax_attention,
        "lln": lln_attention,
        "block_diagonal": block_diagonal_attention,
        "lln_diag": lln_diag_attention,
    }[kind]
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], key.shape[2])
    return attention(query, key, identity, **options)


def _weights(
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    block_size: int | None = None,
    near: Near = "blocks",
) -> Tensor:
    """The matrix of softmax attention, with `block_size` that of near tokens."""
    scores = query @ repeat_heads(key, query).mT / math.sqrt(query.shape[-1])
    allowed = allowed_pairs(query, key, key_padding_mask, is_causal)
    if block_size is not None:
        _, keep = read_paddings(query, key, key_padding_mask, None)
        kept = kept_tokens(keep, query)
        number = kept.cumsum(dim=1) - 1  # of kept tokens
        i, j = number[:, None, :, None], number[:, None, None, :]
        if near == "blocks":
            is_near = i // block_size == j // block_size
        elif is_causal:
            is_near = (i - block_size < j) & (j <= i)
        else:
            is_near = (i - (block_size - 1) // 2 <= j) & (j <= i + block_size // 2)
        allowed = allowed & is_near & kept[:, None, :, None]  # a token that is not kept lies in no block or window
    return normalise(scores, allowed)
