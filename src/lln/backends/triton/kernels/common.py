"""What the kernels share: rows of tokens, the log-weights of keys and queries, and products of matrices.

Everything is computed in float32. Features are padded with zeros to a power of two, `BLOCK_D`; a padded feature has the
log-weight `ABSENT`, and so has a token that is not kept.
"""

import triton
import triton.language as tl

# The log-weight of what is not there: below every other, yet finite, so that differences of two are not NaN.
ABSENT = tl.constexpr(-1.7014117331926443e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
# Padding that is larger than this counts as zero, see `lln.masks.LARGEST_PADDING`.
LARGEST_PADDING = tl.constexpr(1e15)


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
def load_rows(pointer, rows, stride, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, first):
    """Features `first` to `first + BLOCK` of some rows, with zeros where there is none."""
    columns = first + tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def store_rows(pointer, x, rows, stride, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, first):
    columns = first + tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    target = pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(target, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(pointer, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    return tl.load(pointer + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


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
    return tl.where(there & is_row[:, None], logs, ABSENT)


@triton.jit
def kept_rows(keep, rows, tokens, HAS_KEEP: tl.constexpr):
    """Which rows are tokens, and which of these are kept."""
    is_row = rows < tokens
    if HAS_KEEP:
        return is_row, tl.load(keep + rows, mask=is_row, other=0) != 0
    return is_row, is_row


@triton.jit
def load_scale(pointer, rows, stride, is_row):
    """alpha, beta or a log-weight of each token; with stride 0 they share it."""
    return tl.load(pointer + rows.to(tl.int64) * stride, mask=is_row, other=0.0).to(tl.float32)
