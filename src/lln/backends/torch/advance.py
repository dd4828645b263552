"""The next tokens of a state: causal attention that starts from the memory of the tokens before.

Shapes: B batch, H heads, H_k key heads, N new tokens, D features, V value width, C block size.
"""

import torch
from torch import Tensor

from lln.backends.torch.blocks import block_diagonal_attention
from lln.backends.torch.causal import causal_attention
from lln.backends.torch.summary import KeySummary, absent, merge, recall, remember, repeat_heads
from lln.masks import blank, front_order, kept_tokens, take_tokens
from lln.moments import PrefixSums, prefix_moments
from lln.precision import accumulator
from lln.recurrence import Advance, Memory, Recurrence


def advance(recurrence: Recurrence) -> Advance:
    """The outputs of the next tokens, and the memory after them; nothing is overwritten."""
    query, key, value, keep, memory = recurrence[:5]
    far, summary, sums = _far(recurrence)
    near: Tensor | None = None
    recent: tuple[Tensor | None, Tensor | None] = (None, None)
    if memory.recent_key is not None and memory.recent_value is not None:
        near, recent = _near(query, key, value, keep, memory.num_tokens, memory.recent_key, memory.recent_value)
    after = Memory(*summary, sums.tokens, sums.query, sums.key, *recent)
    if recurrence.apart:
        return Advance(far, near, after)
    return Advance((far if near is None else (far + near) / 2).to(query.dtype), None, after)


def newest(
    recent: tuple[Tensor, Tensor], count: Tensor, later: tuple[Tensor, Tensor], place: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """The recent tokens after `total` (B,) have come: of `recent`, or where they came after `count`, of `later`.

    `place` (B, places) tells where in `later` to find the first token after `count`, the second, ...
    """
    size = recent[0].shape[2]
    slot = torch.arange(size, device=count.device)
    last = total[:, None] - 1
    token = last - (last - slot) % size  # the newest that belongs into each slot; below 0: none
    fresh = token - count[:, None]
    found = size + place.gather(1, (fresh % place.shape[1]).clamp(min=0))
    index = torch.where(fresh >= 0, found, slot)
    key, value = (take_tokens(torch.cat(pair, dim=2), index) for pair in zip(recent, later, strict=True))
    return key, value


def _far(recurrence: Recurrence) -> tuple[Tensor, KeySummary, PrefixSums]:
    query, key, value, keep, memory = recurrence[:5]
    past = PrefixSums(memory.num_tokens, memory.query_sums, memory.key_sums)
    moments, sums = prefix_moments(query, key, keep, past)
    matched: tuple[Tensor | None, Tensor | None] = (None, None)
    if recurrence.alpha is None or recurrence.beta is None:
        matched = moments.scales(head_dim=query.shape[3], matching=recurrence.matching)
    alpha, beta = (
        given[..., None, None] if given is not None else found[..., None]  # type: ignore[index]
        for given, found in zip((recurrence.alpha, recurrence.beta), matched, strict=True)
    )
    summary = KeySummary(memory.mass, memory.values)
    if query.shape[2] == 1:  # a third of the time of a causal chunk
        summary = merge(summary, remember(key, value, beta, keep, heads=query.shape[1]))
        return recall(query, alpha, summary), summary, sums
    far, summary = causal_attention(query, key, value, alpha, beta, keep, summary)
    return far, summary, sums


def _near(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    count: Tensor,
    recent_key: Tensor,
    recent_value: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Softmax attention inside blocks, and the recent tokens after it."""
    size = recent_key.shape[2]
    slots, begun = torch.arange(size, device=count.device), (count % size)[:, None]
    if query.shape[2] == 1 and keep is None:
        new = (slots == begun)[:, None, :, None]
        recent = torch.where(new, key, recent_key), torch.where(new, value, recent_value)
        return _attend_block(query, *recent, slots > begun), recent
    kept = kept_tokens(keep, query)
    # What the current block already holds goes before the new tokens.
    near = block_diagonal_attention(
        torch.cat((query.new_zeros(*query.shape[:2], size, query.shape[3]), query), dim=2),
        torch.cat((recent_key, key), dim=2),
        torch.cat((recent_value, value), dim=2),
        torch.cat((slots < begun, kept), dim=1),
        block_size=size,
        is_causal=True,
    )
    later = blank(key, keep), blank(value, keep)
    recent = newest((recent_key, recent_value), count, later, front_order(kept), count + kept.sum(dim=1))
    return near[:, :, size:], recent


def _attend_block(query: Tensor, recent_key: Tensor, recent_value: Tensor, outside: Tensor) -> Tensor:
    """Softmax attention of one token to the recent ones that are not `outside` its block, (B, C)."""
    dtype = accumulator(query.dtype)
    groups = query.shape[1] // recent_key.shape[1]
    k, v = (repeat_heads(x.to(dtype), groups) for x in (recent_key, recent_value))
    outside = outside[:, None, None, :]
    scores = (query.to(dtype) * query.shape[3] ** -0.5) @ k.mT
    weights = torch.softmax(scores.masked_fill(outside, absent(dtype)), dim=-1)
    return weights @ v.masked_fill(outside.mT, 0.0)  # of a block that has ended: 0 times NaN is NaN
