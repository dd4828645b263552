"""What linear attention keeps of keys and values, for each split of the tokens and of all together, and its recall.

With the log-weights b of `weigh` and a reference m_l = max_j b_jl, the summary of some keys is m, the weights
W_l = sum_j exp(b_jl - m_l) and the sums S_l = sum_j exp(b_jl - m_l) v_j.
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import (
    ABSENT,
    dot,
    kept_rows,
    load_rows,
    load_scale,
    load_vector,
    row_flags,
    store_rows,
    usable_queries,
    weigh,
)


@triton.jit
def remember(top, weight, sums, logs, values, factor, is_row, PRECISION: tl.constexpr):
    """A summary with more keys in it; `factor` multiplies what each adds to the weights."""
    new_top = tl.maximum(top, tl.max(logs, axis=0))
    fade = tl.exp(top - new_top)
    shares = tl.where(is_row[:, None], tl.exp(logs - new_top[None, :]), 0.0)
    weight = weight * fade + tl.sum(shares * factor[:, None], axis=0)
    sums = dot(tl.trans(shares), values, sums * fade[:, None], PRECISION)
    return new_top, weight, sums


@triton.jit
def summarize_kernel(
    key,
    value,
    keep,
    scale,
    shift,
    factor,
    center,
    other_center,
    tops,
    weights,
    sums,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    keep_batch,
    scale_batch,
    scale_head,
    scale_token,
    shift_batch,
    shift_head,
    shift_token,
    center_batch,
    other_center_batch,
    heads,
    groups,
    tokens,
    split_tokens,
    splits,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    IS_QUERY: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The summary of each split of each head.

    With IS_QUERY the rows are queries and their gradients, of which the causal backward pass makes the same sums: the
    shift of a row is then minus its logsumexp, a row that has none (`ABSENT`) saw no key, and `factor` is g . out.
    """
    place = tl.program_id(0).to(tl.int64)
    value_first = tl.program_id(1) * BLOCK_V
    pair, split = place // splits, place % splits
    batch, head = pair // heads, pair % heads
    row_head = head // groups
    key += batch * key_batch + row_head * key_head
    value += batch * value_batch + row_head * value_head
    keep += batch * keep_batch
    scale += batch * scale_batch + head * scale_head
    shift += batch * shift_batch + head * shift_head
    middle, other = 0.0, 0.0
    if CENTERED:
        middle = load_vector(center + batch * center_batch + row_head * D, D, BLOCK_D)
        if NORMALIZED:
            other = load_vector(other_center + batch * other_center_batch + head * D, D, BLOCK_D)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    top = tl.full((BLOCK_D,), ABSENT, tl.float32)
    weight = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        is_row, there = kept_rows(keep, rows, end, HAS_KEEP)
        own_shift = tl.zeros((BLOCK_N,), tl.float32)
        if IS_QUERY:
            own_shift = -load_scale(shift, rows, shift_token, is_row)
            x, usable = usable_queries(load_rows(key, rows, key_token, is_row, D, BLOCK_D, 0), there)
            there = is_row & usable & (own_shift < -ABSENT)
        else:
            x = load_rows(key, rows, key_token, there, D, BLOCK_D, 0)
            if HAS_SHIFT:
                own_shift = load_scale(shift, rows, shift_token, there)
        own_factor = tl.full((BLOCK_N,), 1.0, tl.float32)
        if HAS_FACTOR:
            own_factor = tl.load(factor + pair * tokens + rows, mask=there, other=0.0)
        own_scale = load_scale(scale, rows, scale_token, there)
        logs = weigh(x, own_scale, own_shift, middle, other, there, D, BLOCK_D, CENTERED, NORMALIZED)
        v = load_rows(value, rows, value_token, there, V, BLOCK_V, value_first)
        top, weight, total = remember(top, weight, total, logs, v, own_factor, there, PRECISION)
    features = tl.arange(0, BLOCK_D)
    columns = value_first + tl.arange(0, BLOCK_V)
    width = VALUE_BLOCKS * BLOCK_V
    tl.store(sums + (place * BLOCK_D + features[:, None]) * width + columns[None, :], total)
    if value_first == 0:
        tl.store(tops + place * BLOCK_D + features, top)
        tl.store(weights + place * BLOCK_D + features, weight)


@triton.jit
def combine_kernel(
    tops,
    weights,
    sums,
    starts_top,
    starts_weight,
    starts_sums,
    mass,
    values,
    splits,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    REVERSE: tl.constexpr,
    RUNNING: tl.constexpr,
):
    """The log-mass and mean values of all splits; with RUNNING the summary of all splits before each (REVERSE: after).

    A program has some features (BLOCK_F) and some values of a head.
    """
    pair = tl.program_id(0).to(tl.int64)
    feature_first = tl.program_id(1) * BLOCK_F
    features = feature_first + tl.arange(0, BLOCK_F)
    value_first = tl.program_id(2) * BLOCK_V
    columns = value_first + tl.arange(0, BLOCK_V)
    width = VALUE_BLOCKS * BLOCK_V
    top = tl.full((BLOCK_F,), ABSENT, tl.float32)
    weight = tl.zeros((BLOCK_F,), tl.float32)
    total = tl.zeros((BLOCK_F, BLOCK_V), tl.float32)
    for step in range(splits):
        split = step
        if REVERSE:
            split = splits - 1 - step
        place = pair * splits + split
        matrix = (place * BLOCK_D + features[:, None]) * width + columns[None, :]
        if RUNNING:
            tl.store(starts_sums + matrix, total)
            if value_first == 0:
                tl.store(starts_top + place * BLOCK_D + features, top)
                tl.store(starts_weight + place * BLOCK_D + features, weight)
        own_top = tl.load(tops + place * BLOCK_D + features)
        new_top = tl.maximum(top, own_top)
        fade, own_fade = tl.exp(top - new_top), tl.exp(own_top - new_top)
        weight = weight * fade + tl.load(weights + place * BLOCK_D + features) * own_fade
        total = total * fade[:, None] + tl.load(sums + matrix) * own_fade[:, None]
        top = new_top
    if not RUNNING:
        is_empty = weight == 0.0
        safe = tl.where(is_empty, 1.0, weight)
        target = (pair * BLOCK_D + features[:, None]) * width + columns[None, :]
        tl.store(values + target, total / safe[:, None])
        if value_first == 0:
            tl.store(mass + pair * BLOCK_D + features, top + tl.log(safe))


@triton.jit
def load_queries(
    query,
    keep,
    alpha,
    center,
    rows,
    tokens,
    query_token,
    alpha_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """a = alpha (q - center), NaN in rows that are not finite; q - center, alpha, and which rows count."""
    is_row, kept = kept_rows(keep, rows, tokens, HAS_KEEP)
    q, usable = usable_queries(load_rows(query, rows, query_token, is_row, D, BLOCK_D, 0), kept)
    flags = row_flags(q)
    if CENTERED:
        q = q - center[None, :]
    scale = load_scale(alpha, rows, alpha_token, is_row)
    return q * scale[:, None] + flags[:, None], q, scale, is_row, usable


@triton.jit
def shares_of_features(a, mass, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """softmax over features of (a + mass)."""
    there = (tl.arange(0, BLOCK_D) < D)[None, :]
    logs = tl.where(there, a + mass[None, :], ABSENT * 2)
    shares = tl.exp(logs - tl.max(logs, axis=1)[:, None])
    return shares / tl.sum(shares, axis=1)[:, None]


@triton.jit
def recall_kernel(
    query,
    keep,
    alpha,
    center,
    mass,
    values,
    output,
    query_batch,
    query_head,
    query_token,
    output_batch,
    output_head,
    output_token,
    keep_batch,
    alpha_batch,
    alpha_head,
    alpha_token,
    center_batch,
    heads,
    tokens,
    split_tokens,
    splits,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    CENTERED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = softmax over features of (a + L) times the mean values."""
    place = tl.program_id(0).to(tl.int64)
    pair, split = place // splits, place % splits
    batch, head = pair // heads, pair % heads
    query += batch * query_batch + head * query_head
    output += batch * output_batch + head * output_head
    keep += batch * keep_batch
    alpha += batch * alpha_batch + head * alpha_head
    middle = 0.0
    if CENTERED:
        middle = load_vector(center + batch * center_batch + head * D, D, BLOCK_D)
    features = tl.arange(0, BLOCK_D)
    own_mass = tl.load(mass + pair * BLOCK_D + features)
    width = VALUE_BLOCKS * BLOCK_V
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        a, _, _, is_row, _ = load_queries(
            query, keep, alpha, middle, rows, end, query_token, alpha_token, D, BLOCK_D, HAS_KEEP, CENTERED
        )
        shares = shares_of_features(a, own_mass, D, BLOCK_D)
        for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
            columns = value_first + tl.arange(0, BLOCK_V)
            own_values = tl.load(values + (pair * BLOCK_D + features[:, None]) * width + columns[None, :])
            result = dot(shares, own_values, tl.zeros((BLOCK_N, BLOCK_V), tl.float32), PRECISION)
            store_rows(output, result, rows, output_token, is_row, V, BLOCK_V, value_first)
