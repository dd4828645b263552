"""Gradients of full LLN attention, from the log-mass L and mean values S of all keys; A and B are computed once more.

With g the gradient of the output, A = softmax over features of (a + L) and B = exp(b - L):

    da = A * (g Sᵀ - rowsum)       dS = Aᵀ g       dL = sum over queries of da
    db = B * (V dSᵀ + dL - sum over V of S * dS)   dV = B dS
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import dot, kept_rows, load_rows, load_scale, load_vector, store_rows, weigh
from lln.backends.triton.kernels.gradients import key_gradient
from lln.backends.triton.kernels.summary import load_queries, shares_of_features


@triton.jit
def queries_backward_kernel(
    query,
    keep,
    alpha,
    center,
    gradient,
    mass,
    values,
    d_query,
    d_alpha,
    d_masses,
    d_sums,
    d_center,
    query_batch,
    query_head,
    query_token,
    gradient_batch,
    gradient_head,
    gradient_token,
    d_query_batch,
    d_query_head,
    d_query_token,
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
    SCALE_GRADIENT: tl.constexpr,
    CENTER_GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_query, and dL and dS of each split; a program has BLOCK_V columns of dS, and the first of them the rest."""
    place = tl.program_id(0).to(tl.int64)
    own_first = tl.program_id(1) * BLOCK_V
    pair, split = place // splits, place % splits
    batch, head = pair // heads, pair % heads
    query += batch * query_batch + head * query_head
    gradient += batch * gradient_batch + head * gradient_head
    d_query += batch * d_query_batch + head * d_query_head
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
    d_mass = tl.zeros((BLOCK_D,), tl.float32)
    d_middle = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        a, q, scale, is_row, usable = load_queries(
            query, keep, alpha, middle, rows, end, query_token, alpha_token, D, BLOCK_D, HAS_KEEP, CENTERED
        )
        shares = shares_of_features(a, own_mass, D, BLOCK_D)
        own_g = load_rows(gradient, rows, gradient_token, is_row, V, BLOCK_V, own_first)
        if own_first == 0:
            seen = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
                g = load_rows(gradient, rows, gradient_token, is_row, V, BLOCK_V, value_first)
                columns = value_first + tl.arange(0, BLOCK_V)
                s_t = tl.load(values + (pair * BLOCK_D + features[None, :]) * width + columns[:, None])
                seen = dot(g, s_t, seen, PRECISION)
            da = shares * seen
            da = da - shares * tl.sum(da, axis=1)[:, None]
            d_mass += tl.sum(da, axis=0)
            d_q = da * scale[:, None]
            d_middle -= tl.sum(d_q, axis=0)
            d_q = tl.where(usable[:, None], d_q, 0.0)
            store_rows(d_query, d_q, rows, d_query_token, is_row, D, BLOCK_D, 0)
            if SCALE_GRADIENT:
                tl.store(d_alpha + pair * tokens + rows, tl.sum(da * q, axis=1), mask=is_row)
        total = dot(tl.trans(shares), own_g, total, PRECISION)
    columns = own_first + tl.arange(0, BLOCK_V)
    tl.store(d_sums + (place * BLOCK_D + features[:, None]) * width + columns[None, :], total)
    if own_first == 0:
        tl.store(d_masses + place * BLOCK_D + features, d_mass)
        if CENTER_GRADIENT:
            tl.store(d_center + place * BLOCK_D + features, d_middle)


@triton.jit
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
    width = VALUE_BLOCKS * BLOCK_V
    own_shift = tl.zeros((BLOCK_F,), tl.float32)
    for split in range(splits):
        own_shift += tl.load(d_masses + (pair * splits + split) * BLOCK_D + features)
    for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
        columns = value_first + tl.arange(0, BLOCK_V)
        total = tl.zeros((BLOCK_F, BLOCK_V), tl.float32)
        for split in range(splits):
            place = pair * splits + split
            total += tl.load(d_sums + (place * BLOCK_D + features[:, None]) * width + columns[None, :])
        target = (pair * BLOCK_D + features[:, None]) * width + columns[None, :]
        own_shift -= tl.sum(total * tl.load(values + target), axis=1)
        tl.store(total_sums + target, total)
    tl.store(shift + pair * BLOCK_D + features, own_shift)


@triton.jit
def keys_backward_kernel(
    key,
    value,
    keep,
    beta,
    weight,
    center,
    other_center,
    mass,
    shift,
    sums,
    d_key,
    d_value,
    d_beta,
    d_weight,
    d_center,
    d_other_center,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    d_key_batch,
    d_key_head,
    d_key_token,
    d_value_batch,
    d_value_head,
    d_value_token,
    keep_batch,
    beta_batch,
    beta_head,
    beta_token,
    weight_batch,
    weight_head,
    weight_token,
    center_batch,
    other_center_batch,
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
    HAS_KEEP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCALE_GRADIENT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    CENTER_GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_key and d_value of a tile of a key head: the sum over its query heads."""
    place = tl.program_id(0).to(tl.int64)
    key_pair, tile = place // tiles, place % tiles
    batch, head = key_pair // key_heads, key_pair % key_heads
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    d_key += batch * d_key_batch + head * d_key_head
    d_value += batch * d_value_batch + head * d_value_head
    middle = 0.0
    if CENTERED:
        middle = load_vector(center + batch * center_batch + head * D, D, BLOCK_D)
    features = tl.arange(0, BLOCK_D)
    width = VALUE_BLOCKS * BLOCK_V
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, kept = kept_rows(keep + batch * keep_batch, rows, tokens, HAS_KEEP)
    x = load_rows(key, rows, key_token, kept, D, BLOCK_D, 0)
    d_x = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    d_middle = tl.zeros((BLOCK_D,), tl.float32)
    for own_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
        d_v = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for group in range(groups):
            query_head = head * groups + group
            pair = (batch * key_heads + head) * groups + group
            scale = load_scale(beta + batch * beta_batch + query_head * beta_head, rows, beta_token, kept)
            own_weight = tl.zeros((BLOCK_N,), tl.float32)
            if HAS_WEIGHT:
                place_of_weight = weight + batch * weight_batch + query_head * weight_head
                own_weight = load_scale(place_of_weight, rows, weight_token, kept)
            other = 0.0
            if CENTERED:
                other = load_vector(other_center + batch * other_center_batch + query_head * D, D, BLOCK_D)
            logs = weigh(x, scale, own_weight, middle, other, kept, D, BLOCK_D, CENTERED, NORMALIZED)
            own_mass = tl.load(mass + pair * BLOCK_D + features)
            shares = tl.where(kept[:, None], tl.exp(logs - own_mass[None, :]), 0.0)
            columns = own_first + tl.arange(0, BLOCK_V)
            own_sums = tl.load(sums + (pair * BLOCK_D + features[:, None]) * width + columns[None, :])
            d_v = dot(shares, own_sums, d_v, PRECISION)
            if own_first == 0:
                d_logs = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
                d_logs += tl.load(shift + pair * BLOCK_D + features)[None, :]
                for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
                    v = load_rows(value, rows, value_token, kept, V, BLOCK_V, value_first)
                    some = value_first + tl.arange(0, BLOCK_V)
                    sums_t = tl.load(sums + (pair * BLOCK_D + features[None, :]) * width + some[:, None])
                    d_logs = dot(v, sums_t, d_logs, PRECISION)
                d_logs = d_logs * shares
                inner, of_column, of_scale = key_gradient(
                    x, d_logs, scale, middle, other, D, BLOCK_D, CENTERED, NORMALIZED
                )
                d_x += inner
                if CENTERED:
                    d_x += of_column[:, None] * other[None, :] * (D**-0.5)
                if SCALE_GRADIENT:
                    tl.store(d_beta + pair * tokens + rows, of_scale, mask=is_row)
                if WEIGHT_GRADIENT:
                    tl.store(d_weight + pair * tokens + rows, of_column, mask=is_row)
                if CENTER_GRADIENT:
                    d_middle -= tl.sum(inner, axis=0)
                    of_other = tl.sum(x * of_column[:, None], axis=0) * (D**-0.5)
                    tl.store(d_other_center + (pair * tiles + tile) * BLOCK_D + features, of_other)
        store_rows(d_value, d_v, rows, d_value_token, is_row, V, BLOCK_V, own_first)
    d_x = tl.where(kept[:, None], d_x, 0.0)
    store_rows(d_key, d_x, rows, d_key_token, is_row, D, BLOCK_D, 0)
    if CENTER_GRADIENT:
        tl.store(d_center + place * BLOCK_D + features, d_middle)
