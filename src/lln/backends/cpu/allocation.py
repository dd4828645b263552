"""Tensors as the C code reads and writes them: rows of features are contiguous."""

import torch
from torch import Tensor

from lln.backends.base import empty_rows


def as_rows(x: Tensor) -> Tensor:
    """A tensor with contiguous rows, or a copy of it that has them."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def allocate_results(
    query: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    with_lln: bool,
    is_causal: bool,
    form: str,
    center_query: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for what `forward` returns, with copies of the given alpha and beta: no op returns its arguments.

    The output has tokens and heads in memory as the query has them: no copy where heads are joined.
    """
    batch, heads, tokens, width = query.shape
    value_width = value.shape[3]
    matched = (batch, heads, tokens if is_causal else 1) if with_lln else (0,)
    kept = width if with_lln and not is_causal else 0
    by_means = form == "decomposed" and center_query is None
    return (
        empty_rows(query, value_width),
        _empty_floats(query, matched) if alpha is None else alpha.clone(),
        _empty_floats(query, matched) if beta is None else beta.clone(),
        _empty_floats(query, (batch, heads, 4 if by_means else 2, kept)),
        _empty_floats(query, (batch, heads, kept, value_width)),
        _empty_floats(query, (batch, heads, tokens) if with_lse else (0,)),
    )


def allocate_gradients(
    query: Tensor, key: Tensor, value: Tensor, keep_key: Tensor | None, grad_scales: bool, grad_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors for what `backward` returns: zeros where padding gets no gradient, else empty."""
    grads = [empty_rows(x, x.shape[3]) for x in (query, key, value)]
    if keep_key is not None:
        for grad in grads:
            grad.zero_()
    batch, heads, tokens, _ = query.shape
    wanted = ((tokens, grad_scales), (key.shape[2], grad_scales), (key.shape[2], grad_weight))
    shapes = ((batch, heads, n) if is_wanted else (0,) for n, is_wanted in wanted)
    others = [query.new_zeros(shape, dtype=torch.float32) for shape in shapes]
    return grads[0], grads[1], grads[2], others[0], others[1], others[2]


def _empty_floats(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)
