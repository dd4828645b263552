"""Statistics of queries and keys, and the alpha and beta that follow from them: see `lln.matching.moments`."""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import LARGEST, dot, kept_rows, load_rows, load_vector, nan_where

LARGEST_ENTRY = tl.constexpr(1e15)
SMALLEST_SIGMA = tl.constexpr(1e-30)
MAX_SCORE_VARIANCE = tl.constexpr(1e6)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def bounded(x):
    return tl.where(x > LARGEST_ENTRY, LARGEST_ENTRY, tl.where(x < -LARGEST_ENTRY, -LARGEST_ENTRY, x))


@triton.jit
def is_stored(features, columns):
    """Which squares are in memory: those above the diagonal, from the sector of 32 bytes that it is in."""
    return features[:, None] // 8 <= columns[None, :] // 8


@triton.jit
def moments_kernel(
    x,
    keep,
    means,
    squares,
    counts,
    x_batch,
    x_head,
    x_token,
    keep_batch,
    heads,
    tokens,
    split_tokens,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Mean, sums of centred squares and number of the kept tokens of each split of each head.

    Tiles of tokens are centred around their own mean, and what the means of two differ by is added where they are put
    together (Chan, Golub and LeVeque), so nothing cancels. A program has BLOCK_C columns of the squares.
    """
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    pair, split = place // splits, place % splits
    x += pair // heads * x_batch + pair % heads * x_head
    keep += pair // heads * keep_batch
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    features = tl.arange(0, BLOCK_D)
    columns = column * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = tl.zeros((BLOCK_D,), tl.float32)
    mean_c = tl.zeros((BLOCK_C,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    count = 0.0
    odd = 0.0
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        _, kept = kept_rows(keep, rows, end, HAS_KEEP)
        tile = load_rows(x, rows, x_token, kept, D, BLOCK_D, 0)
        odd = tl.maximum(odd, tl.max(tl.max(tl.where(tl.abs(tile) <= LARGEST, 0.0, 1.0), axis=1), axis=0))
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
            tile_c = bounded(load_rows(x, rows, x_token, kept, D, BLOCK_C, column * BLOCK_C))
            new_mean_c = tl.sum(tile_c, axis=0) / tl.maximum(new, 1.0)
            centred_c = tl.where(kept[:, None] & (columns < D)[None, :], tile_c - new_mean_c[None, :], 0.0)
            step_c = new_mean_c - mean_c
            mean_c += step_c * share
        total += step[:, None] * (step_c * (count * share))[None, :]
        total = dot(tl.trans(centred), centred_c, total, PRECISION)
        mean += step * share
        count += new
    target = squares + place * BLOCK_D * BLOCK_D + features[:, None] * BLOCK_D + columns[None, :]
    tl.store(target, total, mask=is_stored(features, columns))
    if column == 0:
        tl.store(means + place * BLOCK_D + features, mean + nan_where(odd > 0.0))
        tl.store(counts + place, count)


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
    a,
    b,
    log_start,
    log_ratio,
    log_count,
    log_count_ratio,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
    D: tl.constexpr,
):
    """`lln.matching.curves.matched_spread`; ROWS is 0 for the paper's line, NARROW for the forms but the paper's."""
    variance = tl.where(variance > MAX_SCORE_VARIANCE, MAX_SCORE_VARIANCE, variance)
    if ROWS == 0:
        line = (variance - b) / a
        return tl.where(line < 0.0, 0.0, line)
    known = variance > TINY  # not so for NaN
    log_variance = tl.log(tl.where(known, variance, TINY))
    column = (log_variance - log_start) / log_ratio
    inside = tl.minimum(tl.maximum(column, 0.0), COLUMNS - 1.0)
    left = tl.minimum(tl.floor(inside), COLUMNS - 2.0)
    right = inside - left
    index = left.to(tl.int32)
    log_spread = along(curve, index, right)
    edge = along(curve, index * 0, right * 0.0)
    if ROWS > 1:
        row = (tl.log(tl.maximum(num_keys, 1.0)) - log_count) / log_count_ratio
        row = tl.minimum(tl.maximum(row, 0.0), ROWS - 1.0)
        top = tl.minimum(tl.floor(row), ROWS - 2.0)
        down = row - top
        line = curve + top.to(tl.int32) * COLUMNS
        log_spread = along(line, index, right) * (1.0 - down) + along(line + COLUMNS, index, right) * down
        edge = tl.load(line) * (1.0 - down) + tl.load(line + COLUMNS) * down
    log_spread += (column - inside) * log_ratio
    if NARROW:
        log_limit = tl.log(2.0 * tl.sqrt(variance * 0.0 + D))
        gap = edge - log_limit - log_start * 0.5
        power = tl.minimum(0.45 / tl.maximum(tl.abs(gap), 1e-9), 0.5)
        narrow = log_limit + log_variance * 0.5 + gap * tl.exp((log_variance - log_start) * power)
        log_spread = tl.where(column < 0.0, narrow, log_spread)
    return tl.where(variance > 0.0, tl.exp(log_spread), variance)


@triton.jit
def merged_vectors(means, squares, counts, base, splits, BLOCK_D: tl.constexpr):
    """Mean and sum of centred squares of each feature, and the number of tokens, of all splits of a head."""
    features = tl.arange(0, BLOCK_D)
    mean = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    count = 0.0
    for split in range(splits):
        place = base + split
        new = tl.load(counts + place)
        step = tl.load(means + place * BLOCK_D + features) - mean
        share = new / tl.maximum(count + new, 1.0)
        diagonal = tl.load(squares + place * BLOCK_D * BLOCK_D + features * (BLOCK_D + 1))
        total += diagonal + step * step * (count * share)
        mean += step * share
        count += new
    return mean, total / tl.maximum(count, 1.0), count


@triton.jit
def merged_block(means, squares, counts, base, splits, first, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr):
    """BLOCK_C columns of the covariance of all splits of a head, on and above the diagonal."""
    features = tl.arange(0, BLOCK_D)
    columns = first + tl.arange(0, BLOCK_C)
    mean = tl.zeros((BLOCK_D,), tl.float32)
    mean_c = tl.zeros((BLOCK_C,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_C), tl.float32)
    count = 0.0
    for split in range(splits):
        place = base + split
        new = tl.load(counts + place)
        share = new / tl.maximum(count + new, 1.0)
        step = tl.load(means + place * BLOCK_D + features) - mean
        step_c = tl.load(means + place * BLOCK_D + columns) - mean_c
        matrix = squares + place * BLOCK_D * BLOCK_D + features[:, None] * BLOCK_D + columns[None, :]
        total += tl.load(matrix, mask=is_stored(features, columns), other=0.0)
        total += step[:, None] * (step_c * (count * share))[None, :]
        mean += step * share
        mean_c += step_c * share
        count += new
    return total / tl.maximum(count, 1.0)


@triton.jit
def centred_mean(mean, center, pair, center_batch, heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    return mean - load_vector(center + pair // heads * center_batch + pair % heads * D, D, BLOCK_D)


@triton.jit
def spread_of_entries(mean, variance, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The variance of all entries, within the features and between their means, and their mean square."""
    there = tl.arange(0, BLOCK_D) < D
    middle = tl.sum(mean, axis=0) / D
    apart = tl.where(there, mean - middle, 0.0)
    within = tl.sum(variance, axis=0) / D
    return within + tl.sum(apart * apart, axis=0) / D, within + tl.sum(mean * mean, axis=0) / D


@triton.jit
def match_kernel(
    query_means,
    query_squares,
    query_counts,
    key_means,
    key_squares,
    key_counts,
    center_query,
    center_key,
    curve,
    alpha,
    beta,
    center_query_batch,
    center_key_batch,
    heads,
    key_heads,
    query_splits,
    key_splits,
    a,
    b,
    log_start,
    log_ratio,
    log_count,
    log_count_ratio,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """alpha and beta of a head, from the statistics of its splits: the exact variance of scores within rows."""
    pair = tl.program_id(0).to(tl.int64)
    key_pair = pair // heads * key_heads + pair % heads // (heads // key_heads)
    query_base, key_base = pair * query_splits, key_pair * key_splits
    mean_q, variance_q, _ = merged_vectors(query_means, query_squares, query_counts, query_base, query_splits, BLOCK_D)
    mean_k, variance_k, num_keys = merged_vectors(key_means, key_squares, key_counts, key_base, key_splits, BLOCK_D)
    if CENTERED:
        mean_q = centred_mean(mean_q, center_query, pair, center_query_batch, heads, D, BLOCK_D)
        mean_k = centred_mean(mean_k, center_key, key_pair, center_key_batch, key_heads, D, BLOCK_D)
    entries_q, square_q = spread_of_entries(mean_q, variance_q, D, BLOCK_D)
    entries_k, square_k = spread_of_entries(mean_k, variance_k, D, BLOCK_D)
    # In units of the root mean square, so that all stays finite.
    unit_q = tl.maximum(tl.sqrt(square_q), SMALLEST_SIGMA)
    unit_k = tl.maximum(tl.sqrt(square_k), SMALLEST_SIGMA)
    features = tl.arange(0, BLOCK_D)
    within = 0.0
    for first in range(0, BLOCK_D, BLOCK_C):
        columns = first + tl.arange(0, BLOCK_C)
        block_q = merged_block(
            query_means, query_squares, query_counts, query_base, query_splits, first, BLOCK_D, BLOCK_C
        )
        block_k = merged_block(key_means, key_squares, key_counts, key_base, key_splits, first, BLOCK_D, BLOCK_C)
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
        a,
        b,
        log_start,
        log_ratio,
        log_count,
        log_count_ratio,
        ROWS,
        COLUMNS,
        NARROW,
        D,
    )
    share = tl.sqrt(spread * 0.5)
    tl.store(alpha + pair, divide(share, tl.sqrt(entries_q)))
    tl.store(beta + pair, divide(share, tl.sqrt(entries_k)))
