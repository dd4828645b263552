"""Statistics of queries and keys, and the alpha and beta that follow from them: see `lln.matching.moments`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import LARGEST, dot, kept_rows, load_center, load_rows, nan_where, place_of

COUNTS = ("batches", "heads", "key_heads", "tokens", "key_tokens", "query_split_tokens", "key_split_tokens")
COUNTS += ("query_splits", "key_splits")
LARGEST_ENTRY = tl.constexpr(1e15)
SMALLEST_SIGMA = tl.constexpr(1e-30)
MAX_SCORE_VARIANCE = tl.constexpr(1e6)
TINY = tl.constexpr(1.1754943508222875e-38)


class Curve(NamedTuple):
    """The matching curve, (ROWS, COLUMNS) of log-spreads, and the paper's line: `lln.matching.curves`."""

    table: Any
    a: float
    b: float
    log_start: float
    log_ratio: float
    log_count: float
    log_count_ratio: float


class Moments(NamedTuple):
    """Mean, sums of centred squares and number of the kept tokens of each split of each head."""

    means: Any
    squares: Any
    counts: Any


@triton.jit
def bounded(x):
    return tl.where(x > LARGEST_ENTRY, LARGEST_ENTRY, tl.where(x < -LARGEST_ENTRY, -LARGEST_ENTRY, x))


@triton.jit
def is_stored(features, columns):
    """Which squares are in memory: those above the diagonal, from the sector of 32 bytes that it is in."""
    return features[:, None] // 8 <= columns[None, :] // 8


@triton.jit
def measure(
    x,
    keep,
    center,
    into,
    heads,
    tokens,
    split_tokens,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`Moments` of a split of a head, of tokens less a centre if there is one.

    The centre is taken off the tokens, not off their mean, which is rounded: nothing is left of equal tokens. Tiles of
    tokens are centred around their own mean, and what the means of two differ by is added where they are put together
    (Chan, Golub and LeVeque), so nothing cancels. A program has BLOCK_C columns of the squares.
    """
    place, _pair, split, batch, head = place_of(splits, heads)
    column = tl.program_id(1)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    features = tl.arange(0, BLOCK_D)
    columns = column * BLOCK_C + tl.arange(0, BLOCK_C)
    middle = load_center(center, batch, head, D, BLOCK_D)
    middle_c = load_center(center, batch, head, D, BLOCK_C, column * BLOCK_C)
    mean = tl.zeros((BLOCK_D,), tl.float32)
    mean_c = tl.zeros((BLOCK_C,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    count = 0.0
    odd = 0.0
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        _, kept = kept_rows(keep, batch, rows, end)
        tile = load_rows(x, batch, head, rows, kept, D, BLOCK_D, 0)
        odd = tl.maximum(odd, tl.max(tl.max(tl.where(tl.abs(tile) <= LARGEST, 0.0, 1.0), axis=1), axis=0))
        if center is not None:
            tile = tl.where(kept[:, None], tile - middle[None, :], 0.0)
        tile = bounded(tile)
        new = tl.sum(kept.to(tl.float32), axis=0)
        new_mean = tl.sum(tile, axis=0) / tl.maximum(new, 1.0)
        centred = tl.where(kept[:, None] & (features < D)[None, :], tile - new_mean[None, :], 0.0)
        share = new / tl.maximum(count + new, 1.0)
        step = new_mean - mean
        if BLOCK_C == BLOCK_D:
            step_c = step
            centred_c = centred
        else:
            tile_c = load_rows(x, batch, head, rows, kept, D, BLOCK_C, column * BLOCK_C)
            if center is not None:
                tile_c = tl.where(kept[:, None], tile_c - middle_c[None, :], 0.0)
            tile_c = bounded(tile_c)
            new_mean_c = tl.sum(tile_c, axis=0) / tl.maximum(new, 1.0)
            centred_c = tl.where(kept[:, None] & (columns < D)[None, :], tile_c - new_mean_c[None, :], 0.0)
            step_c = new_mean_c - mean_c
            mean_c += step_c * share
        total += step[:, None] * (step_c * (count * share))[None, :]
        total = dot(tl.trans(centred), centred_c, total, PRECISION)
        mean += step * share
        count += new
    target = into.squares + place * BLOCK_D * BLOCK_D + features[:, None] * BLOCK_D + columns[None, :]
    tl.store(target, total, mask=is_stored(features, columns))
    if column == 0:
        tl.store(into.means + place * BLOCK_D + features, mean + nan_where(odd > 0.0))
        tl.store(into.counts + place, count)


@triton.jit(do_not_specialize=COUNTS)
def moments_kernel(
    query,
    key,
    keep_query,
    keep_key,
    center_query,
    center_key,
    queries,
    keys,
    batches,
    heads,
    key_heads,
    tokens,
    key_tokens,
    query_split_tokens,
    key_split_tokens,
    query_splits,
    key_splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`Moments` of queries and of keys, side by side: each alone has too few programs for all multiprocessors."""
    place = tl.program_id(0)
    if tl.program_id(2) == 0:
        if place < batches * heads * query_splits:
            measure(
                query,
                keep_query,
                center_query,
                queries,
                heads,
                tokens,
                query_split_tokens,
                query_splits,
                D,
                BLOCK_D,
                BLOCK_C,
                BLOCK_N,
                PRECISION,
            )
    elif place < batches * key_heads * key_splits:
        measure(
            key,
            keep_key,
            center_key,
            keys,
            key_heads,
            key_tokens,
            key_split_tokens,
            key_splits,
            D,
            BLOCK_D,
            BLOCK_C,
            BLOCK_N,
            PRECISION,
        )


@triton.jit
def divide(share, sigma):
    return tl.where(sigma <= SMALLEST_SIGMA, 0.0, share / tl.where(sigma <= SMALLEST_SIGMA, 1.0, sigma))


@triton.jit
def along(line, left, right):
    return tl.load(line + left) * (1.0 - right) + tl.load(line + left + 1) * right


@triton.jit
def matched_spread(
    variance,
    num_keys,
    curve,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
    D: tl.constexpr,
):
    """`lln.matching.curves.matched_spread`; ROWS is 0 for the paper's line, NARROW for the forms but the paper's."""
    variance = tl.where(variance > MAX_SCORE_VARIANCE, MAX_SCORE_VARIANCE, variance)
    if ROWS == 0:
        line = (variance - curve.b) / curve.a
        return tl.where(line < 0.0, 0.0, line)
    known = variance > TINY  # not so for NaN
    log_variance = tl.log(tl.where(known, variance, TINY))
    column = (log_variance - curve.log_start) / curve.log_ratio
    inside = tl.minimum(tl.maximum(column, 0.0), COLUMNS - 1.0)
    left = tl.minimum(tl.floor(inside), COLUMNS - 2.0)
    right = inside - left
    index = left.to(tl.int32)
    log_spread = along(curve.table, index, right)
    edge = along(curve.table, index * 0, right * 0.0)
    if ROWS > 1:
        row = (tl.log(tl.maximum(num_keys, 1.0)) - curve.log_count) / curve.log_count_ratio
        row = tl.minimum(tl.maximum(row, 0.0), ROWS - 1.0)
        top = tl.minimum(tl.floor(row), ROWS - 2.0)
        down = row - top
        line = curve.table + top.to(tl.int32) * COLUMNS
        log_spread = along(line, index, right) * (1.0 - down) + along(line + COLUMNS, index, right) * down
        edge = tl.load(line) * (1.0 - down) + tl.load(line + COLUMNS) * down
    log_spread += (column - inside) * curve.log_ratio
    if NARROW:
        log_limit = tl.log(2.0 * tl.sqrt(variance * 0.0 + D))
        gap = edge - log_limit - curve.log_start * 0.5
        power = tl.minimum(0.45 / tl.maximum(tl.abs(gap), 1e-9), 0.5)
        narrow = log_limit + log_variance * 0.5 + gap * tl.exp((log_variance - curve.log_start) * power)
        log_spread = tl.where(column < 0.0, narrow, log_spread)
    return tl.where(variance > 0.0, tl.exp(log_spread), variance)


@triton.jit
def merged_vectors(x, base, splits, BLOCK_D: tl.constexpr):
    """Mean and sum of centred squares of each feature, and the number of tokens, of all splits of a head."""
    features = tl.arange(0, BLOCK_D)
    mean = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    count = 0.0
    for split in range(splits):
        place = base + split
        new = tl.load(x.counts + place)
        step = tl.load(x.means + place * BLOCK_D + features) - mean
        share = new / tl.maximum(count + new, 1.0)
        diagonal = tl.load(x.squares + place * BLOCK_D * BLOCK_D + features * (BLOCK_D + 1))
        total += diagonal + step * step * (count * share)
        mean += step * share
        count += new
    return mean, total / tl.maximum(count, 1.0), count


@triton.jit
def merged_block(x, base, splits, first, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr):
    """BLOCK_C columns of the covariance of all splits of a head, on and above the diagonal."""
    features = tl.arange(0, BLOCK_D)
    columns = first + tl.arange(0, BLOCK_C)
    mean = tl.zeros((BLOCK_D,), tl.float32)
    mean_c = tl.zeros((BLOCK_C,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    count = 0.0
    for split in range(splits):
        place = base + split
        new = tl.load(x.counts + place)
        share = new / tl.maximum(count + new, 1.0)
        step = tl.load(x.means + place * BLOCK_D + features) - mean
        step_c = tl.load(x.means + place * BLOCK_D + columns) - mean_c
        matrix = x.squares + place * BLOCK_D * BLOCK_D + features[:, None] * BLOCK_D + columns[None, :]
        total += tl.load(matrix, mask=is_stored(features, columns), other=0.0)
        total += step[:, None] * (step_c * (count * share))[None, :]
        mean += step * share
        mean_c += step_c * share
        count += new
    return total / tl.maximum(count, 1.0)


@triton.jit
def spread_of_entries(mean, variance, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The variance of all entries, within the features and between their means, and their mean square."""
    there = tl.arange(0, BLOCK_D) < D
    middle = tl.sum(mean, axis=0) / D
    apart = tl.where(there, mean - middle, 0.0)
    within = tl.sum(variance, axis=0) / D
    return within + tl.sum(apart * apart, axis=0) / D, within + tl.sum(mean * mean, axis=0) / D


@triton.jit(do_not_specialize=COUNTS)
def match_kernel(
    queries,
    keys,
    curve,
    alpha,
    beta,
    heads,
    key_heads,
    query_splits,
    key_splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """alpha and beta of a head, from the `Moments` of its splits: the exact variance of scores within rows."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row_head = head // (heads // key_heads)
    query_base, key_base = pair * query_splits, (batch * key_heads + row_head) * key_splits
    mean_q, variance_q, _ = merged_vectors(queries, query_base, query_splits, BLOCK_D)
    mean_k, variance_k, num_keys = merged_vectors(keys, key_base, key_splits, BLOCK_D)
    entries_q, square_q = spread_of_entries(mean_q, variance_q, D, BLOCK_D)
    entries_k, square_k = spread_of_entries(mean_k, variance_k, D, BLOCK_D)
    # In units of the root mean square, so that all stays finite.
    unit_q = tl.maximum(tl.sqrt(square_q), SMALLEST_SIGMA)
    unit_k = tl.maximum(tl.sqrt(square_k), SMALLEST_SIGMA)
    features = tl.arange(0, BLOCK_D)
    within = 0.0
    for first in range(0, BLOCK_D, BLOCK_C):
        columns = first + tl.arange(0, BLOCK_C)
        block_q = merged_block(queries, query_base, query_splits, first, BLOCK_D, BLOCK_C)
        block_k = merged_block(keys, key_base, key_splits, first, BLOCK_D, BLOCK_C)
        block_k = block_k / unit_k / unit_k
        mean_c = tl.sum(tl.where(features[:, None] == columns[None, :], (mean_q / unit_q)[:, None], 0.0), axis=0)
        both = block_q / unit_q / unit_q * block_k + (mean_q / unit_q)[:, None] * block_k * mean_c[None, :]
        both = tl.where(features[:, None] < columns[None, :], both * 2.0, both)  # the matrix is symmetric
        within += tl.sum(tl.sum(tl.where(features[:, None] <= columns[None, :], both, 0.0), axis=1), axis=0)
    product = unit_q * unit_k
    product = tl.where(product > LARGEST_ENTRY, LARGEST_ENTRY, product)
    spread = matched_spread(
        within * (product * product / D),
        num_keys,
        curve,
        ROWS,
        COLUMNS,
        NARROW,
        D,
    )
    share = tl.sqrt(spread * 0.5)
    tl.store(alpha + pair, divide(share, tl.sqrt(entries_q)))
    tl.store(beta + pair, divide(share, tl.sqrt(entries_k)))
