"""What the kernels share: rows of tokens, the log-weights of keys and queries, and products of matrices.

Everything is computed in float32. Features are padded with zeros to a power of two, `BLOCK_D`; a padded feature has the
log-weight `ABSENT`, and so has a token that is not kept. Arguments that belong together are named tuples, of which each
kernel takes some; a part that is None is compiled away.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# The log-weight of what is not there: below every other, yet finite, so that differences of two are not NaN.
ABSENT = tl.constexpr(-1.7014117331926443e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
# Padding that is larger than this counts as zero, see `lln.masks.LARGEST_PADDING`.
LARGEST_PADDING = tl.constexpr(1e15)


class Rows(NamedTuple):
    """A tensor (B, heads, tokens, features) and its strides, or one of scales, masks or centres with stride 0 along
    what shares a number."""

    pointer: Any
    batch: int
    head: int
    token: int


class Queries(NamedTuple):
    """Queries, which of them are kept, alpha, and the centre that is subtracted from them."""

    rows: Rows
    keep: Rows | None
    scale: Rows
    center: Rows | None


class Keys(NamedTuple):
    """Keys, which of them are kept, beta, log-weights that are added, and the centres of keys and queries."""

    rows: Rows
    keep: Rows | None
    scale: Rows
    weight: Rows | None
    center: Rows | None
    other_center: Rows | None


class Summary(NamedTuple):
    """What is kept of the keys of each split: largest log-weights and weights (B H splits, BLOCK_D), and sums
    (B H splits, BLOCK_D, values)."""

    tops: Any
    weights: Any
    sums: Any


@triton.jit
def nan_where(condition):
    """NaN where a condition holds, else 0."""
    return tl.where(condition, float("nan"), 0.0)


@triton.jit
def rounded(x):
    """x with the 10 bits of TF32 behind the point, to nearest: tensor cores would cut the others off."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x)  # the bits of a NaN could become those of a number


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    """c + a b in float32: of TF32 factors for float16 and bfloat16 tokens, else of three TF32 products."""
    if PRECISION == "tf32":
        return tl.dot(rounded(a), rounded(b), c, input_precision="tf32")
    return tl.dot(a, b, c, input_precision="tf32x3")


@triton.jit
def place_of(parts, heads):
    """This program's place along the first axis of the grid: of all, its head of all, part, sample and head."""
    place = tl.program_id(0).to(tl.int64)
    pair, part = place // parts, place % parts
    return place, pair, part, pair // heads, pair % heads


@triton.jit
def pointers(x, batch, head, rows, columns):
    return x.pointer + batch * x.batch + head * x.head + rows.to(tl.int64)[:, None] * x.token + columns[None, :]


@triton.jit
def load_rows(x, batch, head, rows, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, first):
    """Features `first` to `first + BLOCK` of some rows, with zeros where there is none."""
    columns = first + tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointers(x, batch, head, rows, columns), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, batch, head, rows, is_row, new, WIDTH: tl.constexpr, BLOCK: tl.constexpr, first):
    columns = first + tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers(x, batch, head, rows, columns), new.to(x.pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_scale(x, batch, head, rows, is_row):
    """One number of each token."""
    pointer = x.pointer + batch * x.batch + head * x.head + rows.to(tl.int64) * x.token
    return tl.load(pointer, mask=is_row, other=0.0).to(tl.float32)


@triton.jit
def load_center(x, batch, head, WIDTH: tl.constexpr, BLOCK: tl.constexpr, first=0):
    """One number of each of the features `first` to `first + BLOCK`; 0 if there is no centre."""
    center = 0.0
    if x is not None:
        columns = first + tl.arange(0, BLOCK)
        center = tl.load(x.pointer + batch * x.batch + head * x.head + columns, mask=columns < WIDTH, other=0.0)
    return center


@triton.jit
def kept_rows(keep, batch, rows, tokens):
    """Which rows are tokens, and which of these are kept."""
    is_row = rows < tokens
    kept = is_row
    if keep is not None:
        kept = tl.load(keep.pointer + batch * keep.batch + rows, mask=is_row, other=0) != 0
    return is_row, kept


@triton.jit
def matrices(pointer, place, features, columns, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Where the sums of a split or head are: `features` times `columns` of a matrix (BLOCK_D, WIDTH)."""
    return pointer + (place * BLOCK_D + features[:, None]) * WIDTH + columns[None, :]


@triton.jit
def load_summary(x, place, value_first, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr):
    features, columns = tl.arange(0, BLOCK_D), value_first + tl.arange(0, BLOCK_V)
    top, weight = tl.load(x.tops + place * BLOCK_D + features), tl.load(x.weights + place * BLOCK_D + features)
    return top, weight, tl.load(matrices(x.sums, place, features, columns, BLOCK_D, WIDTH))


@triton.jit
def store_summary(
    x,
    place,
    features,
    value_first,
    top,
    weight,
    sums,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Columns of the sums; the program that has the first of them stores the rest."""
    tl.store(matrices(x.sums, place, features, value_first + tl.arange(0, BLOCK_V), BLOCK_D, WIDTH), sums)
    if value_first == 0:
        tl.store(x.tops + place * BLOCK_D + features, top)
        tl.store(x.weights + place * BLOCK_D + features, weight)


@triton.jit
def row_flags(x):
    """NaN for each row with an entry that is not finite, else 0: an exponential would hide -inf."""
    odd = tl.max(tl.where(tl.abs(x) <= LARGEST, 0.0, 1.0), axis=1)
    return nan_where(odd > 0.0)


@triton.jit
def usable_queries(x, kept):
    """Queries with zeros in place of padding that is not finite or too large, and which rows those are not."""
    odd = tl.max(tl.where(tl.abs(x) <= LARGEST_PADDING, 0.0, 1.0), axis=1)
    usable = kept | (odd == 0.0)
    return tl.where(usable[:, None], x, 0.0), usable


@triton.jit
def shares_of(y, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """softmax over features of (scale y), and its logsumexp for each row."""
    there = (tl.arange(0, BLOCK) < WIDTH)[None, :]
    logs = tl.where(there, y * scale[:, None], ABSENT)
    top = tl.max(logs, axis=1)
    shares = tl.exp(logs - top[:, None])
    total = tl.sum(shares, axis=1)
    return shares / total[:, None], top + tl.log(total)


@triton.jit
def weigh(
    x,
    scale,
    shift,
    center,
    other_center,
    is_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """The log-weights of rows x: scale (x - center) + shift, see `lln.forms`.

    NORMALIZED subtracts logsumexp over features, and if CENTERED adds other_center . x / sqrt(WIDTH): the keys of the
    unbiased and decomposed forms.
    """
    there = (tl.arange(0, BLOCK) < WIDTH)[None, :]
    y = x
    if CENTERED:
        y = x - center[None, :]
    logs = y * scale[:, None]
    if NORMALIZED:
        top = tl.max(tl.where(there, logs, ABSENT), axis=1)
        total = tl.sum(tl.where(there, tl.exp(logs - top[:, None]), 0.0), axis=1)
        shift = shift - top - tl.log(total)
        if CENTERED:
            shift = shift + tl.sum(x * other_center[None, :], axis=1) * (WIDTH**-0.5)
        logs = logs + (shift + row_flags(x))[:, None]
    else:
        # Rounded once: what the product loses would be of the size of the differences where it and the shift cancel.
        logs = tl.fma(y, scale[:, None], (shift + row_flags(x))[:, None])
    return tl.where(there & is_row[:, None], logs, ABSENT)
