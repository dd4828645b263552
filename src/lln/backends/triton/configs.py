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
FLOAT32_KEYS_BACKWARD_ENTRIES = 2048  # more would spill: each factor of a product is three numbers
# Causal kernels, and those of neighbours, hold more of a token in registers: wider heads would spill.
WIDEST_CAUSAL, WIDEST_NEAR = 64, 128
# Gradients of wider keys and of their values, or of queries and of the mean values, are two launches: both do not fit
# into the registers of one program.
WIDEST_KEYS_BACKWARD, WIDEST_QUERIES_BACKWARD = {"float32": 64, "half": 128}, 64
# Splits of a sequence, of which each has a summary: so many at least, each of at least so many tokens, and more of them
# in sequences longer than so many tokens each. Few leave multiprocessors idle where samples and heads are few, and
# summaries of many take bytes; with these the bound of `lln bench kernels` for 12 heads is lowest, or near it, at all
# lengths. Products of float32 tokens take three times as long, so that idle multiprocessors cost more.
LEAST_SPLITS, SPLIT_TOKENS = {"float32": 6, "half": 4}, {"float32": 1536, "half": 2048}
SMALLEST_SPLIT, MOST_SPLITS = 256, 16
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


# For these the compiler would spill a few bytes, so that one more program fits onto a multiprocessor, unless it is told
# that it may take all registers of a thread.
UNSPILLED = NEAR | CAUSAL | PIPELINED
UNSPILLED |= {"match_kernel", "combine_kernel", "combine_gradients_kernel", "finish_keys_kernel", "step_kernel"}
ALL_REGISTERS = 255


class Config(NamedTuple):
    """How a kernel runs: tokens of a tile, warps of a program, loads that are under way at a time, and the registers of
    a thread, if not left to the compiler."""

    tile: int
    warps: int
    stages: int
    registers: int | None = None


def kind_of(*, is_float32: bool) -> str:
    return "float32" if is_float32 else "half"


def power_of_two(width: int) -> int:
    """The padded width."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def value_block(block_d: int, width: int, entries: int = SUM_ENTRIES) -> int:
    """Columns of values that a program has at a time."""
    return min(power_of_two(width), max(NARROWEST, entries // block_d), 128)


def split_of(tokens: int, *, is_float32: bool) -> tuple[int, int]:
    """The number of splits of a sequence, and the tokens of each. It depends on the length and the dtype alone."""
    kind = kind_of(is_float32=is_float32)
    number = min(max(LEAST_SPLITS[kind], -(-tokens // SPLIT_TOKENS[kind])), MOST_SPLITS)
    size = max(SMALLEST_SPLIT, -(-tokens // (number * ALIGNMENT)) * ALIGNMENT)
    return -(-tokens // size), size


def config_of(kernel: str, block_d: int, block_v: int, *, is_float32: bool) -> Config:
    """How a kernel runs for padded widths, with the first choice of stages."""
    config = _config_of(kernel, block_d, block_v, is_float32=is_float32)
    return config._replace(registers=ALL_REGISTERS) if kernel in UNSPILLED else config


def _config_of(kernel: str, block_d: int, block_v: int, *, is_float32: bool) -> Config:
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
        # The forms but the paper's have the shares of features beside the log-weights.
        return Config(16, 8, 1)
    if kernel in NEAR and wide == 128 and not is_float32:
        return Config(16, 4, 1 if kernel == "near_keys_backward_kernel" else 2)
    if kernel in NEAR and wide > 128 and kernel != "near_kernel":
        return Config(16, 8, 1)  # what is loaded ahead would spill
    if kernel in NEAR or kernel in ("finish_keys_kernel", "queries_backward_kernel"):
        tile = max(16, tile // 2)
    if kernel == "moments_kernel" and is_float32:
        tile = min(tile, 32)  # 64 tokens of 32 features and their centre would spill
    if kernel in NEAR and kernel != "near_kernel" and is_float32:
        tile = 16  # 32 tokens of 32 features would spill
    # With four warps the summary of 64 features with all options would spill on an A100.
    return Config(tile, 8 if kernel in HEAVY or kernel == "summarize_kernel" or wide > 64 else 4, 2)


def stages_of(kernel: str, config: Config) -> tuple[int, ...]:
    """Numbers of stages to choose from: kernels that go through many tiles can load some of them ahead."""
    return (config.stages, 1, 3) if kernel in PIPELINED else (config.stages,)
