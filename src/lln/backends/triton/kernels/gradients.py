"""Gradients of log-weights become gradients of queries, keys, scales, log-weights and centres."""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import kept_rows, load_rows, load_scale, load_vector, shares_of, store_rows
from lln.backends.triton.kernels.summary import load_queries


@triton.jit
def key_gradient(
    x,
    d_logs,
    scale,
    center,
    other_center,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """From the gradient of the log-weights of keys x (see `weigh`): that of x - center, of the column weight that is
    added to all features, and of the scale."""
    y = x
    if CENTERED:
        y = x - center[None, :]
    of_column = tl.sum(d_logs, axis=1)
    inner = d_logs
    if NORMALIZED:
        shares, _ = shares_of(y, scale, D, BLOCK_D)
        inner = d_logs - shares * of_column[:, None]
    return inner * scale[:, None], of_column, tl.sum(inner * y, axis=1)


@triton.jit
def finish_queries_kernel(
    query,
    keep,
    alpha,
    center,
    d_logs,
    d_query,
    d_alpha,
    d_center,
    query_batch,
    query_head,
    query_token,
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
    tiles,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    CENTERED: tl.constexpr,
    SCALE_GRADIENT: tl.constexpr,
    CENTER_GRADIENT: tl.constexpr,
):
    """The gradient of queries, from that of a = alpha (q - center)."""
    place = tl.program_id(0).to(tl.int64)
    pair, tile = place // tiles, place % tiles
    batch, head = pair // heads, pair % heads
    query += batch * query_batch + head * query_head
    d_query += batch * d_query_batch + head * d_query_head
    middle = 0.0
    if CENTERED:
        middle = load_vector(center + batch * center_batch + head * D, D, BLOCK_D)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    _, q, scale, is_row, usable = load_queries(
        query,
        keep + batch * keep_batch,
        alpha + batch * alpha_batch + head * alpha_head,
        middle,
        rows,
        tokens,
        query_token,
        alpha_token,
        D,
        BLOCK_D,
        HAS_KEEP,
        CENTERED,
    )
    total = load_rows(d_logs + pair * tokens * D, rows, D, is_row & usable, D, BLOCK_D, 0)
    store_rows(d_query, total * scale[:, None], rows, d_query_token, is_row, D, BLOCK_D, 0)
    if SCALE_GRADIENT:
        tl.store(d_alpha + pair * tokens + rows, tl.sum(total * q, axis=1), mask=is_row)
    if CENTER_GRADIENT:
        tl.store(d_center + place * BLOCK_D + tl.arange(0, BLOCK_D), -tl.sum(total * scale[:, None], axis=0))


@triton.jit
def finish_keys_kernel(
    key,
    keep,
    beta,
    center,
    other_center,
    d_logs,
    d_values,
    d_key,
    d_value,
    d_beta,
    d_weight,
    d_center,
    d_other_center,
    key_batch,
    key_head,
    key_token,
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
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCALE_GRADIENT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    CENTER_GRADIENT: tl.constexpr,
):
    """The gradients of keys and values, from those of the log-weights and values of each query head."""
    place = tl.program_id(0).to(tl.int64)
    key_pair, tile = place // tiles, place % tiles
    batch, head = key_pair // key_heads, key_pair % key_heads
    key += batch * key_batch + head * key_head
    d_key += batch * d_key_batch + head * d_key_head
    d_value += batch * d_value_batch + head * d_value_head
    middle = 0.0
    if CENTERED:
        middle = load_vector(center + batch * center_batch + head * D, D, BLOCK_D)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, kept = kept_rows(keep + batch * keep_batch, rows, tokens, HAS_KEEP)
    x = load_rows(key, rows, key_token, kept, D, BLOCK_D, 0)
    d_x = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    d_middle = tl.zeros((BLOCK_D,), tl.float32)
    for group in range(groups):
        query_head = head * groups + group
        pair = batch * key_heads * groups + query_head
        total = load_rows(d_logs + pair * tokens * D, rows, D, kept, D, BLOCK_D, 0)
        scale = load_scale(beta + batch * beta_batch + query_head * beta_head, rows, beta_token, kept)
        other = 0.0
        if CENTERED:
            other = load_vector(other_center + batch * other_center_batch + query_head * D, D, BLOCK_D)
        inner, of_column, of_scale = key_gradient(x, total, scale, middle, other, D, BLOCK_D, CENTERED, NORMALIZED)
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
            tl.store(d_other_center + (pair * tiles + tile) * BLOCK_D + tl.arange(0, BLOCK_D), of_other)
    store_rows(d_key, d_x, rows, d_key_token, is_row, D, BLOCK_D, 0)
    if CENTER_GRADIENT:
        tl.store(d_center + place * BLOCK_D + tl.arange(0, BLOCK_D), d_middle)
    for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
        d_v = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for group in range(groups):
            pair = (batch * key_heads + head) * groups + group
            d_v += load_rows(d_values + pair * tokens * V, rows, V, kept, V, BLOCK_V, value_first)
        store_rows(d_value, d_v, rows, d_value_token, is_row, V, BLOCK_V, value_first)


@triton.jit
def row_dots_kernel(
    x,
    y,
    dots,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    heads,
    tokens,
    tiles,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x . y of each row."""
    place = tl.program_id(0).to(tl.int64)
    pair, tile = place // tiles, place % tiles
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < tokens
    own_x = load_rows(x + pair // heads * x_batch + pair % heads * x_head, rows, x_token, is_row, V, BLOCK_V, 0)
    own_y = load_rows(y + pair // heads * y_batch + pair % heads * y_head, rows, y_token, is_row, V, BLOCK_V, 0)
    tl.store(dots + pair * tokens + rows, tl.sum(own_x * own_y, axis=1), mask=is_row)
