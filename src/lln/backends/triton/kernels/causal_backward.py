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

from lln.backends.triton.kernels.causal import REACH, column_of, first_seen, load_keys
from lln.backends.triton.kernels.common import ABSENT, dot, load_rows, load_vector, store_rows
from lln.backends.triton.kernels.summary import load_queries, remember


@triton.jit
def load_past(
    query,
    keep,
    alpha,
    center,
    logs_of_total,
    rows,
    tokens,
    query_token,
    alpha_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """c = a - z, ABSENT for queries that count for nothing, and which those are not."""
    a, _, _, is_row, usable = load_queries(
        query, keep, alpha, center, rows, tokens, query_token, alpha_token, D, BLOCK_D, HAS_KEEP, CENTERED
    )
    z = tl.load(logs_of_total + rows, mask=is_row, other=ABSENT)
    there = is_row & usable & (z != ABSENT)
    c = tl.where(there[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :], a - z[:, None], ABSENT)
    return c, there


@triton.jit
def exponentials(c, b, feature, pairs, BLOCK_D: tl.constexpr):
    """exp(c_il + b_jl) of one feature l for the pairs that meet."""
    logs = column_of(c, feature, BLOCK_D)[:, None] + column_of(b, feature, BLOCK_D)[None, :]
    return tl.where(pairs, tl.exp(tl.minimum(logs, 1.0)), 0.0)


@triton.jit
def causal_queries_backward_kernel(
    query,
    key,
    value,
    keep,
    alpha,
    beta,
    weight,
    center_query,
    center_key,
    gradient,
    tops,
    weights,
    sums,
    logs_of_total,
    dots,
    d_logs,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    gradient_batch,
    gradient_head,
    gradient_token,
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
    HAS_KEEP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    value_first = block * BLOCK_V
    pair, split = place // splits, place % splits
    batch, head = pair // heads, pair % heads
    row_head = head // groups
    query += batch * query_batch + head * query_head
    key += batch * key_batch + row_head * key_head
    value += batch * value_batch + row_head * value_head
    gradient += batch * gradient_batch + head * gradient_head
    keep += batch * keep_batch
    alpha += batch * alpha_batch + head * alpha_head
    beta += batch * beta_batch + head * beta_head
    weight += batch * weight_batch + head * weight_head
    logs_of_total += pair * tokens
    dots += pair * tokens
    d_logs += pair * tokens * D
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
        c, there = load_past(
            query,
            keep,
            alpha,
            middle_q,
            logs_of_total,
            rows,
            end,
            query_token,
            alpha_token,
            D,
            BLOCK_D,
            HAS_KEEP,
            CENTERED,
        )
        b, _, kept = load_keys(
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
        g = load_rows(gradient, rows, gradient_token, there, V, BLOCK_V, value_first)
        r = tl.zeros((BLOCK_N,), tl.float32)
        if block == 0:
            r = tl.load(dots + rows, mask=there, other=0.0)
        pairs = (local[None, :] <= local[:, None]) & kept[None, :] & there[:, None]
        zero = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
        d_weights = tl.where(pairs, dot(g, tl.trans(v), zero, PRECISION) - r[:, None], 0.0)
        before = tl.where(there[:, None], tl.exp(tl.minimum(c + top[None, :], 1.0)), 0.0)
        met = dot(g, tl.trans(total), tl.zeros((BLOCK_N, BLOCK_D), tl.float32), PRECISION)
        d_a = before * (met - r[:, None] * mass[None, :])
        ref = first_seen(top, b, kept, True, BLOCK_N, 0)
        if tl.max(tl.max(b - ref[None, :], axis=1), axis=0) <= REACH:
            f = tl.where(there[:, None], tl.exp(tl.minimum(c + ref[None, :], 1.0)), 0.0)
            e = tl.where(kept[:, None], tl.exp(b - ref[None, :]), 0.0)
            d_a += f * dot(d_weights, e, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), PRECISION)
        else:
            for feature in range(all_features):
                d_column = tl.sum(exponentials(c, b, feature, pairs, BLOCK_D) * d_weights, axis=1)
                d_a += tl.where((features == feature)[None, :], d_column[:, None], 0.0)
        if block > 0:
            d_a += load_rows(d_logs, rows, D, rows < end, D, BLOCK_D, 0)
        store_rows(d_logs, d_a, rows, D, rows < end, D, BLOCK_D, 0)
        top, mass, total = remember(top, mass, total, b, v, ones, kept, PRECISION)


@triton.jit
def causal_keys_backward_kernel(
    query,
    key,
    value,
    keep,
    alpha,
    beta,
    weight,
    center_query,
    center_key,
    gradient,
    tops,
    weights,
    sums,
    logs_of_total,
    dots,
    d_logs,
    d_values,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    gradient_batch,
    gradient_head,
    gradient_token,
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
    HAS_KEEP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    OF_VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_values, or (OF_VALUES = False) the gradient of the log-weights: both at once do not fit into registers."""
    place = tl.program_id(0).to(tl.int64)
    value_first = block * BLOCK_V
    pair, split = place // splits, place % splits
    batch, head = pair // heads, pair % heads
    row_head = head // groups
    query += batch * query_batch + head * query_head
    key += batch * key_batch + row_head * key_head
    value += batch * value_batch + row_head * value_head
    gradient += batch * gradient_batch + head * gradient_head
    keep += batch * keep_batch
    alpha += batch * alpha_batch + head * alpha_head
    beta += batch * beta_batch + head * beta_head
    weight += batch * weight_batch + head * weight_head
    logs_of_total += pair * tokens
    dots += pair * tokens
    d_logs += pair * tokens * D
    d_values += pair * tokens * V
    middle_q, middle_k = 0.0, 0.0
    if CENTERED:
        middle_q = load_vector(center_query + batch * center_query_batch + head * D, D, BLOCK_D)
        middle_k = load_vector(center_key + batch * center_key_batch + row_head * D, D, BLOCK_D)
    features = tl.arange(0, BLOCK_D)
    columns = value_first + tl.arange(0, BLOCK_V)
    width = VALUE_BLOCKS * BLOCK_V
    # The summary of all queries after the split: c in place of b, g of values, and r as what they add to the weights.
    top = tl.load(tops + place * BLOCK_D + features)
    mass = tl.load(weights + place * BLOCK_D + features)
    total = tl.load(sums + (place * BLOCK_D + features[:, None]) * width + columns[None, :])
    local = tl.arange(0, BLOCK_N)
    all_features = tl.minimum(tokens, 0) + D  # D, which the compiler cannot know: it would unroll loops that are rare
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    chunks = tl.cdiv(end - start, BLOCK_N)
    for step in range(chunks):
        first = start + (chunks - 1 - step) * BLOCK_N
        rows = first + local
        c, there = load_past(
            query,
            keep,
            alpha,
            middle_q,
            logs_of_total,
            rows,
            end,
            query_token,
            alpha_token,
            D,
            BLOCK_D,
            HAS_KEEP,
            CENTERED,
        )
        b, _, kept = load_keys(
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
        g = load_rows(gradient, rows, gradient_token, there, V, BLOCK_V, value_first)
        all_r = tl.load(dots + rows, mask=there, other=0.0)
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
            store_rows(d_values, d_v, rows, V, rows < end, V, BLOCK_V, value_first)
        else:
            v = load_rows(value, rows, value_token, kept, V, BLOCK_V, value_first)
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
                d_b += load_rows(d_logs, rows, D, rows < end, D, BLOCK_D, 0)
            store_rows(d_logs, d_b, rows, D, rows < end, D, BLOCK_D, 0)
        top, mass, total = remember(top, mass, total, c, g, all_r, there, PRECISION)
