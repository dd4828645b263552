"""One more token of a state: statistics, memory and output of a head in one program.

Shapes: F features of LLN attention, D of softmax attention among neighbours, V value width, C recent tokens.
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import ABSENT, row_flags
from lln.backends.triton.kernels.prefix import entries_of, scales_of, sigma_of


@triton.jit
def with_token(sums, x, kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of a head, which are in memory, with the entries x (1, WIDTH) of a token."""
    origin = tl.sum(tl.where((tl.arange(0, BLOCK) == 0)[None, :], x, 0.0), axis=1)
    mean, within = entries_of(x, origin, WIDTH, BLOCK)
    mean, within = tl.sum(mean, axis=0), tl.sum(within, axis=0).to(tl.float64)
    mean, within = tl.where(kept, mean, 0.0), tl.where(kept, within, 0.0)
    return tl.load(sums) + mean, tl.load(sums + 1) + mean * mean, tl.load(sums + 2) + within


@triton.jit
def store_sums(sums, mean, square, within):
    tl.store(sums, mean)
    tl.store(sums + 1, square)
    tl.store(sums + 2, within)


@triton.jit
def load_token(x, batch, head, is_kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The one token of a head, or zeros if `is_kept` is 0."""
    columns = tl.arange(0, BLOCK)
    pointer = x.pointer + batch * x.batch + head * x.head + columns
    return tl.load(pointer, mask=columns < WIDTH * is_kept, other=0.0)


@triton.jit
def ring_scores(
    recent_key,
    ring,
    first,
    query,
    recent,
    slot,
    count,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_WINDOW: tl.constexpr,
):
    """Some slots of the ring of recent tokens, which of them the token sees, and its scores there."""
    slots = first + tl.arange(0, BLOCK_N)
    seen = (slots < recent) & (slots != slot) & (slots < count)
    if not IS_WINDOW:
        seen = seen & (slots < slot)
    columns = tl.arange(0, BLOCK_D)
    mask = seen[:, None] & (columns < D)[None, :]
    old = tl.load(recent_key + (ring + slots)[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return slots, seen, tl.where(seen, tl.sum(old * query[None, :], axis=1), ABSENT)


@triton.jit(do_not_specialize=("heads", "recent"))
def step_kernel(
    query,
    key,
    value,
    keep,
    mass,
    values,
    num_tokens,
    query_sums,
    key_sums,
    alpha,
    beta,
    weight,
    curve,
    near_query,
    near_key,
    recent_key,
    recent_value,
    output,
    near_output,
    near_lse,
    heads,
    groups,
    recent,
    near_scale,
    F: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    IS_WINDOW: tl.constexpr,
    NORMALIZED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """The memory with one more token in it, and the token's output.

    `keep`, the scales, `weight`, the ring of recent tokens, `near_output` and `near_lse` may be None; without
    `near_output` the output is the mean of both branches.
    """
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row_head = head // groups
    count = tl.load(num_tokens + batch)
    is_kept = (count * 0 + 1).to(tl.int32)
    if keep is not None:
        is_kept = tl.load(keep + batch).to(tl.int32)
    kept = is_kept > 0
    features = tl.arange(0, BLOCK_F)
    there = features < F
    q = load_token(query, batch, head, 1, F, BLOCK_F).to(tl.float32)
    k = load_token(key, batch, row_head, is_kept, F, BLOCK_F).to(tl.float32)
    # Statistics of the tokens so far, and what they are matched to.
    counted_q = tl.where(features < F * is_kept, q, 0.0)
    mean_q, square_q, within_q = with_token(query_sums + pair * 3, counted_q[None, :], kept, F, BLOCK_F)
    mean_k, square_k, within_k = with_token(key_sums + pair * 3, k[None, :], kept, F, BLOCK_F)
    old_mass = tl.load(mass + pair * F + features, mask=there, other=ABSENT)
    # Several threads have read the same numbers; one of them overwrites each below, when all have.
    tl.debug_barrier()
    store_sums(query_sums + pair * 3, mean_q, square_q, within_q)
    store_sums(key_sums + pair * 3, mean_k, square_k, within_k)
    tokens = count + is_kept.to(tl.int64)
    number = tl.maximum(tokens, 1).to(tl.float64)
    sigma_q = sigma_of(mean_q, square_q, within_q, number)
    sigma_k = sigma_of(mean_k, square_k, within_k, number)
    own_alpha, own_beta = scales_of(
        sigma_q,
        sigma_k,
        tokens.to(tl.float32),
        curve,
        ROWS,
        COLUMNS,
        NARROW,
        F,
    )
    if alpha is not None:
        own_alpha = tl.load(alpha + pair)
    if beta is not None:
        own_beta = tl.load(beta + pair)
    # The memory with the token in it.
    logs = k * own_beta
    shift = 0.0
    if NORMALIZED:
        top = tl.max(tl.where(there, logs, ABSENT), axis=0)
        shift = -top - tl.log(tl.sum(tl.where(there, tl.exp(logs - top), 0.0), axis=0))
    if weight is not None:
        shift += tl.load(weight + pair)
    logs = logs + shift + tl.sum(row_flags(k[None, :]), axis=0)
    logs = tl.where(features < F * is_kept, logs, ABSENT)
    high = tl.maximum(old_mass, logs)
    new_mass = high + tl.log(tl.exp(old_mass - high) + tl.exp(logs - high))
    new_mass = tl.where(kept, new_mass, old_mass)
    tl.store(mass + pair * F + features, new_mass, mask=there)
    share = tl.where(kept, tl.exp(old_mass - new_mass), 1.0)
    own_share = tl.where(kept, tl.exp(logs - new_mass), 0.0)
    scores = tl.where(there, q * own_alpha + new_mass + tl.sum(row_flags(q[None, :]), axis=0), ABSENT * 2)
    recalled = tl.exp(scores - tl.max(scores, axis=0))
    recalled = recalled / tl.sum(recalled, axis=0)
    # Softmax attention to the recent tokens: the ring, and the new one at its place in it.
    slot = (count % tl.maximum(recent, 1)).to(tl.int32)
    near_top, near_weight = 0.0, 1.0
    if recent_key is not None:
        ring = (batch * (heads // groups) + row_head) * recent
        near_q = load_token(near_query, batch, head, 1, D, BLOCK_D).to(tl.float32) * near_scale
        near_k = load_token(near_key, batch, row_head, is_kept, D, BLOCK_D)
        own_score = tl.sum(near_q * near_k.to(tl.float32), axis=0)
        near_top = own_score
        near_weight = 1.0
        for first in range(0, recent, BLOCK_N):
            _, seen, own = ring_scores(
                recent_key, ring, first, near_q, recent, slot, count, D, BLOCK_D, BLOCK_N, IS_WINDOW
            )
            high_score = tl.maximum(near_top, tl.max(own, axis=0))
            near_weight = near_weight * tl.exp(near_top - high_score)
            near_weight += tl.sum(tl.where(seen, tl.exp(own - high_score), 0.0), axis=0)
            near_top = high_score
        if near_lse is not None:
            tl.store(near_lse + pair, tl.where(kept, near_top + tl.log(near_weight), 0.0))
    for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
        columns = value_first + tl.arange(0, BLOCK_V)
        is_value = columns < V
        v = tl.load(
            value.pointer + batch * value.batch + row_head * value.head + columns, mask=columns < V * is_kept, other=0.0
        )
        place = values + (pair * F + features[:, None]) * V + columns[None, :]
        mask = there[:, None] & is_value[None, :]
        kept_values = (
            tl.load(place, mask=mask, other=0.0) * share[:, None] + own_share[:, None] * v.to(tl.float32)[None, :]
        )
        tl.store(place, kept_values, mask=mask)
        result = tl.sum(recalled[:, None] * kept_values, axis=0)
        if recent_key is not None:
            near = tl.exp(own_score - near_top) * v.to(tl.float32)
            for first in range(0, recent, BLOCK_N):
                slots, seen, own = ring_scores(
                    recent_key, ring, first, near_q, recent, slot, count, D, BLOCK_D, BLOCK_N, IS_WINDOW
                )
                weights = tl.where(seen, tl.exp(own - near_top), 0.0)
                mask_of_values = seen[:, None] & is_value[None, :]
                old = tl.load(
                    recent_value + (ring + slots)[:, None] * V + columns[None, :], mask=mask_of_values, other=0.0
                )
                near += tl.sum(weights[:, None] * old.to(tl.float32), axis=0)
            near = tl.where(kept, near / near_weight, 0.0)
            if near_output is not None:
                tl.store(near_output + pair * V + columns, near, mask=is_value)
            else:
                result = (result + near) * 0.5
            if head % groups == 0:
                tl.store(recent_value + (ring + slot) * V + columns, v, mask=columns < V * is_kept)
        tl.store(output + pair * V + columns, result.to(output.dtype.element_ty), mask=is_value)
    if recent_key is not None and head % groups == 0:
        near_features = tl.arange(0, BLOCK_D)
        tl.store(recent_key + (ring + slot) * D + near_features, near_k, mask=near_features < D * is_kept)
