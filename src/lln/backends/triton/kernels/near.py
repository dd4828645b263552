"""Softmax attention among neighbours: inside blocks of kept tokens, or in a window of them around each.

Tokens are met in the order of their rank among the kept ones: `order` (B, N) has the kept tokens first, and `counts`
(B,) says how many those are. By rank, i sees j from i - left to i + right in its own block of `size` tokens: a window
has one block of all tokens, and blocks have `left` and `right` of their size, or `right` 0. A token that is not kept
gets zeros.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import (
    ABSENT,
    LARGEST,
    Rows,
    dot,
    load_rows,
    load_scale,
    nan_where,
    place_of,
    store_rows,
)

COUNTS = ("heads", "key_heads", "tokens", "tiles", "left", "right", "size")


class Tokens(NamedTuple):
    """Query, key and value, and the order of kept tokens if some are not."""

    query: Rows
    key: Rows
    value: Rows
    order: Any
    counts: Any


@triton.jit
def count_of(x, batch, tokens):
    """The number of kept tokens."""
    count = tokens
    if x.order is not None:
        count = tl.load(x.counts + batch)
    return count


@triton.jit
def rows_of_ranks(x, batch, ranks, tokens):
    rows = ranks
    if x.order is not None:
        rows = tl.load(x.order + batch * tokens + ranks, mask=(ranks >= 0) & (ranks < tokens), other=0)
    return rows


@triton.jit
def seen_from(i, count, left, right, size):
    """The ranks from and to which rank i sees; none if i is not a kept token. With `left` and `right` exchanged, those
    that see i."""
    block = i // size * size
    low = tl.maximum(i - left, block)
    high = tl.minimum(tl.minimum(i + right + 1, block + size), count)
    return low, tl.where(i < count, high, low)


@triton.jit
def seen_from_tile(first, count, left, right, size, TILE: tl.constexpr):
    """The ranks from and to which any of the ranks `first` to `first + TILE` sees."""
    start, _ = seen_from(first, count, left, right, size)
    _, end = seen_from(tl.minimum(first + TILE, count) - 1, count, left, right, size)
    return start, tl.where(first < count, end, start)


@triton.jit
def ranks_of_tile(x, batch, tile, tokens, left, right, size, TILE: tl.constexpr):
    """The ranks of a tile, which of them are kept tokens, their rows, the ranks that each of them sees, and those that
    any of them sees."""
    count = count_of(x, batch, tokens)
    first = (tile * TILE).to(tl.int32)
    i = first + tl.arange(0, TILE)
    low, high = seen_from(i, count, left, right, size)
    start, end = seen_from_tile(first, count, left, right, size, TILE)
    return i, i < count, rows_of_ranks(x, batch, i, tokens), low, high, start, end


@triton.jit
def load_keys(
    x,
    batch,
    head,
    first,
    end,
    low,
    high,
    tokens,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The keys and values of some ranks, and which queries see them: those with ranks from `low` to `high`."""
    j = first + tl.arange(0, BLOCK_M)
    rows = rows_of_ranks(x, batch, j, tokens)
    k = load_rows(x.key, batch, head, rows, j < end, D, BLOCK_D, 0)
    v = load_rows(x.value, batch, head, rows, j < end, V, BLOCK_V, 0)
    return k, v, (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])


@triton.jit(do_not_specialize=COUNTS)
def near_kernel(
    x,
    output,
    logs,
    heads,
    groups,
    tokens,
    tiles,
    left,
    right,
    size,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output, and the logsumexp of the scores of each token."""
    _place, pair, tile, batch, head = place_of(tiles, heads)
    row_head = head // groups
    i, there, rows, low, high, start, end = ranks_of_tile(x, batch, tile, tokens, left, right, size, BLOCK_N)
    q = load_rows(x.query, batch, head, rows, there, D, BLOCK_D, 0) * scale
    top = tl.full((BLOCK_N,), ABSENT, tl.float32)
    weight = tl.zeros((BLOCK_N,), tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    odd = tl.zeros((BLOCK_N,), tl.float32)
    for key_first in range(start, end, BLOCK_M):
        k, v, allowed = load_keys(
            x, batch, row_head, key_first, end, low, high, tokens, D, V, BLOCK_D, BLOCK_V, BLOCK_M
        )
        # A value that is not seen weighs 0, yet 0 times NaN is NaN.
        odd_value = tl.max(tl.where(tl.abs(v) <= LARGEST, 0.0, 1.0), axis=1)
        v = tl.where((odd_value > 0.0)[:, None], 0.0, v)
        odd = tl.maximum(odd, tl.max(tl.where(allowed, odd_value[None, :], 0.0), axis=1))
        scores = dot(q, tl.trans(k), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), PRECISION)
        scores = tl.where(allowed, scores, ABSENT)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp(top - new_top)
        shares = tl.where(allowed, tl.exp(scores - new_top[:, None]), 0.0)
        weight = weight * fade + tl.sum(shares, axis=1)
        total = dot(shares, v, total * fade[:, None], PRECISION)
        top = new_top
    safe = tl.where(there, weight, 1.0)
    result = tl.where(there[:, None], total / safe[:, None] + nan_where(odd > 0.0)[:, None], 0.0)
    store_rows(output, batch, head, rows, i < tokens, result, V, BLOCK_V, 0)
    tl.store(logs + pair * tokens + rows, tl.where(there, top + tl.log(safe), 0.0), mask=i < tokens)


@triton.jit
def shares_of_keys(q, k, logs, allowed, PRECISION: tl.constexpr):
    """The weights of keys for queries."""
    scores = dot(q, tl.trans(k), tl.zeros_like(allowed.to(tl.float32)), PRECISION)
    return tl.exp(tl.where(allowed, scores - logs[:, None], ABSENT))


@triton.jit
def score_gradients(shares, g, v, dots, allowed, PRECISION: tl.constexpr):
    d_shares = dot(g, tl.trans(v), tl.zeros_like(shares), PRECISION) - dots[:, None]
    return tl.where(allowed, shares * d_shares, 0.0)


@triton.jit(do_not_specialize=COUNTS)
def near_queries_backward_kernel(
    x,
    gradient,
    logs,
    d_logs,
    dots,
    d_query,
    heads,
    groups,
    tokens,
    tiles,
    left,
    right,
    size,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_query, and g . out of each token less the gradient of its logsumexp, which may be None; or ABSENT where both
    gradients are 0: such a query counts for nothing to the keys, because 0 times what is not finite of it would be NaN.
    """
    _place, pair, tile, batch, head = place_of(tiles, heads)
    row_head = head // groups
    i, there, rows, low, high, start, end = ranks_of_tile(x, batch, tile, tokens, left, right, size, BLOCK_N)
    q = load_rows(x.query, batch, head, rows, there, D, BLOCK_D, 0) * scale
    g = load_rows(gradient, batch, head, rows, there, V, BLOCK_V, 0)
    own_logs = load_scale(logs, batch, head, rows, there)
    d_q = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # g . out from the same weights and products as below: where a key has all weight, its gradient cancels exactly.
    own_dots = tl.zeros((BLOCK_N,), tl.float32)
    for key_first in range(start, end, BLOCK_M):
        k, v, allowed = load_keys(
            x, batch, row_head, key_first, end, low, high, tokens, D, V, BLOCK_D, BLOCK_V, BLOCK_M
        )
        shares = shares_of_keys(q, k, own_logs, allowed, PRECISION)
        own_dots += tl.sum(score_gradients(shares, g, v, own_logs * 0.0, allowed, PRECISION), axis=1)
    counts = tl.max(tl.where(g == 0.0, 0.0, 1.0), axis=1) > 0.0
    if d_logs is not None:
        of_logs = load_scale(d_logs, batch, head, rows, there)
        own_dots -= of_logs
        counts = counts | (of_logs != 0.0)
    tl.store(dots + pair * tokens + rows, tl.where(counts, own_dots, ABSENT), mask=there)
    for key_first in range(start, end, BLOCK_M):
        k, v, allowed = load_keys(
            x, batch, row_head, key_first, end, low, high, tokens, D, V, BLOCK_D, BLOCK_V, BLOCK_M
        )
        shares = shares_of_keys(q, k, own_logs, allowed, PRECISION)
        # A key that is not seen has the gradient 0, yet 0 times NaN is NaN. One that is seen has made `own_logs` NaN.
        finite_k = tl.where(tl.abs(k) <= LARGEST, k, 0.0)
        d_q = dot(score_gradients(shares, g, v, own_dots, allowed, PRECISION), finite_k, d_q, PRECISION)
    store_rows(d_query, batch, head, rows, i < tokens, d_q * scale, D, BLOCK_D, 0)


@triton.jit(do_not_specialize=COUNTS)
def near_keys_backward_kernel(
    x,
    gradient,
    logs,
    dots,
    d_key,
    d_value,
    key_heads,
    groups,
    tokens,
    tiles,
    left,
    right,
    size,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d_key and d_value of a tile of a key head: the sum over its query heads."""
    _place, _pair, tile, batch, row_head = place_of(tiles, key_heads)
    # With `left` and `right` exchanged: the queries that see each key.
    j, there, rows, low, high, start, end = ranks_of_tile(x, batch, tile, tokens, right, left, size, BLOCK_M)
    k = load_rows(x.key, batch, row_head, rows, there, D, BLOCK_D, 0)
    v = load_rows(x.value, batch, row_head, rows, there, V, BLOCK_V, 0)
    d_k = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    d_v = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for group in range(groups):
        head = row_head * groups + group
        for query_first in range(start, end, BLOCK_N):
            i = query_first + tl.arange(0, BLOCK_N)
            query_rows = rows_of_ranks(x, batch, i, tokens)
            own_dots = load_scale(dots, batch, head, query_rows, i < end)
            counts = (i < end) & (own_dots != ABSENT)
            # Scaled as in `near_kernel`: a score that is rounded otherwise would not fit its logsumexp.
            q = load_rows(x.query, batch, head, query_rows, counts, D, BLOCK_D, 0) * scale
            g = load_rows(gradient, batch, head, query_rows, counts, V, BLOCK_V, 0)
            own_logs = load_scale(logs, batch, head, query_rows, counts)
            allowed = (i[:, None] >= low[None, :]) & (i[:, None] < high[None, :]) & counts[:, None]
            shares = shares_of_keys(q, k, own_logs, allowed, PRECISION)
            d_v = dot(tl.trans(shares), g, d_v, PRECISION)
            d_k = dot(tl.trans(score_gradients(shares, g, v, own_dots, allowed, PRECISION)), q, d_k, PRECISION)
    store_rows(d_key, batch, row_head, rows, j < tokens, d_k, D, BLOCK_D, 0)
    store_rows(d_value, batch, row_head, rows, j < tokens, d_v, V, BLOCK_V, 0)
