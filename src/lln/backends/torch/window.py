"""Softmax attention of each kept token to the `block_size` kept tokens around it, its own included.

By rank among the kept tokens, i attends to j from i - left to i + right with left + right + 1 = block_size; a causal
window ends at i. Kept tokens are moved to the front and back again, as for blocks; a token that is not kept gets zeros.
A tile of queries meets the keys from `left` before it to `right` after it, so time and memory grow linearly.

Shapes: B batch, H heads, D features of a head, V value width; n tiles of T queries and the S = T + left + right keys
that they may attend to.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.backends.torch.blocks import mask_scores
from lln.backends.torch.recompute import Attention, Inputs, Tensors
from lln.backends.torch.summary import repeat_heads
from lln.checks import is_readable
from lln.masks import fill_padding, front_order, kept_tokens, take_tokens
from lln.matching.moments import chunks, piece_tokens
from lln.precision import accumulator, in_full_precision

# Queries of a tile for narrow windows: with fewer, most of what is multiplied would be the keys around them.
SMALLEST_TILE = 32


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    *,
    block_size: int,
    is_causal: bool,
    with_lse: bool = False,
) -> Tensors:
    """Softmax attention of each kept token to the `block_size` kept tokens around it, or up to it if causal; with_lse:
    and the log-sum-exp of its scores, (B, H, N, 1), with 0 for a token that is not kept."""
    right = 0 if is_causal else block_size // 2
    # No key is further away than the sequence is long.
    reach: dict[str, Any] = {x: min(n, query.shape[2]) for x, n in (("left", block_size - 1 - right), ("right", right))}
    attend = partial(_window, **reach, with_lse=with_lse)
    attention = Attention(attend, lambda *inputs: (attend(*inputs), ()), partial(_backward, **reach), is_causal)
    if keep is None:
        return attention(query, key, value, None)
    order = front_order(keep)
    query, key, value = (take_tokens(x, order) for x in (query, key, value))
    kept = keep.gather(1, order)
    query = fill_padding(query, kept)  # 0 times NaN would reach gradients
    back = order.argsort(dim=1)
    return tuple([take_tokens(fill_padding(x, kept), back) for x in attention(query, key, value, kept)])


def _window(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *, left: int, right: int, with_lse: bool
) -> Tensors:
    """All tokens, some at a time, with kept ones in front."""
    parts = []
    for part in _parts(query, value, left, right):
        around = slice(max(part.start - left, 0), min(part.stop + right, query.shape[2]))
        options: dict[str, Any] = {"before": part.start - around.start, "left": left, "right": right}
        kept = None if keep is None else keep[:, around]
        tokens = (query[:, :, part], key[:, :, around], value[:, :, around])
        parts.append(_tiles(*tokens, kept, with_lse=with_lse, **options))
    return parts[0] if len(parts) == 1 else tuple([torch.cat(x, dim=2) for x in zip(*parts, strict=True)])


def _parts(query: Tensor, value: Tensor, left: int, right: int) -> list[slice]:
    width = max(query.shape[3], value.shape[3], left + right + SMALLEST_TILE)
    return list(chunks(query.shape[2], piece_tokens(*query.shape[:2], width, device=query.device)))


def _tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    *,
    before: int,
    left: int,
    right: int,
    with_lse: bool,
) -> Tensors:
    """Attention of some tokens to keys of which `before` come before them."""
    tokens, dtype = query.shape[2], accumulator(query.dtype)
    groups, size = query.shape[1] // key.shape[1], max(left + right + 1, SMALLEST_TILE)
    size = min(size, tokens)
    tiles = (tokens + size - 1) // size
    span = size + left + right
    q = torch.unflatten(pad(query.to(dtype), (0, 0, 0, tiles * size - tokens)), 2, (tiles, size))
    # Keys from `left` before the first query to `right` after the last, whether there are any or not.
    missing = (left - before, tiles * size + left + right - (left - before) - key.shape[2])
    # Contiguous, as a copy without what is not finite is: products of other strides are rounded in another way.
    k, v = (
        pad(repeat_heads(fill_padding(x.to(dtype), keep), groups), (0, 0, *missing)).unfold(2, span, size).contiguous()
        for x in (key, value)
    )  # (B, H, n, D, S)
    there = pad(kept_tokens(keep, key), missing).unfold(1, span, size)[:, None, :, None]  # (B, 1, n, 1, S)
    row, column = torch.arange(size, device=q.device)[:, None], torch.arange(span, device=q.device)
    allowed = there & (column >= row) & (column <= row + left + right)
    # What is masked weighs 0, yet 0 times NaN is NaN, here and in gradients: what is not finite is replaced by 0, and
    # NaN is put in the rows that attend to it.
    finite_key, finite_value = k.detach().isfinite(), v.detach().isfinite()
    is_finite = is_readable(every := finite_key.all() & finite_value.all()) and bool(every)
    scores = (q * query.shape[3] ** -0.5) @ (k if is_finite else k.where(finite_key, 0.0))
    if not is_finite:
        scores = scores.masked_fill(~finite_key.all(dim=-2, keepdim=True), torch.nan)
    scores = mask_scores(scores, allowed)
    weights = torch.softmax(scores, dim=-1)
    if is_finite:
        output = weights @ v.mT
    else:
        output = weights.masked_fill(~allowed, 0.0) @ v.where(finite_value, 0.0).mT
        output = output.masked_fill(allowed.to(dtype) @ (~finite_value).to(dtype).mT > 0, torch.nan)
    outputs = (output, scores.logsumexp(dim=-1, keepdim=True)) if with_lse else (output,)
    return tuple([x.flatten(2, 3)[:, :, :tokens] for x in outputs])


@in_full_precision
def _gradients(
    gradient: Tensor, others: Tensors, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, **options: Any
) -> Tensors:
    """The gradients of query, key and value, from the attention of some tokens at a time computed once more."""
    left, right = options["left"], options["right"]
    found = [torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (query, key, value)]
    for part in _parts(query, value, left, right):
        around = slice(max(part.start - left, 0), min(part.stop + right, query.shape[2]))
        places = (part, around, around)
        with torch.enable_grad():
            q, k, v = (x[:, :, s].detach().requires_grad_() for x, s in zip((query, key, value), places, strict=True))
            kept = None if keep is None else keep[:, around]
            before = part.start - around.start
            outputs = _tiles(q, k, v, kept, before=before, with_lse=bool(others), **options)
            of_part = [x[:, :, part].to(outputs[0].dtype) for x in (gradient, *others)]
            grads = torch.autograd.grad(outputs, (q, k, v), of_part)
        for total, place, grad in zip(found, places, grads, strict=True):
            total[:, :, place] += grad
    return tuple(x.to(y.dtype) for x, y in zip(found, (query, key, value), strict=True))


def _backward(
    inputs: Inputs, others: Tensors, gradients: Tensors, wanted: Sequence[bool], **options: Any
) -> Sequence[Tensor | None]:
    return *_gradients(gradients[0], gradients[1:], *inputs, **options), None
