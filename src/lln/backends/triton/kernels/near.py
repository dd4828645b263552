"""Softmax attention among neighbours: inside blocks of kept tokens, or in a window of them around each.

Tokens are met in the order of their rank among the kept ones: `order` (B, N) has the kept tokens first, and `counts`
(B,) says how many those are. By rank, i sees j from i - LEFT to i + RIGHT (IS_WINDOW), or in its own block of LEFT
tokens, up to i if RIGHT is 0. A token that is not kept gets zeros.
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import ABSENT, LARGEST, dot, load_rows, nan_where, store_rows


@triton.jit
def rows_of_ranks(order, ranks, tokens, HAS_ORDER: tl.constexpr):
    if HAS_ORDER:
        return tl.load(order + ranks, mask=(ranks >= 0) & (ranks < tokens), other=0)
    return ranks


@triton.jit
def keys_seen(first, count, left, right, TILE: tl.constexpr, IS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """The ranks of the keys that queries `first` to `first + TILE` see, from and to."""
    if IS_WINDOW:
        return tl.maximum(first - left, 0), tl.minimum(first + TILE + right, count)
    end = tl.minimum(first + TILE, count)
    start = first // left * left
    if IS_CAUSAL:
        return start, end
    return start, tl.minimum((end + left - 1) // left * left, count)


@triton.jit
def queries_that_see(first, count, left, right, TILE: tl.constexpr, IS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """The ranks of the queries that see keys `first` to `first + TILE`, from and to."""
    if IS_WINDOW:
        return tl.maximum(first - right, 0), tl.minimum(first + TILE + left, count)
    end = tl.minimum((tl.minimum(first + TILE, count) + left - 1) // left * left, count)
    if IS_CAUSAL:
        return first, end
    return first // left * left, end


@triton.jit
def meets(i, j, count, left, right, IS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Whether query i sees key j."""
    there = (i < count) & (j < count)
    if IS_WINDOW:
        return there & (j >= i - left) & (j <= i + right)
    same = there & (i // left == j // left)
    if IS_CAUSAL:
        return same & (j <= i)
    return same


@triton.jit
def near_kernel(
    query,
    key,
    value,
    order,
    counts,
    output,
    logs,
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
    heads,
    groups,
    tokens,
    tiles,
    left,
    right,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    IS_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output, and the logsumexp of the scores of each token."""
    place = tl.program_id(0).to(tl.int64)
    pair, tile = place // tiles, place % tiles
    batch, head = pair // heads, pair % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // groups * key_head
    value += batch * value_batch + head // groups * value_head
    output += batch * output_batch + head * output_head
    order += batch * tokens
    count = tokens
    if HAS_ORDER:
        count = tl.load(counts + batch)
    first = (tile * BLOCK_N).to(tl.int32)
    i = first + tl.arange(0, BLOCK_N)
    rows = rows_of_ranks(order, i, tokens, HAS_ORDER)
    q = load_rows(query, rows, query_token, i < count, D, BLOCK_D, 0) * scale
    top = tl.full((BLOCK_N,), ABSENT, tl.float32)
    weight = tl.zeros((BLOCK_N,), tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    odd = tl.zeros((BLOCK_N,), tl.float32)
    start, end = keys_seen(first, count, left, right, BLOCK_N, IS_WINDOW, IS_CAUSAL)
    for key_first in range(start, end, BLOCK_M):
        j = key_first + tl.arange(0, BLOCK_M)
        key_rows = rows_of_ranks(order, j, tokens, HAS_ORDER)
        k = load_rows(key, key_rows, key_token, j < end, D, BLOCK_D, 0)
        v = load_rows(value, key_rows, value_token, j < end, V, BLOCK_V, 0)
        allowed = meets(i[:, None], j[None, :], count, left, right, IS_WINDOW, IS_CAUSAL)
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
    there = i < count
    safe = tl.where(there, weight, 1.0)
    result = tl.where(there[:, None], total / safe[:, None] + nan_where(odd > 0.0)[:, None], 0.0)
    store_rows(output, result, rows, output_token, i < tokens, V, BLOCK_V, 0)
    tl.store(logs + pair * tokens + rows, top + tl.log(safe), mask=i < tokens)


@triton.jit
def near_queries_backward_kernel(
    query,
    key,
    value,
    order,
    counts,
    gradient,
    logs,
    dots,
    d_query,
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
    d_query_batch,
    d_query_head,
    d_query_token,
    heads,
    groups,
    tokens,
    tiles,
    left,
    right,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    IS_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    pair, tile = place // tiles, place % tiles
    batch, head = pair // heads, pair % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // groups * key_head
    value += batch * value_batch + head // groups * value_head
    gradient += batch * gradient_batch + head * gradient_head
    d_query += batch * d_query_batch + head * d_query_head
    order += batch * tokens
    count = tokens
    if HAS_ORDER:
        count = tl.load(counts + batch)
    first = (tile * BLOCK_N).to(tl.int32)
    i = first + tl.arange(0, BLOCK_N)
    there = i < count
    rows = rows_of_ranks(order, i, tokens, HAS_ORDER)
    q = load_rows(query, rows, query_token, there, D, BLOCK_D, 0) * scale
    g = load_rows(gradient, rows, gradient_token, there, V, BLOCK_V, 0)
    own_logs = tl.load(logs + pair * tokens + rows, mask=there, other=0.0)
    own_dots = tl.load(dots + pair * tokens + rows, mask=there, other=0.0)
    d_q = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start, end = keys_seen(first, count, left, right, BLOCK_N, IS_WINDOW, IS_CAUSAL)
    for key_first in range(start, end, BLOCK_M):
        j = key_first + tl.arange(0, BLOCK_M)
        key_rows = rows_of_ranks(order, j, tokens, HAS_ORDER)
        k = load_rows(key, key_rows, key_token, j < end, D, BLOCK_D, 0)
        v = load_rows(value, key_rows, value_token, j < end, V, BLOCK_V, 0)
        allowed = meets(i[:, None], j[None, :], count, left, right, IS_WINDOW, IS_CAUSAL)
        zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        scores = tl.where(allowed, dot(q, tl.trans(k), zero, PRECISION) - own_logs[:, None], ABSENT)
        d_shares = dot(g, tl.trans(v), zero, PRECISION) - own_dots[:, None]
        d_q = dot(tl.where(allowed, tl.exp(scores) * d_shares, 0.0), k, d_q, PRECISION)
    store_rows(d_query, d_q * scale, rows, d_query_token, i < tokens, D, BLOCK_D, 0)


@triton.jit
def near_keys_backward_kernel(
    query,
    key,
    value,
    order,
    counts,
    gradient,
    logs,
    dots,
    d_key,
    d_value,
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
    d_key_batch,
    d_key_head,
    d_key_token,
    d_value_batch,
    d_value_head,
    d_value_token,
    key_heads,
    groups,
    tokens,
    tiles,
    left,
    right,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    IS_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
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
    order += batch * tokens
    count = tokens
    if HAS_ORDER:
        count = tl.load(counts + batch)
    first = (tile * BLOCK_M).to(tl.int32)
    j = first + tl.arange(0, BLOCK_M)
    there = j < count
    rows = rows_of_ranks(order, j, tokens, HAS_ORDER)
    k = load_rows(key, rows, key_token, there, D, BLOCK_D, 0) * scale
    v = load_rows(value, rows, value_token, there, V, BLOCK_V, 0)
    d_k = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    d_v = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    start, end = queries_that_see(first, count, left, right, BLOCK_M, IS_WINDOW, IS_CAUSAL)
    for group in range(groups):
        query_head_index = head * groups + group
        pair = key_pair * groups + group
        own_query = query + batch * query_batch + query_head_index * query_head
        own_gradient = gradient + batch * gradient_batch + query_head_index * gradient_head
        for query_first in range(start, end, BLOCK_N):
            i = query_first + tl.arange(0, BLOCK_N)
            query_rows = rows_of_ranks(order, i, tokens, HAS_ORDER)
            q = load_rows(own_query, query_rows, query_token, i < end, D, BLOCK_D, 0)
            g = load_rows(own_gradient, query_rows, gradient_token, i < end, V, BLOCK_V, 0)
            own_logs = tl.load(logs + pair * tokens + query_rows, mask=i < end, other=0.0)
            own_dots = tl.load(dots + pair * tokens + query_rows, mask=i < end, other=0.0)
            allowed = meets(i[:, None], j[None, :], count, left, right, IS_WINDOW, IS_CAUSAL)
            zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            scores = tl.where(allowed, dot(q, tl.trans(k), zero, PRECISION) - own_logs[:, None], ABSENT)
            shares = tl.exp(scores)
            d_shares = dot(g, tl.trans(v), zero, PRECISION) - own_dots[:, None]
            d_scores = tl.where(allowed, shares * d_shares, 0.0)
            d_v = dot(tl.trans(shares), g, d_v, PRECISION)
            d_k = dot(tl.trans(d_scores), q, d_k, PRECISION)
    store_rows(d_key, d_k * scale, rows, d_key_token, j < tokens, D, BLOCK_D, 0)
    store_rows(d_value, d_v, rows, d_value_token, j < tokens, V, BLOCK_V, 0)
