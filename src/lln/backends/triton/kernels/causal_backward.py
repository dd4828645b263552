"""Gradients of causal LLN attention, chunk by chunk: of queries from the first on, of keys from the last on.

With z_i the log of the summed weights of query i, c_i = a_i - z_i, g the gradient of the output, r_i = g_i . out_i:

    da_il = sum over j <= i of exp(c_il + b_jl) (g_i . v_j - r_i)
    db_jl = sum over i >= j of exp(c_il + b_jl) (g_i . v_j - r_i)
    dv_j = sum over i >= j and l of exp(c_il + b_jl) g_i

All exponents are at most 0. Keys before a chunk are met through their summary, queries after it through theirs: in both
directions inside a chunk it is as in `causal`. A launch has a block of values, and adds its part to da and db.
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.causal import REACH, column_of, first_seen, load_keys, place_in_split, unknown
from lln.backends.triton.kernels.common import (
    ABSENT,
    dot,
    load_rows,
    load_scale,
    load_summary,
    store_rows,
)
from lln.backends.triton.kernels.summary import COUNTS, load_queries, remember


@triton.jit
def load_past(queries, middle, logs_of_total, batch, head, rows, tokens, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """c = a - z, ABSENT for queries that count for nothing, and which those are not."""
    a, _, _, is_row, usable = load_queries(queries, middle, batch, head, rows, tokens, D, BLOCK_D)
    z = load_scale(logs_of_total, batch, head, rows, is_row)
    there = is_row & usable & (z != ABSENT)
    c = tl.where(there[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :], a - z[:, None], ABSENT)
    return c, there


@triton.jit
def exponentials(c, b, feature, pairs, BLOCK_D: tl.constexpr):
    """exp(c_il + b_jl) of one feature l for the pairs that meet."""
    logs = column_of(c, feature, BLOCK_D)[:, None] + column_of(b, feature, BLOCK_D)[None, :]
    return tl.where(pairs, tl.exp(tl.minimum(logs, 1.0)), 0.0)


@triton.jit(do_not_specialize=(*COUNTS, "block"))
def causal_queries_backward_kernel(
    queries,
    keys,
    value,
    gradient,
    output,
    starts,
    logs_of_total,
    d_logs,
    scaled,
    heads,
    groups,
    block,
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
    """The gradient of the log-weights of queries, of one block of values.

    g . out is that of the block's values, so that its part of the gradient cancels by itself where one key has all
    weight. What rounding has left of the sum over features is then taken off too: alpha would multiply it. The weights
    of a query have the sum 1 but for the rounding of its z, which is large where a or b is. If there is `scaled`, they
    are divided by their sum, and so is the gradient that is stored there for the gradients of keys and values.
    """
    place, _pair, batch, head, row_head, middle_q, middle_k, start, end = place_in_split(
        queries, keys, heads, groups, tokens, split_tokens, splits, D, BLOCK_D
    )
    value_first = block * BLOCK_V
    features = tl.arange(0, BLOCK_D)
    top, mass, total = load_summary(starts, place, value_first, BLOCK_D, BLOCK_V, VALUE_BLOCKS * BLOCK_V)
    local = tl.arange(0, BLOCK_N)
    all_features = unknown(D, tokens)
    ones = tl.full((BLOCK_N,), 1.0, tl.float32)
    for first in range(start, end, BLOCK_N):
        rows = first + local
        c, there = load_past(queries, middle_q, logs_of_total, batch, head, rows, end, D, BLOCK_D)
        b, _, kept = load_keys(keys, middle_k, middle_q, batch, head, row_head, rows, end, D, BLOCK_D, NORMALIZED)
        v = load_rows(value, batch, row_head, rows, kept, V, BLOCK_V, value_first)
        g = load_rows(gradient, batch, head, rows, there, V, BLOCK_V, value_first)
        r = tl.sum(g * load_rows(output, batch, head, rows, there, V, BLOCK_V, value_first), axis=1)
        pairs = (local[None, :] <= local[:, None]) & kept[None, :] & there[:, None]
        zero = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
        d_weights = tl.where(pairs, dot(g, tl.trans(v), zero, PRECISION) - r[:, None], 0.0)
        before = tl.where(there[:, None], tl.exp(tl.minimum(c + top[None, :], 1.0)), 0.0)
        met = dot(g, tl.trans(total), tl.zeros((BLOCK_N, BLOCK_D), tl.float32), PRECISION)
        shares = before * mass[None, :]
        d_a = before * (met - r[:, None] * mass[None, :])
        ref = first_seen(top, b, kept, True, BLOCK_N, 0)
        if tl.max(tl.max(b - ref[None, :], axis=1), axis=0) <= REACH:
            f = tl.where(there[:, None], tl.exp(tl.minimum(c + ref[None, :], 1.0)), 0.0)
            e = tl.where(kept[:, None], tl.exp(b - ref[None, :]), 0.0)
            d_a += f * dot(d_weights, e, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), PRECISION)
            weights = tl.where(pairs, 1.0, 0.0)
            shares += f * dot(weights, e, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), PRECISION)
        else:
            for feature in range(all_features):
                weights = exponentials(c, b, feature, pairs, BLOCK_D)
                is_feature = (features == feature)[None, :]
                d_a += tl.where(is_feature, tl.sum(weights * d_weights, axis=1)[:, None], 0.0)
                shares += tl.where(is_feature, tl.sum(weights, axis=1)[:, None], 0.0)
        if scaled is not None:
            weight = tl.sum(shares, axis=1)  # far from 1 where logs are so large that no weight has a correct digit
            inverse = 1.0 / tl.where(tl.abs(weight - 1.0) < 0.5, weight, 1.0)[:, None]
            shares, d_a = shares * inverse, d_a * inverse
            store_rows(scaled, batch, head, rows, rows < end, g * inverse, V, BLOCK_V, value_first)
        d_a -= shares * tl.sum(d_a, axis=1)[:, None]
        if block > 0:
            d_a += load_rows(d_logs, batch, head, rows, rows < end, D, BLOCK_D, 0)
        store_rows(d_logs, batch, head, rows, rows < end, d_a, D, BLOCK_D, 0)
        top, mass, total = remember(top, mass, total, b, v, ones, kept, PRECISION)


@triton.jit(do_not_specialize=(*COUNTS, "block"))
def causal_keys_backward_kernel(
    queries,
    keys,
    value,
    gradient,
    starts,
    logs_of_total,
    dots,
    d_logs,
    d_values,
    heads,
    groups,
    block,
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
    OF_VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_values, or (OF_VALUES = False) the gradient of the log-weights: both at once do not fit into registers."""
    place, _pair, batch, head, row_head, middle_q, middle_k, start, end = place_in_split(
        queries, keys, heads, groups, tokens, split_tokens, splits, D, BLOCK_D
    )
    value_first = block * BLOCK_V
    features = tl.arange(0, BLOCK_D)
    # The summary of all queries after the split: c in place of b, g of values, and r as what they add to the weights.
    top, mass, total = load_summary(starts, place, value_first, BLOCK_D, BLOCK_V, VALUE_BLOCKS * BLOCK_V)
    local = tl.arange(0, BLOCK_N)
    all_features = unknown(D, tokens)
    chunks = tl.cdiv(end - start, BLOCK_N)
    for step in range(chunks):
        first = start + (chunks - 1 - step) * BLOCK_N
        rows = first + local
        c, there = load_past(queries, middle_q, logs_of_total, batch, head, rows, end, D, BLOCK_D)
        b, _, kept = load_keys(keys, middle_k, middle_q, batch, head, row_head, rows, end, D, BLOCK_D, NORMALIZED)
        g = load_rows(gradient, batch, head, rows, there, V, BLOCK_V, value_first)
        all_r = load_scale(dots, batch, head, rows, there)
        r = tl.where(block == 0, all_r, 0.0)
        pairs = (local[None, :] <= local[:, None]) & kept[None, :] & there[:, None]
        zero = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
        after = tl.where(kept[:, None], tl.exp(tl.minimum(b + top[None, :], 1.0)), 0.0)
        last = tl.minimum(end - first, BLOCK_N) - 1
        ref = first_seen(top, c, there, False, BLOCK_N, last)
        is_near = tl.max(tl.max(c - ref[None, :], axis=1), axis=0) <= REACH
        if OF_VALUES:
            if is_near:
                f = tl.where(there[:, None], tl.exp(c - ref[None, :]), 0.0)
                e = tl.where(kept[:, None], tl.exp(tl.minimum(b + ref[None, :], 1.0)), 0.0)
                P = tl.where(pairs, dot(f, tl.trans(e), zero, PRECISION), 0.0)
            else:
                P = zero
                for feature in range(all_features):
                    P += exponentials(c, b, feature, pairs, BLOCK_D)
            d_v = dot(after, total, tl.zeros((BLOCK_N, BLOCK_V), tl.float32), PRECISION)
            d_v = dot(tl.trans(P), g, d_v, PRECISION)
            store_rows(d_values, batch, head, rows, rows < end, d_v, V, BLOCK_V, value_first)
        else:
            v = load_rows(value, batch, row_head, rows, kept, V, BLOCK_V, value_first)
            d_weights = tl.where(pairs, dot(g, tl.trans(v), zero, PRECISION) - r[:, None], 0.0)
            met = dot(v, tl.trans(total), tl.zeros((BLOCK_N, BLOCK_D), tl.float32), PRECISION)
            d_b = after * (met - tl.where(block == 0, mass, 0.0)[None, :])
            if is_near:
                f = tl.where(there[:, None], tl.exp(c - ref[None, :]), 0.0)
                e = tl.where(kept[:, None], tl.exp(tl.minimum(b + ref[None, :], 1.0)), 0.0)
                d_b += e * dot(tl.trans(d_weights), f, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), PRECISION)
            else:
                for feature in range(all_features):
                    d_column = tl.sum(exponentials(c, b, feature, pairs, BLOCK_D) * d_weights, axis=0)
                    d_b += tl.where((features == feature)[None, :], d_column[:, None], 0.0)
            if block > 0:
                d_b += load_rows(d_logs, batch, head, rows, rows < end, D, BLOCK_D, 0)
            store_rows(d_logs, batch, head, rows, rows < end, d_b, D, BLOCK_D, 0)
        top, mass, total = remember(top, mass, total, c, g, all_r, there, PRECISION)
