"""What linear attention keeps of keys and values, for each split of the tokens and of all together, and its recall.

With the log-weights b of `weigh` and a reference m_l = max_j b_jl, the summary of some keys is m, the weights
W_l = sum_j exp(b_jl - m_l) and the sums S_l = sum_j exp(b_jl - m_l) v_j.
"""

import triton
import triton.language as tl

from lln.backends.triton.kernels.common import (
    ABSENT,
    dot,
    kept_rows,
    load_center,
    load_rows,
    load_scale,
    matrices,
    place_of,
    row_flags,
    store_rows,
    store_summary,
    usable_queries,
    weigh,
)

# Numbers that change from call to call and shape nothing: a kernel is not compiled anew for them.
COUNTS = ("heads", "tokens", "split_tokens", "splits")


@triton.jit
def remember(top, weight, sums, logs, values, factor, is_row, PRECISION: tl.constexpr):
    """A summary with more keys in it; `factor` multiplies what each adds to the weights."""
    new_top = tl.maximum(top, tl.max(logs, axis=0))
    fade = tl.exp(top - new_top)
    shares = tl.where(is_row[:, None], tl.exp(logs - new_top[None, :]), 0.0)
    weight = weight * fade + tl.sum(shares * factor[:, None], axis=0)
    sums = dot(tl.trans(shares), values, sums * fade[:, None], PRECISION)
    return new_top, weight, sums


@triton.jit(do_not_specialize=COUNTS)
def summarize_kernel(
    keys,
    value,
    factor,
    found,
    heads,
    groups,
    tokens,
    split_tokens,
    splits,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The summary of each split of each head.

    With `factor` the rows are queries and their gradients, of which the causal backward pass makes the same sums: the
    weight of a row is then its logsumexp and subtracted, a row that has none (`ABSENT`) saw no key, and `factor` is
    g . out.
    """
    place, _pair, split, batch, head = place_of(splits, heads)
    row_head = head // groups
    value_first = tl.program_id(1) * BLOCK_V
    middle = load_center(keys.center, batch, row_head, D, BLOCK_D)
    other = load_center(keys.other_center, batch, head, D, BLOCK_D)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    top = tl.full((BLOCK_D,), ABSENT, tl.float32)
    weight = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        is_row, there = kept_rows(keys.keep, batch, rows, end)
        own_shift = tl.zeros((BLOCK_N,), tl.float32)
        own_factor = tl.full((BLOCK_N,), 1.0, tl.float32)
        if factor is not None:
            own_total = load_scale(keys.weight, batch, head, rows, is_row)
            x, usable = usable_queries(load_rows(keys.rows, batch, row_head, rows, is_row, D, BLOCK_D, 0), there)
            there = is_row & usable & (own_total > ABSENT)
            own_factor = load_scale(factor, batch, head, rows, there)
        else:
            x = load_rows(keys.rows, batch, row_head, rows, there, D, BLOCK_D, 0)
            if keys.weight is not None:
                own_shift = load_scale(keys.weight, batch, head, rows, there)
        own_scale = load_scale(keys.scale, batch, head, rows, there)
        logs = weigh(x, own_scale, own_shift, middle, other, there, D, BLOCK_D, keys.center is not None, NORMALIZED)
        if factor is not None:  # from the rounded product, as in `causal_backward.load_past`
            logs = tl.where(there[:, None], logs - own_total[:, None], ABSENT)
        v = load_rows(value, batch, row_head, rows, there, V, BLOCK_V, value_first)
        top, weight, total = remember(top, weight, total, logs, v, own_factor, there, PRECISION)
    features = tl.arange(0, BLOCK_D)
    store_summary(found, place, features, value_first, top, weight, total, BLOCK_D, BLOCK_V, VALUE_BLOCKS * BLOCK_V)


@triton.jit(do_not_specialize=COUNTS)
def combine_kernel(
    found,
    starts,
    mass,
    values,
    splits,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The log-mass and mean values of all splits, or `starts`: the summary of all splits before each (REVERSE: after).

    A program has some features (BLOCK_F) and some values of a head.
    """
    pair = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    value_first = tl.program_id(2) * BLOCK_V
    columns = value_first + tl.arange(0, BLOCK_V)
    WIDTH: tl.constexpr = VALUE_BLOCKS * BLOCK_V
    top = tl.full((BLOCK_F,), ABSENT, tl.float32)
    weight = tl.zeros((BLOCK_F,), tl.float32)
    total = tl.zeros((BLOCK_F, BLOCK_V), tl.float32)
    for step in range(splits):
        split = step
        if REVERSE:
            split = splits - 1 - step
        place = pair * splits + split
        if starts is not None:
            store_summary(starts, place, features, value_first, top, weight, total, BLOCK_D, BLOCK_V, WIDTH)
        own_top = tl.load(found.tops + place * BLOCK_D + features)
        new_top = tl.maximum(top, own_top)
        fade, own_fade = tl.exp(top - new_top), tl.exp(own_top - new_top)
        weight = weight * fade + tl.load(found.weights + place * BLOCK_D + features) * own_fade
        own_sums = tl.load(matrices(found.sums, place, features, columns, BLOCK_D, WIDTH))
        total = total * fade[:, None] + own_sums * own_fade[:, None]
        top = new_top
    if starts is None:
        is_empty = weight == 0.0
        safe = tl.where(is_empty, 1.0, weight)
        tl.store(matrices(values, pair, features, columns, BLOCK_D, WIDTH), total / safe[:, None])
        if value_first == 0:
            tl.store(mass + pair * BLOCK_D + features, top + tl.log(safe))


@triton.jit
def load_queries(queries, middle, batch, head, rows, tokens, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """a = alpha (q - center), NaN in rows that are not finite; q - center, alpha, and which rows count."""
    is_row, kept = kept_rows(queries.keep, batch, rows, tokens)
    q, usable = usable_queries(load_rows(queries.rows, batch, head, rows, is_row, D, BLOCK_D, 0), kept)
    flags = row_flags(q)
    if queries.center is not None:
        q = q - middle[None, :]
    scale = load_scale(queries.scale, batch, head, rows, is_row)
    return q * scale[:, None] + flags[:, None], q, scale, is_row, usable


@triton.jit
def shares_of_features(a, mass, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """softmax over features of (a + mass)."""
    there = (tl.arange(0, BLOCK_D) < D)[None, :]
    logs = tl.where(there, a + mass[None, :], ABSENT * 2)
    shares = tl.exp(logs - tl.max(logs, axis=1)[:, None])
    return shares / tl.sum(shares, axis=1)[:, None]


@triton.jit(do_not_specialize=COUNTS)
def recall_kernel(
    queries,
    mass,
    values,
    output,
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
    """out = softmax over features of (a + L) times the mean values."""
    _place, pair, split, batch, head = place_of(splits, heads)
    middle = load_center(queries.center, batch, head, D, BLOCK_D)
    features = tl.arange(0, BLOCK_D)
    own_mass = tl.load(mass + pair * BLOCK_D + features)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        a, _, _, is_row, _ = load_queries(queries, middle, batch, head, rows, end, D, BLOCK_D)
        shares = shares_of_features(a, own_mass, D, BLOCK_D)
        for value_first in range(0, VALUE_BLOCKS * BLOCK_V, BLOCK_V):
            columns = value_first + tl.arange(0, BLOCK_V)
            own_values = tl.load(matrices(values, pair, features, columns, BLOCK_D, VALUE_BLOCKS * BLOCK_V))
            result = dot(shares, own_values, tl.zeros((BLOCK_N, BLOCK_V), tl.float32), PRECISION)
            store_rows(output, batch, head, rows, is_row, result, V, BLOCK_V, value_first)
