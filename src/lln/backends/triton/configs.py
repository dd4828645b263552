"""Sizes of tiles, warps and pipeline stages of each kernel.

Each kernel has one size of tile for each width, so that sums are taken in the same order on every GPU, and a few numbers
of warps and stages of which the fastest is kept, see `tuning`. All of them are compiled for real architectures by
`lln bench kernels`, which says that none spills registers and that all fit into shared memory.
"""

from typing import NamedTuple

# Columns of a D x V sum that a program holds: D times this many numbers are in its registers.
SUM_ENTRIES = 8192
# Tokens of a split, of which each has a summary; with more tokens than this times LARGEST_SPLITS splits are larger.
SPLIT_TOKENS, LARGEST_SPLITS = 1024, 16
# Tokens that a program of the recall goes through.
RECALL_TOKENS = 256
# A multiple of all tiles, so that splits end where tiles end.
ALIGNMENT = 128
WIDEST = 256
NARROWEST = 16  # the least that tensor cores multiply


# Kernels with more numbers in registers than four warps have.
HEAVY = frozenset(
    (
        "queries_backward_kernel",
        "keys_backward_kernel",
        "near_kernel",
        "near_queries_backward_kernel",
        "near_keys_backward_kernel",
        "causal_kernel",
        "causal_queries_backward_kernel",
        "causal_keys_backward_kernel",
    )
)
# Kernels whose next tile waits for the one before it, or that have one tile.
SEQUENTIAL = frozenset(x for x in HEAVY if x.startswith("causal")) | {"keys_backward_kernel"}


class Config(NamedTuple):
    """How a kernel runs: tokens of a tile, warps of a program, and loads that are under way at a time."""

    tile: int
    warps: int
    stages: int


def power_of_two(width: int) -> int:
    """The padded width."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def value_block(block_d: int, width: int) -> int:
    """Columns of values that a program has at a time."""
    return min(power_of_two(width), max(NARROWEST, SUM_ENTRIES // block_d), 128)


def split_of(tokens: int) -> tuple[int, int]:
    """The number of splits of a sequence, and the tokens of each. It depends on nothing but the length."""
    wanted = min(LARGEST_SPLITS, -(-tokens // SPLIT_TOKENS))
    size = -(-(-(-tokens // wanted)) // ALIGNMENT) * ALIGNMENT
    return -(-tokens // size), size


def config_of(kernel: str, block_d: int, block_v: int, *, is_float32: bool) -> Config:
    """The first choice for a kernel."""
    wide = max(block_d, block_v)
    if kernel == "prefix_match_kernel":
        return Config(512, 4, 1)
    if kernel == "step_kernel":
        return Config(32, 4, 1)
    # float32 tokens are multiplied in three parts, which takes about twice the registers.
    wide *= 2 if is_float32 else 1
    tile = 64 if wide <= 64 else 32 if wide <= 128 else 16
    return Config(tile, 8 if kernel in HEAVY or wide > 64 else 4, 1 if kernel in SEQUENTIAL else 2)
