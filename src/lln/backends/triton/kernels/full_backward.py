"""Gradients of full LLN attention, from the log-mass L and mean values S of all keys; A and B are computed once more.

With g the gradient of the output, A = softmax over features of (a + L) and B = exp(b - L):

    da = A * (g Sᵀ - rowsum)       dS = Aᵀ g       dL = sum over queries of da
    db = B * (V dSᵀ + dL - sum over V of S * dS)   dV = B dS
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import (
    dot,
    load_center,
    load_rows,
    load_scale,
    matrices,
    place_of,
    store_rows,
    weigh,
)
from lln.backends.triton.kernels.gradients import add_key_gradients, load_kept_keys
from lln.backends.triton.kernels.summary import load_queries, shares_of_features


@triton.jit(do_not_specialize=("heads", "tokens", "split_tokens", "splits"))
def queries_backward_kernel(
    queries,
    gradient,
    mass,
    values,
    d_query,
    d_alpha,
    d_masses,
    d_sums,
    d_center,
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
    PRECISION: tl.constexpr,
):
    """d_query, and dL and dS of each split; a program has BLOCK_V columns of dS, and the first of them the rest.

    One of `d_query` and `d_sums` may be None, and what belongs to it is then left out.
    """
    place, pair, split, batch, head = place_of(splits, heads)
    own_first = tl.program_id(1) * BLOCK_V
    middle = load_center(queries.center, batch, head, D, BLOCK_D)
    features = tl.arange(0, BLOCK_D)
    own_mass = tl.load(mass + pair * BLOCK_D + features)
    WIDTH: tl.constexpr = VALUE_BLOCKS * BLOCK_V
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    d_mass = tl.zeros((BLOCK_D,), tl.float32)
    d_middle = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        a, q, scale, is_row, usable = load_queries(queries, middle, batch, head, rows, end, D, BLOCK_D)
        shares = shares_of_features(a, own_mass, D, BLOCK_D)
        if d_query is not None and own_first == 0:
            seen = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            for value_first in range(0, WIDTH, BLOCK_V):
                g = load_rows(gradient, batch, head, rows, is_row, V, BLOCK_V, value_first)
                columns = value_first + tl.arange(0, BLOCK_V)
                s_t = tl.load(values + (pair * BLOCK_D + features[None, :]) * WIDTH + columns[:, None])
                seen = dot(g, s_t, seen, PRECISION)
            # The mean is taken off in two steps, the second of what the first has left, which alpha would multiply.
            seen = seen - tl.sum(shares * seen, axis=1)[:, None]
            da = shares * (seen - tl.sum(shares * seen, axis=1)[:, None])
            d_mass += tl.sum(da, axis=0)
            d_q = da * scale[:, None]
            d_middle -= tl.sum(d_q, axis=0)
            d_q = tl.where(usable[:, None], d_q, 0.0)
            store_rows(d_query, batch, head, rows, is_row, d_q, D, BLOCK_D, 0)
            if d_alpha is not None:
                tl.store(d_alpha + pair * tokens + rows, tl.sum(da * q, axis=1), mask=is_row)
        if d_sums is not None:
            own_g = load_rows(gradient, batch, head, rows, is_row, V, BLOCK_V, own_first)
            total = dot(tl.trans(shares), own_g, total, PRECISION)
    if d_sums is not None:
        columns = own_first + tl.arange(0, BLOCK_V)
        tl.store(matrices(d_sums, place, features, columns, BLOCK_D, WIDTH), total)
    if d_query is not None and own_first == 0:
        tl.store(d_masses + place * BLOCK_D + features, d_mass)
        if d_center is not None:
            tl.store(d_center + place * BLOCK_D + features, d_middle)


@triton.jit(do_not_specialize=("splits",))
def combine_gradients_kernel(
    d_masses,
    d_sums,
    values,
    shift,
    total_sums,
    splits,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
):
    """dS of all splits, and what is added to V dSᵀ: dL - sum over V of S * dS."""
    pair = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    WIDTH: tl.constexpr = VALUE_BLOCKS * BLOCK_V
    own_shift = tl.zeros((BLOCK_F,), tl.float32)
    for split in range(splits):
        own_shift += tl.load(d_masses + (pair * splits + split) * BLOCK_D + features)
    for value_first in range(0, WIDTH, BLOCK_V):
        columns = value_first + tl.arange(0, BLOCK_V)
        total = tl.zeros((BLOCK_F, BLOCK_V), tl.float32)
        for split in range(splits):
            total += tl.load(matrices(d_sums, pair * splits + split, features, columns, BLOCK_D, WIDTH))
        own_shift -= tl.sum(total * tl.load(matrices(values, pair, features, columns, BLOCK_D, WIDTH)), axis=1)
        tl.store(matrices(total_sums, pair, features, columns, BLOCK_D, WIDTH), total)
    tl.store(shift + pair * BLOCK_D + features, own_shift)


@triton.jit(do_not_specialize=("key_heads", "tokens", "tiles"))
def keys_backward_kernel(
    keys,
    value,
    mass,
    shift,
    sums,
    into,
    key_heads,
    groups,
    tokens,
    tiles,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_key and d_value of a tile of a key head: the sum over its query heads. One of them may be None."""
    place, key_pair, tile, batch, head = place_of(tiles, key_heads)
    middle = load_center(keys.center, batch, head, D, BLOCK_D)
    features = tl.arange(0, BLOCK_D)
    WIDTH: tl.constexpr = VALUE_BLOCKS * BLOCK_V
    rows, is_row, kept, x = load_kept_keys(keys, batch, head, tile, tokens, D, BLOCK_D, BLOCK_N)
    d_x = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    d_middle = tl.zeros((BLOCK_D,), tl.float32)
    LAST: tl.constexpr = WIDTH if into.value is not None else BLOCK_V
    for own_first in range(0, LAST, BLOCK_V):
        d_v = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for group in range(groups):
            query_head = head * groups + group
            pair = key_pair * groups + group
            scale = load_scale(keys.scale, batch, query_head, rows, kept)
            own_weight = tl.zeros((BLOCK_N,), tl.float32)
            if keys.weight is not None:
                own_weight = load_scale(keys.weight, batch, query_head, rows, kept)
            other = load_center(keys.other_center, batch, query_head, D, BLOCK_D)
            CENTERED: tl.constexpr = keys.center is not None
            logs = weigh(x, scale, own_weight, middle, other, kept, D, BLOCK_D, CENTERED, NORMALIZED)
            own_mass = tl.load(mass + pair * BLOCK_D + features)
            shares = tl.where(kept[:, None], tl.exp(logs - own_mass[None, :]), 0.0)
            if into.value is not None:
                columns = own_first + tl.arange(0, BLOCK_V)
                own_sums = tl.load(matrices(sums, pair, features, columns, BLOCK_D, WIDTH))
                d_v = dot(shares, own_sums, d_v, PRECISION)
            if into.key is not None and own_first == 0:
                d_logs = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
                d_logs += tl.load(shift + pair * BLOCK_D + features)[None, :]
                for value_first in range(0, WIDTH, BLOCK_V):
                    v = load_rows(value, batch, head, rows, kept, V, BLOCK_V, value_first)
                    some = value_first + tl.arange(0, BLOCK_V)
                    sums_t = tl.load(sums + (pair * BLOCK_D + features[None, :]) * WIDTH + some[:, None])
                    d_logs = dot(v, sums_t, d_logs, PRECISION)
                d_x, d_middle = add_key_gradients(
                    d_x,
                    d_middle,
                    into,
                    x,
                    d_logs * shares,
                    scale,
                    middle,
                    other,
                    pair,
                    tile,
                    rows,
                    is_row,
                    tokens,
                    tiles,
                    D,
                    BLOCK_D,
                    CENTERED,
                    NORMALIZED,
                )
        if into.value is not None:
            store_rows(into.value, batch, head, rows, is_row, d_v, V, BLOCK_V, own_first)
    if into.key is not None:
        d_x = tl.where(kept[:, None], d_x, 0.0)
        store_rows(into.key, batch, head, rows, is_row, d_x, D, BLOCK_D, 0)
    if into.center is not None:
        tl.store(into.center + place * BLOCK_D + features, d_middle)
