"""Gradients of log-weights become gradients of queries, keys, scales, log-weights and centres."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import (
    Rows,
    kept_rows,
    load_center,
    load_rows,
    load_scale,
    place_of,
    shares_of,
    store_rows,
)
from lln.backends.triton.kernels.summary import load_queries


class KeyGradients(NamedTuple):
    """Where gradients of keys and values, beta and log-weights (B, H, tokens) and centres (of each program) go;
    None for those that are not asked for."""

    key: Rows | None
    value: Rows | None
    beta: Any
    weight: Any
    center: Any
    other_center: Any


@triton.jit
def load_kept_keys(keys, batch, head, tile, tokens, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of a tile, which are tokens, which are kept, and the keys."""
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, kept = kept_rows(keys.keep, batch, rows, tokens)
    return rows, is_row, kept, load_rows(keys.rows, batch, head, rows, kept, D, BLOCK_D, 0)


@triton.jit
def add_key_gradients(
    d_x,
    d_middle,
    into,
    x,
    d_logs,
    scale,
    middle,
    other,
    pair,
    tile,
    rows,
    is_row,
    tokens,
    tiles,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """d_x and d_middle with what the log-weights of keys x for one query head add (see `weigh`); the rest is stored."""
    y = x
    if CENTERED:
        y = x - middle[None, :]
    of_column = tl.sum(d_logs, axis=1)
    inner = d_logs
    if NORMALIZED:
        shares, _ = shares_of(y, scale, D, BLOCK_D)
        inner = d_logs - shares * of_column[:, None]
    if into.beta is not None:
        tl.store(into.beta + pair * tokens + rows, tl.sum(inner * y, axis=1), mask=is_row)
    if into.weight is not None:
        tl.store(into.weight + pair * tokens + rows, of_column, mask=is_row)
    inner = inner * scale[:, None]
    d_x += inner
    if CENTERED:
        d_x += of_column[:, None] * other[None, :] * (D**-0.5)
    if into.center is not None:
        d_middle -= tl.sum(inner, axis=0)
        of_other = tl.sum(x * of_column[:, None], axis=0) * (D**-0.5)
        tl.store(into.other_center + (pair * tiles + tile) * BLOCK_D + tl.arange(0, BLOCK_D), of_other)
    return d_x, d_middle


@triton.jit(do_not_specialize=("heads", "tokens", "tiles"))
def finish_queries_kernel(
    queries,
    d_logs,
    d_query,
    d_alpha,
    d_center,
    heads,
    tokens,
    tiles,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradient of queries, from that of a = alpha (q - center)."""
    place, pair, tile, batch, head = place_of(tiles, heads)
    middle = load_center(queries.center, batch, head, D, BLOCK_D)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    _, q, scale, is_row, usable = load_queries(queries, middle, batch, head, rows, tokens, D, BLOCK_D)
    total = load_rows(d_logs, batch, head, rows, is_row & usable, D, BLOCK_D, 0)
    d_q = total * scale[:, None]
    store_rows(d_query, batch, head, rows, is_row, d_q, D, BLOCK_D, 0)
    if d_alpha is not None:
        tl.store(d_alpha + pair * tokens + rows, tl.sum(total * q, axis=1), mask=is_row)
    if d_center is not None:
        tl.store(d_center + place * BLOCK_D + tl.arange(0, BLOCK_D), -tl.sum(d_q, axis=0))


@triton.jit(do_not_specialize=("key_heads", "tokens", "tiles"))
def finish_keys_kernel(
    keys,
    d_logs,
    d_values,
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
):
    """The gradients of keys and values, from those of the log-weights and values of each query head."""
    place, key_pair, tile, batch, head = place_of(tiles, key_heads)
    middle = load_center(keys.center, batch, head, D, BLOCK_D)
    rows, is_row, kept, x = load_kept_keys(keys, batch, head, tile, tokens, D, BLOCK_D, BLOCK_N)
    d_x = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    d_middle = tl.zeros((BLOCK_D,), tl.float32)
    for group in range(groups):
        query_head = head * groups + group
        total = load_rows(d_logs, batch, query_head, rows, kept, D, BLOCK_D, 0)
        scale = load_scale(keys.scale, batch, query_head, rows, kept)
        other = load_center(keys.other_center, batch, query_head, D, BLOCK_D)
        d_x, d_middle = add_key_gradients(
            d_x,
            d_middle,
            into,
            x,
            total,
            scale,
            middle,
            other,
            key_pair * groups + group,
            tile,
            rows,
            is_row,
            tokens,
            tiles,
            D,
            BLOCK_D,
            keys.center is not None,
            NORMALIZED,
        )
    store_rows(into.key, batch, head, rows, is_row, d_x, D, BLOCK_D, 0)
    if into.center is not None:
        tl.store(into.center + place * BLOCK_D + tl.arange(0, BLOCK_D), d_middle)
    for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
        d_v = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for group in range(groups):
            d_v += load_rows(d_values, batch, head * groups + group, rows, kept, V, BLOCK_V, value_first)
        store_rows(into.value, batch, head, rows, is_row, d_v, V, BLOCK_V, value_first)


@triton.jit(do_not_specialize=("heads", "tokens", "tiles"))
def row_dots_kernel(
    x,
    y,
    dots,
    heads,
    tokens,
    tiles,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x . y of each row."""
    _place, pair, tile, batch, head = place_of(tiles, heads)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < tokens
    own_x = load_rows(x, batch, head, rows, is_row, V, BLOCK_V, 0)
    own_y = load_rows(y, batch, head, rows, is_row, V, BLOCK_V, 0)
    tl.store(dots + pair * tokens + rows, tl.sum(own_x * own_y, axis=1), mask=is_row)
