"""The mechanism: Linear Log-Normal attention (section 4 of the paper), its block-diagonal companion, and both together.

Shapes: B batch, H heads, N queries, M keys, D features of a head, Dv value width. Tensors are (B, H, N, D), as in
`torch.nn.functional.scaled_dot_product_attention`; key and value may have fewer heads, of which H is a multiple (GQA).

`key_padding_mask` is a (B, M) bool tensor with True = keep, or a (B,) integer tensor of lengths. What stands in padding
never reaches a kept token's result, and a sample without any kept key gives zeros. The result has the input's dtype;
sums run in at least float32. Under autocast, inputs and result have its dtype, as with SDPA.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from lln.checks import check_block_size, check_choice, check_inputs, check_scale
from lln.curves import MATCHINGS, Matching
from lln.kernels import dispatch, fused, plain
from lln.masks import blank_not_finite, read_paddings
from lln.moments import SCOPES, Scope, accumulator, autocast_is_on, check_causal_options, match_moments

Kind = Literal["lln", "lln_diag", "block_diagonal", "softmax"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Attention = TypeVar("Attention", bound=Callable[..., Tensor])


def _autocast_like_sdpa(attention: Attention) -> Attention:
    """Cast float inputs to the dtype of an active autocast, and compute in the dtypes chosen here."""

    @wraps(attention)
    def wrapped(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if not isinstance(query, Tensor) or not autocast_is_on(query.device.type):
            return attention(query, key, value, **options)
        device, dtype = query.device.type, torch.get_autocast_dtype(query.device.type)
        query, key, value = (
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
            for x in (query, key, value)
        )
        with torch.autocast(device, enabled=False):
            return attention(query, key, value, **options)

    return cast(Attention, wrapped)


@_autocast_like_sdpa
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
    """Linear Log-Normal attention in O(N D²) time and O(N D) memory (eq. 8):

        out_i = sum_j P_ij v_j        P_ij = exp(alpha q_i) . exp(beta k_j) / sum_m exp(alpha q_i) . exp(beta k_m)

    alpha and beta follow from the moments of query and key unless they are given (eq. 10), see `lln.match_moments`:
    positive numbers, or tensors of shape (), (H,), (B, H) or (B, H, tokens), which may require gradients.

    - `is_causal=True`: query i sees the keys up to i, and so do its statistics; needs N = M.
    - `query_padding_mask`: which queries count in the statistics; by default, when N = M, those of `key_padding_mask`.
    - `matching`: "variance", "entropy" or "linear"; `scope`: "sample" or "batch". See `lln.match_moments`.
    """
    return _lln(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        query_padding_mask=query_padding_mask,
        is_causal=is_causal,
        alpha=alpha,
        beta=beta,
        matching=matching,
        scope=scope,
    )


@_autocast_like_sdpa
def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention inside consecutive blocks of `block_size` kept tokens; N = M, and N may be any number.

    With `is_causal=True` a query sees the keys of its block up to its own.
    """
    return _block_diagonal(
        query, key, value, block_size=block_size, key_padding_mask=key_padding_mask, is_causal=is_causal
    )


@_autocast_like_sdpa
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
    """The paper's layer (figure 3): the average of LLN attention, for what is far, and block-diagonal attention, for
    what is near. Options as in `lln_attention` and `block_diagonal_attention`; needs N = M.
    """
    check_block_size(block_size)
    return _lln(
        query,
        key,
        value,
        block_size=block_size,
        key_padding_mask=key_padding_mask,
        query_padding_mask=None,
        is_causal=is_causal,
        alpha=alpha,
        beta=beta,
        matching=matching,
        scope=scope,
    )


def attention_matrix(
    query: Tensor,
    key: Tensor,
    *,
    kind: Kind = "lln",
    block_size: int = 64,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: Matching = "variance",
    scope: Scope = "sample",
) -> Tensor:
    """The explicit attention matrix (B, H, N, M) of one of our mechanisms or of softmax, for looking at.

    An attention is linear in its values, so its matrix is what it makes of the identity: the mechanism itself runs.
    It needs O(N M) memory; the rows of a sample without any kept key are zero.
    """
    check_choice("kind", kind, KINDS)
    check_inputs(query, key)
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], key.shape[2])
    masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
    settings: dict[str, Any] = {"alpha": alpha, "beta": beta, "matching": matching, "scope": scope}
    if kind == "lln":
        return lln_attention(query, key, identity, **masks, **settings)
    if kind == "lln_diag":
        return lln_diag_attention(query, key, identity, block_size=block_size, **masks, **settings)
    if alpha is not None or beta is not None:
        raise ValueError(f"alpha and beta belong to LLN attention, not to kind={kind!r}; leave them out")
    if kind == "block_diagonal":
        return block_diagonal_attention(query, key, identity, block_size=block_size, **masks)
    from lln.reference import softmax_attention

    return softmax_attention(query, key, identity, **masks)


def _lln(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int | None = None,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    is_causal: bool,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    matching: Matching,
    scope: Scope,
) -> Tensor:
    """LLN attention, or with `block_size` its mean with block-diagonal attention."""
    needs_same_length = "block-diagonal attention" if block_size else "is_causal=True" if is_causal else None
    check_inputs(query, key, value, same_length=needs_same_length)
    check_choice("matching", matching, MATCHINGS)
    check_choice("scope", scope, SCOPES)
    check_causal_options(is_causal, scope, query_padding_mask)
    keep_query, keep = read_paddings(query, key, key_padding_mask, query_padding_mask)
    if is_empty(query, key, value):
        return empty_attention(query, key, value)
    choice: dict[str, Any] = {"is_causal": is_causal, "block_size": block_size}
    is_fused = dispatch.why_not_fused(query, key, value, alpha=alpha, beta=beta, **choice) is None
    matched: tuple[Tensor | None, Tensor | None] = (None, None)
    if (alpha is None or beta is None) and not (is_fused and scope == "sample"):  # which matches while it computes
        matched = match_moments(
            query,
            key,
            matching=matching,
            scope=scope,
            key_padding_mask=key_padding_mask,
            query_padding_mask=query_padding_mask,
            is_causal=is_causal,
        )
    query_scale, key_scale = (
        None if given is found is None else broadcast_scale(name, given, found, tokens, heads=query.shape[1])
        for name, given, found, tokens in (("alpha", alpha, matched[0], query), ("beta", beta, matched[1], key))
    )
    if is_fused:
        choice |= {"keep_query": keep_query, "keep_key": keep, "matching": matching}
        return fused.attention(query, key, value, alpha=query_scale, beta=key_scale, **choice)
    assert query_scale is not None
    assert key_scale is not None
    query = blank_not_finite(query, keep_query)
    if is_causal:
        batch, heads, _, head_dim = query.shape
        memory = plain.empty_memory(batch, heads, head_dim, value.shape[3], like=query)
        far, _ = plain.causal_attention(query, key, value, query_scale, key_scale, keep, memory)
    else:
        far = plain.full_attention(query, key, value, query_scale, key_scale, keep)
    if block_size is None:
        return far.to(query.dtype)
    near = plain.block_diagonal_attention(query, key, value, keep, block_size=block_size, is_causal=is_causal)
    return far.add_(near).mul_(0.5).to(query.dtype)  # in place: at a million tokens each copy counts


def _block_diagonal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Block-diagonal attention."""
    check_block_size(block_size)
    check_inputs(query, key, value, same_length="block-diagonal attention")
    _, keep = read_paddings(query, key, key_padding_mask, None)
    if is_empty(query, key, value):
        return empty_attention(query, key, value)
    choice: dict[str, Any] = {"is_causal": is_causal, "block_size": block_size}
    if dispatch.why_not_fused(query, key, value, alpha=None, beta=None, **choice) is None:
        return fused.attention(query, key, value, keep_query=None, keep_key=keep, with_lln=False, **choice)
    return plain.block_diagonal_attention(query, key, value, keep, **choice).to(query.dtype)


def is_empty(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is nothing to compute: no sample, no query, no key or no value feature."""
    return 0 in (query.shape[0], query.shape[2], key.shape[2], value.shape[3])


def empty_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output where there is nothing to compute, zeros (B, H, N, Dv), with gradients of zero for all inputs."""
    zero = sum(x[..., :0].sum() for x in (query, key, value))  # sums of nothing, which also NaN does not reach
    return query.new_zeros(*query.shape[:3], value.shape[3]) + zero


def broadcast_scale(
    name: str, given: float | Tensor | None, matched: Tensor | None, tokens: Tensor, *, heads: int
) -> Tensor:
    """The alpha or beta that was given, or else the matched one, as a tensor that broadcasts to (B, H, tokens, 1)."""
    check_scale(name, given, batch=tokens.shape[0], heads=heads, tokens=tokens.shape[2])
    scale = matched if given is None else given
    scale = torch.as_tensor(scale, dtype=accumulator(tokens.dtype), device=tokens.device)
    if scale.dim() == 3:
        return scale[..., None]
    batch_and_heads = scale if scale.dim() == 2 else scale.reshape(1, -1)
    return batch_and_heads[..., None, None]
