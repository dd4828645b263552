"""The next tokens of a state: causal attention that starts from the memory of the tokens before.

Shapes: B batch, H heads, H_k key heads, N new tokens, D features, V value width, C block size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lln.backends.torch.blocks import block_diagonal_attention, mask_scores
from lln.backends.torch.causal import causal_attention
from lln.backends.torch.summary import KeySummary, attend_summary, merge, repeat_heads, summarize
from lln.backends.torch.window import window_attention
from lln.masks import fill_padding, front_order, kept_tokens, take_tokens
from lln.matching.curves import Form
from lln.matching.moments import PrefixSums, prefix_moments
from lln.precision import accumulator
from lln.recurrence import Advance, Memory, Recurrence


def advance(recurrence: Recurrence) -> Advance:
    """The outputs of the next tokens, and the memory after them; nothing is overwritten."""
    if recurrence.centers is not None:
        recurrence = centered_recurrence(recurrence, *recurrence.centers)
    far, summary, sums = _far(recurrence)
    near: Tensor | None = None
    lse: Tensor | None = None
    recent: tuple[Tensor | None, Tensor | None] = (None, None)
    memory = recurrence.memory
    if memory.recent_key is not None and memory.recent_value is not None:
        near, lse, recent = _near(recurrence, memory.recent_key, memory.recent_value)
    after = Memory(*summary, sums.tokens, sums.query, sums.key, *recent)
    if recurrence.apart:
        return Advance(far, near, after, lse)
    return Advance((far if near is None else (far + near) / 2).to(recurrence.value.dtype), None, after)


def centered_recurrence(recurrence: Recurrence, center_query: Tensor, center_key: Tensor) -> Recurrence:
    """The decomposed form as the unbiased one of dq and dk."""
    near_query, near_key = recurrence.near_query, recurrence.near_key
    if recurrence.memory.recent_key is not None and near_query is None:
        near_query, near_key = recurrence.query, recurrence.key
    dtype = recurrence.memory.mass.dtype
    inputs = (recurrence.query.to(dtype), recurrence.key.to(dtype), recurrence.key_weight)
    query, key, weight = centered_inputs(*inputs, center_query, center_key)
    recurrence = recurrence._replace(query=query, key=key, key_weight=weight, form="unbiased", centers=None)
    return recurrence._replace(near_query=near_query, near_key=near_key)


def centered_inputs(
    query: Tensor, key: Tensor, key_weight: Tensor | None, center_query: Tensor, center_key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and the weights m_q . dk / sqrt(D), with which the decomposed form is the unbiased one: see `lln.forms`.

    m_q . k is larger by the same number for all keys of a head, which softmax cancels.
    """
    query, key = query - center_query[:, :, None], key - center_key[:, :, None]
    by_group = torch.unflatten(center_query, 1, (key.shape[1], -1))  # the query heads of each key head
    weight = (key @ by_group.mT).mT.flatten(1, 2) * query.shape[3] ** -0.5
    return query, key, weight if key_weight is None else weight + key_weight


def newest(
    recent: tuple[Tensor, Tensor], count: Tensor, later: tuple[Tensor, Tensor], place: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """The recent tokens after `total` (B,) have come: of `recent`, or where they came after `count`, of `later`.

    `place` (B, places) is where in `later` the first token after `count` is, the second, ...
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


def merge_memories(first: Memory, later: Memory) -> Memory:
    """The memory after the tokens of both, of which `later` began with an empty one."""
    summary = merge(KeySummary(first.mass, first.values), KeySummary(later.mass, later.values))
    total, recent = first.num_tokens + later.num_tokens, (first.recent_key, first.recent_value)
    if first.recent_key is not None and first.recent_value is not None:
        assert later.recent_key is not None
        assert later.recent_value is not None
        size = first.recent_key.shape[2]
        # The place of the later token t is t % C, and only the last C are read.
        places = torch.arange(size, device=total.device).expand(len(total), size)
        mine, theirs = (first.recent_key, first.recent_value), (later.recent_key, later.recent_value)
        recent = newest(mine, first.num_tokens, theirs, places, total)
    sums = first.query_sums + later.query_sums, first.key_sums + later.key_sums
    return Memory(*summary, total, *sums, *recent)


def _far(recurrence: Recurrence) -> tuple[Tensor, KeySummary, PrefixSums]:
    query, key, value, memory, keep = recurrence[:5]
    past = PrefixSums(memory.num_tokens, memory.query_sums, memory.key_sums)
    moments, sums = prefix_moments(query, key, keep, past)
    matched: tuple[Tensor | None, Tensor | None] = (None, None)
    if recurrence.alpha is None or recurrence.beta is None:
        matched = moments.scales(head_dim=query.shape[3], matching=recurrence.matching, form=recurrence.form)
    alpha, beta = (
        given[..., None, None] if given is not None else found[..., None]  # type: ignore[index]
        for given, found in zip((recurrence.alpha, recurrence.beta), matched, strict=True)
    )
    summary = KeySummary(memory.mass, memory.values)
    weight = key_weight_of(query, key, keep, beta, recurrence.key_weight, form=recurrence.form)
    if query.shape[2] == 1:  # a third of the time of a causal chunk
        summary = merge(summary, summarize(key, value, beta, keep, weight, heads=query.shape[1]))
        return attend_summary(query, alpha, summary), summary, sums
    far, summary = causal_attention(query, key, value, alpha, beta, keep, summary, weight)
    return far, summary, sums


def key_weight_of(
    query: Tensor, key: Tensor, keep: Tensor | None, beta: Tensor, given: Tensor | None, *, form: Form
) -> Tensor | None:
    """Log-weights (B, H, N) of the keys: the given ones, in other forms than the paper's less logsumexp_l(beta k)."""
    if form == "paper":
        return given
    key = fill_padding(key, keep).to(beta.dtype)
    key = repeat_heads(key, query.shape[1] // key.shape[1])
    weight = -torch.logsumexp(key * beta, dim=-1)
    return weight if given is None else weight + given


def near_lse(recurrence: Recurrence) -> Tensor:
    """The log-sum-exp (B, H, N) of the scores of softmax attention among neighbours."""
    memory = recurrence.memory
    assert memory.recent_key is not None
    assert memory.recent_value is not None
    return _near(recurrence, memory.recent_key, memory.recent_value)[1]


def _near(
    recurrence: Recurrence, recent_key: Tensor, recent_value: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Softmax attention among neighbours, the log-sum-exp of its scores (B, H, N), and the recent tokens after it."""
    value, keep, count = recurrence.value, recurrence.keep, recurrence.memory.num_tokens
    query = recurrence.query if recurrence.near_query is None else recurrence.near_query
    key = recurrence.key if recurrence.near_key is None else recurrence.near_key
    size, is_window = recent_key.shape[2], recurrence.near == "window"
    slots, begun = torch.arange(size, device=count.device), (count % size)[:, None]
    if query.shape[2] == 1 and keep is None:
        new = (slots == begun)[:, None, :, None]
        recent = torch.where(new, key, recent_key), torch.where(new, value, recent_value)
        outside = slots > begun
        if is_window:
            outside = outside & (count < size)[:, None]
        return *_attend_recent(query, *recent, outside), recent
    kept = kept_tokens(keep, query)
    later = fill_padding(key, keep), fill_padding(value, keep)
    after = newest((recent_key, recent_value), count, later, front_order(kept), count + kept.sum(dim=1))
    attention: Callable[..., tuple[Tensor, ...]] = block_diagonal_attention
    before = slots < begun
    if is_window:  # from the oldest to the newest
        attention = window_attention
        before = slots + count[:, None] >= size
        order = (slots + count[:, None]) % size
        recent_key, recent_value = take_tokens(recent_key, order), take_tokens(recent_value, order)
    # What a block already holds, or a window looks back to, goes before the new tokens.
    near, lse = attention(
        torch.cat((query.new_zeros(*query.shape[:2], size, query.shape[3]), query), dim=2),
        torch.cat((recent_key, key), dim=2),
        torch.cat((recent_value, value), dim=2),
        torch.cat((before, kept), dim=1),
        block_size=size,
        is_causal=True,
        with_lse=True,
    )
    return near[:, :, size:], lse[:, :, size:, 0], after


def _attend_recent(query: Tensor, recent_key: Tensor, recent_value: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of one token to the recent ones that are not `outside` its block or window, (B, C)."""
    dtype = accumulator(query.dtype)
    groups = query.shape[1] // recent_key.shape[1]
    k, v = (repeat_heads(x.to(dtype), groups) for x in (recent_key, recent_value))
    outside = outside[:, None, None, :]
    scores = (query.to(dtype) * query.shape[3] ** -0.5) @ k.mT
    scores = mask_scores(scores, ~outside)
    values = v.masked_fill(outside.mT, 0.0)  # of a block that has ended: 0 times NaN is NaN
    return torch.softmax(scores, dim=-1) @ values, scores.logsumexp(dim=-1)
