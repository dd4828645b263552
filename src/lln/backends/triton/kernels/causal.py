"""Causal LLN attention, chunk by chunk inside each split of the tokens.

P_ij is proportional to sum_l exp(a_il + b_jl) over the keys j <= i. Keys before a chunk are met through their summary.
Inside a chunk the exponential is split at a reference, f_i = exp(a_i + ref) and e_j = exp(b_j - ref), so that P is the
product f eᵀ. The reference is the largest b that the first query of the chunk has seen. Where a later key of the chunk
exceeds it by more than REACH the product could overflow, and the exponentials are taken one feature at a time instead.
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import (
    ABSENT,
    LARGEST,
    dot,
    kept_rows,
    load_rows,
    load_scale,
    load_vector,
    nan_where,
    store_rows,
    weigh,
)
from lln.backends.triton.kernels.summary import load_queries, remember

REACH = tl.constexpr(30.0)


@triton.jit
def column_of(x, feature, BLOCK_D: tl.constexpr):
    """One column of a tile."""
    return tl.sum(tl.where((tl.arange(0, BLOCK_D) == feature)[None, :], x, 0.0), axis=1)


@triton.jit
def entry_of(x, feature, BLOCK_D: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK_D) == feature, x, 0.0), axis=0)


@triton.jit
def first_seen(top, logs, there, FIRST: tl.constexpr, BLOCK_N: tl.constexpr, last):
    """The largest log-weights that the first query of a chunk has seen, or (FIRST = False) the last key will be.

    That is the summary and the row at the chunk's edge; without a summary, the first row that counts.
    """
    place = tl.arange(0, BLOCK_N)
    has_summary = tl.max(top, axis=0) > ABSENT
    if FIRST:
        edge = tl.min(tl.where(there, place, BLOCK_N), axis=0)
        edge = tl.where(has_summary, 0, edge)
    else:
        edge = tl.max(tl.where(there, place, -1), axis=0)
        edge = tl.where(has_summary, last, edge)
    row = tl.where(((place == edge) & there)[:, None], logs, ABSENT)
    return tl.maximum(top, tl.max(row, axis=0))


@triton.jit
def load_keys(
    key,
    keep,
    scale,
    shift,
    center,
    other_center,
    rows,
    tokens,
    key_token,
    scale_token,
    shift_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Log-weights of keys, ABSENT where they are not finite, which keys are kept, and which of these are finite."""
    _, kept = kept_rows(keep, rows, tokens, HAS_KEEP)
    own_shift = rows.to(tl.float32) * 0.0
    if HAS_SHIFT:
        own_shift = load_scale(shift, rows, shift_token, kept)
    x = load_rows(key, rows, key_token, kept, D, BLOCK_D, 0)
    own_scale = load_scale(scale, rows, scale_token, kept)
    logs = weigh(x, own_scale, own_shift, center, other_center, kept, D, BLOCK_D, CENTERED, NORMALIZED)
    odd = tl.max(tl.where(tl.abs(logs) <= LARGEST, 0.0, 1.0), axis=1)
    finite = kept & (odd == 0.0)
    return tl.where(finite[:, None], logs, ABSENT), kept, finite


@triton.jit
def causal_kernel(
    query,
    key,
    value,
    keep,
    alpha,
    beta,
    weight,
    center_query,
    center_key,
    tops,
    weights,
    sums,
    output,
    logs_of_total,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    output_batch,
    output_head,
    output_token,
    keep_batch,
    alpha_batch,
    alpha_head,
    alpha_token,
    beta_batch,
    beta_head,
    beta_token,
    weight_batch,
    weight_head,
    weight_token,
    center_query_batch,
    center_key_batch,
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
    HAS_WEIGHT: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output of a split, from the summary of all before it, and the log of each query's summed weights."""
    place = tl.program_id(0).to(tl.int64)
    value_first = tl.program_id(1) * BLOCK_V
    pair, split = place // splits, place % splits
    batch, head = pair // heads, pair % heads
    row_head = head // groups
    query += batch * query_batch + head * query_head
    key += batch * key_batch + row_head * key_head
    value += batch * value_batch + row_head * value_head
    output += batch * output_batch + head * output_head
    keep += batch * keep_batch
    alpha += batch * alpha_batch + head * alpha_head
    beta += batch * beta_batch + head * beta_head
    weight += batch * weight_batch + head * weight_head
    middle_q, middle_k = 0.0, 0.0
    if CENTERED:
        middle_q = load_vector(center_query + batch * center_query_batch + head * D, D, BLOCK_D)
        middle_k = load_vector(center_key + batch * center_key_batch + row_head * D, D, BLOCK_D)
    features = tl.arange(0, BLOCK_D)
    columns = value_first + tl.arange(0, BLOCK_V)
    width = VALUE_BLOCKS * BLOCK_V
    top = tl.load(tops + place * BLOCK_D + features)
    mass = tl.load(weights + place * BLOCK_D + features)
    total = tl.load(sums + (place * BLOCK_D + features[:, None]) * width + columns[None, :])
    local = tl.arange(0, BLOCK_N)
    all_features = tl.minimum(tokens, 0) + D  # D, which the compiler cannot know: it would unroll loops that are rare
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    ones = tl.full((BLOCK_N,), 1.0, tl.float32)
    for first in range(start, end, BLOCK_N):
        rows = first + local
        a, _, _, is_row, _ = load_queries(
            query, keep, alpha, middle_q, rows, end, query_token, alpha_token, D, BLOCK_D, HAS_KEEP, CENTERED
        )
        query_flags = tl.sum(a * 0.0, axis=1)
        a = tl.where((query_flags == query_flags)[:, None], a, 0.0)
        b, kept, finite = load_keys(
            key,
            keep,
            beta,
            weight,
            middle_k,
            middle_q,
            rows,
            end,
            key_token,
            beta_token,
            weight_token,
            D,
            BLOCK_D,
            HAS_KEEP,
            HAS_WEIGHT,
            CENTERED,
            NORMALIZED,
        )
        v = load_rows(value, rows, value_token, kept, V, BLOCK_V, value_first)
        odd_value = tl.max(tl.where(tl.abs(v) <= LARGEST, 0.0, 1.0), axis=1) > 0.0
        v = tl.where(odd_value[:, None], 0.0, v)
        # Later rows, and they alone, show what is not finite.
        odd = tl.min(tl.where((kept & ~finite) | odd_value, local, BLOCK_N), axis=0)
        flags = query_flags + nan_where(local >= odd)
        pairs = (local[None, :] <= local[:, None]) & finite[None, :]
        ref = first_seen(top, b, finite, True, BLOCK_N, 0)
        if tl.max(tl.max(b - ref[None, :], axis=1), axis=0) <= REACH:
            # The largest a + ref of a row as two numbers: differences to each are exact, of the sum they are not.
            sums_of_logs = tl.where((features < D)[None, :], a + ref[None, :], ABSENT * 2)
            is_highest = sums_of_logs == tl.max(sums_of_logs, axis=1)[:, None]
            high_b = tl.max(tl.where(is_highest, ref[None, :], ABSENT * 2), axis=1)
            high_a = tl.max(tl.where(is_highest & (ref[None, :] == high_b[:, None]), a, ABSENT * 2), axis=1)
            apart = (a - high_a[:, None]) + (ref[None, :] - high_b[:, None])
            f = tl.where((features < D)[None, :], tl.exp(tl.minimum(apart, 1.0)), 0.0)
            e = tl.where(finite[:, None], tl.exp(b - ref[None, :]), 0.0)
            P = tl.where(pairs, dot(f, tl.trans(e), tl.zeros((BLOCK_N, BLOCK_N), tl.float32), PRECISION), 0.0)
        else:
            high_a = tl.zeros((BLOCK_N,), tl.float32)
            high_b = tl.full((BLOCK_N,), ABSENT, tl.float32)
            for feature in range(all_features):
                b_l = column_of(b, feature, BLOCK_D)
                seen = tl.max(tl.where(pairs, b_l[None, :], ABSENT), axis=1)
                seen = tl.maximum(seen, entry_of(top, feature, BLOCK_D))
                a_l = column_of(a, feature, BLOCK_D)
                is_higher = a_l + seen > high_a + high_b
                high_a, high_b = tl.where(is_higher, a_l, high_a), tl.where(is_higher, seen, high_b)
            P = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
            for feature in range(all_features):
                a_l = column_of(a, feature, BLOCK_D) - high_a
                b_l = column_of(b, feature, BLOCK_D)
                apart_l = a_l[:, None] + (b_l[None, :] - high_b[:, None])
                P += tl.where(pairs, tl.exp(tl.minimum(apart_l, 1.0)), 0.0)
        before = tl.exp(tl.minimum((a - high_a[:, None]) + (top[None, :] - high_b[:, None]), 1.0))
        before = tl.where((features < D)[None, :], before, 0.0)
        sum_of_weights = tl.sum(P, axis=1) + tl.sum(before * mass[None, :], axis=1)
        is_empty = sum_of_weights == 0.0
        safe = tl.where(is_empty, 1.0, sum_of_weights)
        result = dot(P, v, tl.zeros((BLOCK_N, BLOCK_V), tl.float32), PRECISION)
        result = dot(before, total, result, PRECISION) / safe[:, None] + flags[:, None]
        store_rows(output, result, rows, output_token, is_row, V, BLOCK_V, value_first)
        if value_first == 0:
            logs = tl.where(is_empty, ABSENT, high_a + high_b + tl.log(safe) + flags)
            tl.store(logs_of_total + pair * tokens + rows, logs, mask=is_row)
        top, mass, total = remember(top, mass, total, b, v, ones, finite, PRECISION)
        mass += nan_where(odd < BLOCK_N)
