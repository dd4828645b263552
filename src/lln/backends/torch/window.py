"""Softmax attention of each kept token to the `block_size` kept tokens around it, its own included.

By rank among the kept tokens, i sees j from i - left to i + right with left + right + 1 = block_size; a causal window
ends at i. Kept tokens are moved to the front and back again, as for blocks; a token that is not kept gets zeros. A tile
of queries meets the keys from `left` before it to `right` after it, so time and memory grow linearly.

Shapes: B batch, H heads, D features of a head, V value width; n tiles of T queries and the S = T + left + right keys
that they may see.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.backends.torch.recompute import Attention, Inputs, Tensors
from lln.backends.torch.summary import absent, repeat_heads
from lln.checks import known
from lln.masks import blank, front_order, kept_tokens, take_tokens
from lln.matching.moments import chunks, piece_tokens
from lln.precision import accumulator, in_full_precision

# Queries of a tile for narrow windows: with fewer, most of what is multiplied would be the keys around them.
SMALLEST_TILE = 32


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *, block_size: int, is_causal: bool
) -> Tensor:
    """Softmax attention of each kept token to the `block_size` kept tokens around it, or up to it if causal."""
    right = 0 if is_causal else block_size // 2
    # No key is further away than the sequence is long.
    reach: dict[str, int] = {x: min(n, query.shape[2]) for x, n in (("left", block_size - 1 - right), ("right", right))}
    options: dict[str, Any] = {**reach, "is_causal": is_causal}
    attention = Attention(
        lambda *inputs: (_window(*inputs, **options),),
        lambda *inputs: ((_window(*inputs, **options),), ()),
        partial(_backward, **options),
    )
    if keep is None:
        return attention(query, key, value, None)[0]
    order = front_order(keep)
    query, key, value = (take_tokens(x, order) for x in (query, key, value))
    kept = keep.gather(1, order)
    query = blank(query, kept)  # 0 times NaN would reach gradients
    output = attention(query, key, value, kept)[0]
    return take_tokens(blank(output, kept), order.argsort(dim=1))


def _window(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *, left: int, right: int, is_causal: bool
) -> Tensor:
    """All tokens, some at a time, with kept ones in front."""
    parts = []
    for part in _parts(query, value, left, right):
        around = slice(max(part.start - left, 0), min(part.stop + right, query.shape[2]))
        options: dict[str, Any] = {"before": part.start - around.start, "left": left, "right": right}
        kept = None if keep is None else keep[:, around]
        tokens = (query[:, :, part], key[:, :, around], value[:, :, around])
        parts.append(_tiles(*tokens, kept, is_causal=is_causal, **options))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


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
    is_causal: bool,
) -> Tensor:
    """Attention of some tokens to keys of which `before` come before them."""
    tokens, dtype = query.shape[2], accumulator(query.dtype)
    groups, size = query.shape[1] // key.shape[1], max(left + right + 1, SMALLEST_TILE)
    size = min(size, tokens)
    tiles = (tokens + size - 1) // size
    span = size + left + right
    q = torch.unflatten(pad(query.to(dtype), (0, 0, 0, tiles * size - tokens)), 2, (tiles, size))
    # Keys from `left` before the first query to `right` after the last, whether there are any or not.
    missing = (left - before, tiles * size + left + right - (left - before) - key.shape[2])
    k, v = (
        pad(repeat_heads(blank(x.to(dtype), keep), groups), (0, 0, *missing)).unfold(2, span, size)
        for x in (key, value)
    )  # (B, H, n, D, S)
    there = pad(kept_tokens(keep, key), missing).unfold(1, span, size)[:, None, :, None]  # (B, 1, n, 1, S)
    row, column = torch.arange(size, device=q.device)[:, None], torch.arange(span, device=q.device)
    allowed = there & (column >= row) & (column <= row + left + right)
    scores = (q * query.shape[3] ** -0.5) @ k
    weights = torch.softmax(scores.masked_fill(~allowed, absent(dtype)), dim=-1)
    if not is_causal:
        output = weights @ v.mT
    else:  # a later value weighs 0, yet 0 times NaN is NaN: values that are not finite are marked where they are seen
        finite = v.detach().isfinite()
        output = weights @ v.where(finite, 0.0).mT
        if not (known(every := finite.all()) and bool(every)):
            output = output.masked_fill(allowed.to(dtype) @ (~finite).to(dtype).mT > 0, torch.nan)
    return output.flatten(2, 3)[:, :, :tokens]


@in_full_precision
def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, **options: Any
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
            output = _tiles(q, k, v, kept, before=part.start - around.start, **options)
            grads = torch.autograd.grad(output, (q, k, v), gradient[:, :, part].to(output.dtype))
        for total, place, grad in zip(found, places, grads, strict=True):
            total[:, :, place] += grad
    return tuple(x.to(y.dtype) for x, y in zip(found, (query, key, value), strict=True))


def _backward(
    inputs: Inputs, others: Tensors, gradients: Tensors, wanted: Sequence[bool], **options: Any
) -> Sequence[Tensor | None]:
    return *_gradients(gradients[0], *inputs, **options), None
