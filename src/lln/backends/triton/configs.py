"""Sizes of tiles, warps and pipeline stages of each kernel.

Each kernel has one size of tile for each width, so that sums are taken in the same order on every GPU, and some
numbers of stages of which the fastest is kept, see `tuning`. `lln bench kernels` compiles them for real architectures
and says that none spills registers and that all fit into shared memory.
"""

from typing import NamedTuple

# Columns of a D x V sum that a program holds: D times this many numbers are in its registers.
SUM_ENTRIES = 8192
FLOAT32_SUM_ENTRIES = 4096
CAUSAL_SUM_ENTRIES = 1024
# Causal kernels hold more of a token in registers: wider heads would spill.
WIDEST_CAUSAL = 64
# Tokens of a split, of which each has a summary; with more tokens than this times LARGEST_SPLITS splits are larger.
# Summaries of shorter ones would take more than a tenth of the bytes of float16 tokens (`lln bench kernels`).
SPLIT_TOKENS, LARGEST_SPLITS = 1664, 16
# Tokens that a program of the recall goes through.
RECALL_TOKENS = 256
# A multiple of all tiles, so that splits end where tiles end.
ALIGNMENT = 128
WIDEST = {"float32": 128, "half": 256}  # wider heads would spill
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
CAUSAL = frozenset(x for x in HEAVY if x.startswith("causal"))
NEAR = frozenset(x for x in HEAVY if x.startswith("near"))
PIPELINED = frozenset(("moments_kernel", "summarize_kernel", "recall_kernel", "queries_backward_kernel"))


class Config(NamedTuple):
    """How a kernel runs: tokens of a tile, warps of a program, and loads that are under way at a time."""

    tile: int
    warps: int
    stages: int


def power_of_two(width: int) -> int:
    """The padded width."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def value_block(block_d: int, width: int, entries: int = SUM_ENTRIES) -> int:
    """Columns of values that a program has at a time."""
    return min(power_of_two(width), max(NARROWEST, entries // block_d), 128)


def split_of(tokens: int) -> tuple[int, int]:
    """The number of splits of a sequence, and the tokens of each. It depends on nothing but the length."""
    size = max(SPLIT_TOKENS, -(-tokens // LARGEST_SPLITS))
    size = -(-size // ALIGNMENT) * ALIGNMENT
    return -(-tokens // size), size


def config_of(kernel: str, block_d: int, block_v: int, *, is_float32: bool) -> Config:
    """The tile, warps and first choice of stages of a kernel."""
    if kernel == "prefix_match_kernel":
        return Config(256, 4, 1)
    if kernel == "step_kernel":
        return Config(32, 4, 1)
    if kernel in CAUSAL:
        return Config(16, 8, 1)
    # float32 tokens are multiplied in three parts, which takes about twice the registers.
    wide = max(block_d, block_v) * (2 if is_float32 else 1)
    tile = 64 if wide <= 64 else 32 if wide <= 128 else 16
    if kernel == "keys_backward_kernel":
        return Config(16, 8, 1)  # the forms but the paper's have the shares of features beside the log-weights
    if kernel in NEAR and wide == 128 and not is_float32:
        return Config(16, 4, 1 if kernel == "near_keys_backward_kernel" else 2)
    if kernel in NEAR or kernel == "finish_keys_kernel" or (is_float32 and kernel == "queries_backward_kernel"):
        tile = max(16, tile // 2)
    return Config(tile, 8 if kernel in HEAVY or wide > 64 else 4, 2)


def stages_of(kernel: str, config: Config) -> tuple[int, ...]:
    """Numbers of stages to choose from: kernels that go through many tiles can load some of them ahead."""
    return (config.stages, 1, 3) if kernel in PIPELINED else (config.stages,)
