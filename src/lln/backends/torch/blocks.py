"""Softmax attention inside consecutive blocks of kept tokens, for what is near, beside LLN attention.

Blocks count kept tokens only, so that padding on the left, on the right or in between moves no block boundary: kept
tokens are moved to the front and back again. A token that is not kept lies in no block and gets zeros.

Shapes: B batch, H heads, D features of a head; n blocks of C tokens.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from lln.backends.torch.recompute import Attention, Inputs, Tensors
from lln.backends.torch.summary import mask_value, repeat_heads, sum_groups
from lln.checks import is_readable
from lln.masks import fill_padding, front_order, kept_tokens, take_tokens
from lln.matching.moments import chunks, piece_tokens
from lln.precision import accumulator, in_full_precision


def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    *,
    block_size: int,
    is_causal: bool,
    with_lse: bool = False,
) -> Tensors:
    """Softmax attention inside consecutive blocks of kept tokens; `with_lse`: and the log-sum-exp of its scores,
    (B, H, N, 1), with 0 for a token that is not kept."""
    if query.shape[2] < block_size:
        block_size = query.shape[2]
    options: dict[str, Any] = {"block_size": block_size, "is_causal": is_causal}
    forward = partial(_forward, **options, with_lse=with_lse)
    traced, backward = partial(_traced, **options, with_lse=with_lse), partial(_backward, **options)
    return Attention(traced, forward, backward, is_causal)(query, key, value, keep)


def cut_blocks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Tokens (B, H, tokens, features) in blocks (B, H, n, size, features), the last one filled up."""
    batch, heads, tokens, features = x.shape
    number = (tokens + size - 1) // size
    return pad(x, (0, 0, 0, number * size - tokens), value=fill).reshape(batch, heads, number, size, features)


def join_blocks(x: Tensor, tokens: int) -> Tensor:
    """The first tokens of blocks; a slice would make a compiler specialise on whether the last block is full."""
    return pad(x.flatten(2, 3), (0, 0, 0, tokens - x.shape[2] * x.shape[3]))


def _traced(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *, block_size: int, is_causal: bool, with_lse: bool
) -> Tensors:
    """All blocks at once."""
    tokens = query.shape[2]
    order = None if keep is None else front_order(keep)
    if order is not None and keep is not None:
        query, key, value = (take_tokens(x, order) for x in (query, key, value))
        keep = keep.gather(1, order)
    q, k, v = _in_accumulator(query, key, value, keep)
    q, k, v = (cut_blocks(x, block_size) for x in (q, k, v))
    allowed = cut_blocks(kept_tokens(keep, query)[:, None, :, None], block_size).mT  # (B, 1, n, 1, C)
    scores = _scores(q, k, allowed, is_causal)
    weights = torch.softmax(scores, dim=-1)
    outputs = [join_blocks(_mix_past(weights, v) if is_causal else weights @ v, tokens)]
    if with_lse:
        outputs.append(join_blocks(scores.logsumexp(dim=-1, keepdim=True), tokens))
    if order is None or keep is None:
        return tuple(outputs)
    back = order.argsort(dim=1)
    return tuple([take_tokens(fill_padding(x, keep), back) for x in outputs])


def _scores(q: Tensor, k: Tensor, allowed: Tensor | None, is_causal: bool) -> Tensor:
    """The scores of blocks q and k (..., C, D), masked for keys that are not allowed (..., 1, C)."""
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.mT
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        allowed = past if allowed is None else allowed & past
    return scores if allowed is None else mask_scores(scores, allowed)


def mask_scores(scores: Tensor, allowed: Tensor) -> Tensor:
    """-inf for keys that are not allowed, so that a row of which all allowed scores are -inf becomes NaN.

    `mask_value` in a row without any allowed key, which would become NaN too.
    """
    has_any = allowed.any(dim=-1, keepdim=True)
    fill = torch.zeros_like(has_any, dtype=scores.dtype).masked_fill(~has_any, mask_value(scores.dtype))
    return torch.where(allowed, scores, fill.masked_fill(has_any, -torch.inf))


def _mix_past(weights: Tensor, v: Tensor) -> Tensor:
    """The values v (..., C, V) weighed by a lower triangle (..., C, C), without NaN or infinities in earlier rows.

    In a plain product they would: a later value weighs 0, yet 0 times NaN is NaN.
    """
    finite = v.detach().isfinite()
    return weights @ v.where(finite, 0.0) + _running_nonfinite(v, finite)


def _running_nonfinite(v: Tensor, finite: Tensor) -> Tensor:
    """The sum of the values up to each row that are not finite, 0 where there is none."""
    return v.detach().where(~finite, 0.0).cumsum(dim=-2)


def _in_accumulator(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    groups, dtype = query.shape[1] // key.shape[1], accumulator(query.dtype)
    q, k, v = (fill_padding(x.to(dtype), keep) for x in (query, key, value))
    return q, repeat_heads(k, groups), repeat_heads(v, groups)


class _Part:
    """Some blocks of the kept tokens: where to read them, and where what comes of them belongs."""

    def __init__(self, part: slice, order: Tensor | None, keep: Tensor | None) -> None:
        self.part = part
        self.order = None if order is None else order[:, part]
        self.keep = None if keep is None or self.order is None else keep.gather(1, self.order)

    def read(self, x: Tensor) -> Tensor:
        return x[:, :, self.part] if self.order is None else take_tokens(x, self.order)

    def blocks(self, size: int, *tensors: Tensor) -> list[Tensor]:
        return [torch.unflatten(x, 2, (-1, size)) for x in tensors]

    def allowed(self, size: int) -> Tensor | None:
        """The kept keys of each block, (B, 1, n, 1, size)."""
        return None if self.keep is None else torch.unflatten(self.keep, 1, (-1, size))[:, None, :, None]

    def write(self, target: Tensor, x: Tensor) -> None:
        if self.order is None:
            target[:, :, self.part] = x
        else:
            index = self.order[:, None, :, None].expand_as(x)
            target.scatter_(2, index, fill_padding(x, self.keep).to(target.dtype))


def _parts(like: Tensor, keep: Tensor | None, *, block_size: int, width: int) -> Iterator[_Part]:
    """Whole blocks, as many at a time as fit into a piece of `width` entries a token, then the rest of the tokens."""
    tokens = like.shape[2]
    size = max(1, piece_tokens(*like.shape[:2], width, device=like.device) // block_size) * block_size
    order = None if keep is None else front_order(keep)
    whole = tokens // block_size * block_size
    for part in chunks(whole, size) if whole else ():
        yield _Part(part, order, keep)
    if whole < tokens:
        yield _Part(slice(whole, tokens), order, keep)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *, block_size: int, is_causal: bool, with_lse: bool
) -> tuple[Tensors, Tensors]:
    output = query.new_empty(*query.shape[:3], value.shape[3], dtype=accumulator(query.dtype))
    lse = query.new_empty(*query.shape[:3], 1, dtype=output.dtype) if with_lse else None
    for part in _parts(query, keep, block_size=block_size, width=max(query.shape[3], value.shape[3])):
        q, k, v = _in_accumulator(part.read(query), part.read(key), part.read(value), part.keep)
        size = min(block_size, q.shape[2])
        if lse is not None:
            of_q, of_k = part.blocks(size, q, k)
            scores = _scores(of_q, of_k, part.allowed(size), is_causal)
            part.write(lse, scores.logsumexp(dim=-1, keepdim=True).flatten(2, 3))
        is_spoilt = is_readable(every := q.isfinite().all() & k.isfinite().all()) and not bool(every)
        mask = None
        if part.keep is not None and not is_causal:  # in causal blocks what is not kept comes after all that is
            mask = torch.zeros_like(part.keep, dtype=q.dtype).masked_fill_(~part.keep, mask_value(q.dtype))
            mask = mask[:, None, :, None].expand(-1, q.shape[1], -1, -1).reshape(q.shape[0], -1, size, 1).mT
        shape = q.shape[:3]
        q, k, v = (x.reshape(x.shape[0], -1, size, x.shape[3]) for x in (q, k, v))
        nonfinite = None
        if is_causal and not (is_readable(every := k.isfinite().all() & v.isfinite().all()) and bool(every)):
            # A product with a weight of 0 would spoil earlier rows. A key that is not finite spoils all rows with it.
            # Clones keep the strides, on which it depends how a product is rounded.
            nonfinite_key = ~k.isfinite().all(dim=-1, keepdim=True)
            k, v = k.clone().masked_fill_(nonfinite_key, 0.0), v.clone().masked_fill_(nonfinite_key, torch.nan)
            finite = v.isfinite()
            nonfinite = _running_nonfinite(v, finite)
            v.masked_fill_(~finite, 0.0)
        mixed = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        if is_spoilt:  # torch's function gives zeros for a row of which all scores are -inf
            allowed = None if mask is None else mask == 0
            highest = _scores(q, k, allowed, is_causal).amax(dim=-1, keepdim=True)
            mixed = mixed.masked_fill(highest == -torch.inf, torch.nan)
        part.write(output, (mixed if nonfinite is None else mixed + nonfinite).view(*shape, -1))
    return (output,) if lse is None else (output, lse), ()


@in_full_precision
def _gradients(
    gradient: Tensor,
    gradient_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    *,
    block_size: int,
    is_causal: bool,
) -> Tensors:
    """The gradients of query, key and value, from the attention matrices P computed once more.

    dS = P * (g Vᵀ - rowsum) with rowsum such that each row of dS sums to zero, or to the gradient of its log-sum-exp;
    dq = dS k, dk = dSᵀ q, dV = Pᵀ g.
    """
    groups, scale = query.shape[1] // key.shape[1], query.shape[3] ** -0.5
    found = [torch.empty_like(x) for x in (query, key, value)]
    for part in _parts(query, keep, block_size=block_size, width=max(query.shape[3], value.shape[3], block_size)):
        q, k, v = _in_accumulator(part.read(query), part.read(key), part.read(value), part.keep)
        g = fill_padding(part.read(gradient).to(q.dtype), part.keep)
        size = min(block_size, q.shape[2])
        q, k, v, g = part.blocks(size, q, k, v, g)
        P = torch.softmax(_scores(q, k, part.allowed(size), is_causal), dim=-1)
        d_value = P.mT @ g
        d_scores = (g @ v.mT).mul_(P)
        row = d_scores.sum(dim=-1, keepdim=True)
        if gradient_lse is not None:
            row -= part.blocks(size, fill_padding(part.read(gradient_lse), part.keep))[0]
        d_scores.addcmul_(P, row, value=-1).mul_(scale)
        for target, x in zip(found, (d_scores @ k, d_scores.mT @ q, d_value), strict=True):
            x = x.flatten(2, 3)
            part.write(target, x if target is found[0] else sum_groups(x, groups))
    return tuple(found)


def _backward(
    inputs: Inputs,
    others: Tensors,
    gradients: Tensors,
    wanted: Sequence[bool],
    *,
    block_size: int,
    is_causal: bool,
) -> Sequence[Tensor | None]:
    gradient, gradient_lse = gradients if len(gradients) == 2 else (gradients[0], None)
    return *_gradients(gradient, gradient_lse, *inputs, block_size=block_size, is_causal=is_causal), None
