"""Statistics of every prefix, for causal attention: see `lln.matching.moments.prefix_moments`."""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import (
    LARGEST,
    kept_rows,
    load_center,
    load_rows,
    load_scale,
    nan_where,
    place_of,
)
from lln.backends.triton.kernels.moments import LARGEST_ENTRY, bounded, divide, matched_spread


@triton.jit
def entries_of(tile, origin, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean of the entries of each row in float64, NaN if one is not finite, and their variance.

    They are measured from the row's first entry: equal entries have a variance of exactly 0.
    """
    there = (tl.arange(0, BLOCK_D) < D)[None, :]
    odd = tl.max(tl.where(tl.abs(tile) <= LARGEST, 0.0, 1.0), axis=1)
    origin = bounded(origin)
    apart = tl.where(there, bounded(tile) - origin[:, None], 0.0)
    mean = tl.sum(apart, axis=1) / D
    around = tl.where(there, apart - mean[:, None], 0.0)
    within = tl.sum(around * around, axis=1) / D
    return origin.to(tl.float64) + mean.to(tl.float64) + nan_where(odd > 0.0).to(tl.float64), within


@triton.jit(do_not_specialize=("heads", "tokens", "tiles"))
def token_moments_kernel(
    x,
    center,
    keep,
    means,
    variances,
    heads,
    tokens,
    tiles,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Mean and variance of the entries of each token; 0 for one that is not kept."""
    _place, pair, tile, batch, head = place_of(tiles, heads)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, kept = kept_rows(keep, batch, rows, tokens)
    data = load_rows(x, batch, head, rows, kept, D, BLOCK_D, 0)
    origin = load_scale(x, batch, head, rows, kept)  # the first feature
    if center is not None:
        data = data - load_center(center, batch, head, D, BLOCK_D)[None, :]
        origin = origin - tl.load(center.pointer + batch * center.batch + head * center.head)
    mean, within = entries_of(data, origin, D, BLOCK_D)
    tl.store(means + pair * tokens + rows, tl.where(kept, mean, 0.0), mask=is_row)
    tl.store(variances + pair * tokens + rows, tl.where(kept, within, 0.0), mask=is_row)


@triton.jit
def sigma_of(mean, square, within, number):
    """The standard deviation of all entries, from sums over tokens."""
    mean = mean / number
    between = square / number - mean * mean
    return tl.sqrt(within / number + tl.where(between < 0.0, 0.0, between)).to(tl.float32)


@triton.jit
def scales_of(
    sigma_q,
    sigma_k,
    num_keys,
    curve,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
    D: tl.constexpr,
):
    """alpha and beta from the sigmas, with their product for the variance of scores."""
    product = sigma_q * sigma_k
    product = tl.where(product > LARGEST_ENTRY, LARGEST_ENTRY, product)
    spread = matched_spread(
        product * product,
        num_keys,
        curve,
        ROWS,
        COLUMNS,
        NARROW,
        D,
    )
    share = tl.sqrt(spread * 0.5)
    return divide(share, sigma_q), divide(share, sigma_k)


@triton.jit(do_not_specialize=("heads", "key_heads", "tokens"))
def prefix_match_kernel(
    query_means,
    query_variances,
    key_means,
    key_variances,
    keep,
    curve,
    alpha,
    beta,
    heads,
    key_heads,
    tokens,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """alpha and beta of each token of a head, from the tokens up to it; sums run in float64."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    key_pair = batch * key_heads + head // (heads // key_heads)
    zero = tl.zeros((BLOCK_N,), tl.float64)
    count, mean_q, square_q, within_q, mean_k, square_k, within_k = zero, zero, zero, zero, zero, zero, zero
    for first in range(0, tokens, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        is_row, kept = kept_rows(keep, batch, rows, tokens)
        q = tl.load(query_means + pair * tokens + rows, mask=is_row, other=0.0)
        k = tl.load(key_means + key_pair * tokens + rows, mask=is_row, other=0.0)
        q_variance = tl.load(query_variances + pair * tokens + rows, mask=is_row, other=0.0).to(tl.float64)
        k_variance = tl.load(key_variances + key_pair * tokens + rows, mask=is_row, other=0.0).to(tl.float64)
        running = count + tl.cumsum(kept.to(tl.float64), axis=0)
        number = tl.where(running < 1.0, 1.0, running)
        sigma_q = sigma_of(
            mean_q + tl.cumsum(q, axis=0),
            square_q + tl.cumsum(q * q, axis=0),
            within_q + tl.cumsum(q_variance, axis=0),
            number,
        )
        sigma_k = sigma_of(
            mean_k + tl.cumsum(k, axis=0),
            square_k + tl.cumsum(k * k, axis=0),
            within_k + tl.cumsum(k_variance, axis=0),
            number,
        )
        of_query, of_key = scales_of(
            sigma_q,
            sigma_k,
            running.to(tl.float32),
            curve,
            ROWS,
            COLUMNS,
            NARROW,
            D,
        )
        tl.store(alpha + pair * tokens + rows, of_query, mask=is_row)
        tl.store(beta + pair * tokens + rows, of_key, mask=is_row)
        count += tl.sum(kept.to(tl.float64), axis=0)
        mean_q += tl.sum(q, axis=0)
        square_q += tl.sum(q * q, axis=0)
        within_q += tl.sum(q_variance, axis=0)
        mean_k += tl.sum(k, axis=0)
        square_k += tl.sum(k * k, axis=0)
        within_k += tl.sum(k_variance, axis=0)
