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
    load_center,
    load_rows,
    load_scale,
    load_summary,
    nan_where,
    place_of,
    store_rows,
    weigh,
)
from lln.backends.triton.kernels.summary import COUNTS, load_queries, remember

REACH = tl.constexpr(30.0)


@triton.jit
def unknown(number, tokens):
    """A constant that the compiler cannot know: it would unroll loops that are rare."""
    return tl.minimum(tokens, 0) + number


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
    keys,
    middle,
    other,
    batch,
    head,
    row_head,
    rows,
    tokens,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Log-weights of keys, ABSENT where they are not finite, which keys are kept, and which of these are finite."""
    _, kept = kept_rows(keys.keep, batch, rows, tokens)
    shift = rows.to(tl.float32) * 0.0
    if keys.weight is not None:
        shift = load_scale(keys.weight, batch, head, rows, kept)
    x = load_rows(keys.rows, batch, row_head, rows, kept, D, BLOCK_D, 0)
    scale = load_scale(keys.scale, batch, head, rows, kept)
    logs = weigh(x, scale, shift, middle, other, kept, D, BLOCK_D, keys.center is not None, NORMALIZED)
    odd = tl.max(tl.where(tl.abs(logs) <= LARGEST, 0.0, 1.0), axis=1)
    finite = kept & (odd == 0.0)
    return tl.where(finite[:, None], logs, ABSENT), kept, finite


@triton.jit
def place_in_split(
    queries,
    keys,
    heads,
    groups,
    tokens,
    split_tokens,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """This program's split of all, head of all, sample, head and key head, the centres, and the split's tokens."""
    place, pair, split, batch, head = place_of(splits, heads)
    row_head = head // groups
    middle_q = load_center(queries.center, batch, head, D, BLOCK_D)
    middle_k = load_center(keys.center, batch, row_head, D, BLOCK_D)
    start = split * split_tokens
    return place, pair, batch, head, row_head, middle_q, middle_k, start, tl.minimum(start + split_tokens, tokens)


@triton.jit(do_not_specialize=COUNTS)
def causal_kernel(
    queries,
    keys,
    value,
    starts,
    output,
    logs_of_total,
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
    NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output of a split, from the summary of all before it, and the log of each query's summed weights."""
    place, pair, batch, head, row_head, middle_q, middle_k, start, end = place_in_split(
        queries, keys, heads, groups, tokens, split_tokens, splits, D, BLOCK_D
    )
    value_first = tl.program_id(1) * BLOCK_V
    features = tl.arange(0, BLOCK_D)
    top, mass, total = load_summary(starts, place, value_first, BLOCK_D, BLOCK_V, VALUE_BLOCKS * BLOCK_V)
    local = tl.arange(0, BLOCK_N)
    all_features = unknown(D, tokens)
    ones = tl.full((BLOCK_N,), 1.0, tl.float32)
    for first in range(start, end, BLOCK_N):
        rows = first + local
        a, _, _, is_row, _ = load_queries(queries, middle_q, batch, head, rows, end, D, BLOCK_D)
        query_flags = tl.sum(a * 0.0, axis=1)
        a = tl.where((query_flags == query_flags)[:, None], a, 0.0)
        b, kept, finite = load_keys(keys, middle_k, middle_q, batch, head, row_head, rows, end, D, BLOCK_D, NORMALIZED)
        v = load_rows(value, batch, row_head, rows, kept, V, BLOCK_V, value_first)
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
        store_rows(output, batch, head, rows, is_row, result, V, BLOCK_V, value_first)
        if value_first == 0:
            logs = tl.where(is_empty, ABSENT, high_a + high_b + tl.log(safe) + flags)
            tl.store(logs_of_total + pair * tokens + rows, logs, mask=is_row)
        top, mass, total = remember(top, mass, total, b, v, ones, finite, PRECISION)
        mass += nan_where(odd < BLOCK_N)
