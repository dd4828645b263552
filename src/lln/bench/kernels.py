"""`lln bench kernels`: the Triton kernels compiled for real GPUs, and the least time they could take. None is timed.

Calls are recorded on tensors without memory (`kernel_calls`), then each kernel is compiled as it would be for them.
The bound of a call is the larger of the time that its bytes take at the bandwidth of the memory and the time that its
products take on the tensor cores. With fewer programs than multiprocessors, those that are idle multiply nothing and
read nothing: the others have their share of the tensor cores and of what the L2 cache gives. Every tensor counts once
for each kernel that has it, and once more for each program that reads the same rows again; sums that kernels pass to
each other count too, although they would stay in the cache.
"""

import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lln.bench.candidates import DTYPES
from lln.bench.kernel_calls import all_calls, record_calls

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LAYERS = 12  # of RoBERTa-base, as in table 2
TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "float64": "*fp64", "uint8": "*u8"}
TYPES |= {"int32": "*i32", "int64": "*i64"}
# Head and value widths that are compiled: each power of two, one that is padded, and values in blocks.
WIDTHS = ((16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (256, 256), (64, 256))
# What all programs along the second axis of a grid read, each for its own columns of the sums.
READ_AGAIN = {
    "moments_kernel": ("query.pointer", "key.pointer"),
    "summarize_kernel": ("keys.rows.pointer",),
    "causal_kernel": ("queries.rows.pointer", "keys.rows.pointer"),
    "queries_backward_kernel": ("queries.rows.pointer",),
}
# A type, a constant that is compiled in, and whether it is a multiple of 16; or a named tuple of these.
Argument = tuple[str, str | bool | int | float | None, bool] | tuple[type, tuple["Argument", ...]]


@dataclass(frozen=True)
class Gpu:
    """What the maker publishes: memory in bytes a second, TF32 products (dense) in operations a second, bytes."""

    name: str
    capability: int
    multiprocessors: int
    bandwidth: float
    cache_bandwidth: float  # of all multiprocessors from the L2 cache: 5,120 bytes a clock
    operations: float
    shared_block: int  # shared memory of a program
    shared: int  # of a multiprocessor
    warps: int = 64
    registers: int = 65536


GPUS = {
    "sm_80": Gpu("A100 40 GB", 80, 108, 1.555e12, 5120 * 1.41e9, 156e12, 163 << 10, 164 << 10),
    # The cache of an H100 is taken to give as many bytes a clock as that of an A100: it is not published.
    "sm_90": Gpu("H100 SXM", 90, 132, 3.35e12, 5120 * 1.83e9, 494.7e12, 227 << 10, 228 << 10),
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler reports on a kernel."""

    variant: "Variant"
    arch: str
    registers: int
    stack: int  # bytes of a thread that did not fit into registers
    shared: int

    @property
    def problem(self) -> str | None:
        x = self.variant
        name = f"{x.kernel} ({x.dtype}, widths {x.widths[0]} and {x.widths[1]}, {x.stages} stages) on {self.arch}"
        if self.stack > 0:
            return f"{name} spills {self.stack} bytes a thread"
        if self.shared > GPUS[self.arch].shared_block:
            return f"{name} takes {self.shared} bytes of shared memory"
        return None

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that can be there at a time."""
        gpu = GPUS[self.arch]
        warps = self.variant.warps
        by_registers = gpu.registers // (max(self.registers, 1) * 32 * warps)
        by_shared = gpu.shared // (self.shared + 1024)
        return min(by_registers, by_shared, gpu.warps // warps) * warps / gpu.warps

    @property
    def row(self) -> dict[str, Any]:
        """As it is recorded."""
        x = self.variant
        return {
            "kernel": x.kernel,
            "arch": self.arch,
            "dtype": x.dtype,
            "widths": list(x.widths),
            "tile": x.tile,
            "warps": x.warps,
            "stages": x.stages,
            "registers": self.registers,
            "spilled": self.stack,
            "shared": self.shared,
            "occupancy": self.occupancy,
            "problem": self.problem,
        }


class Variant(NamedTuple):
    """A kernel as it is compiled for some calls: the types of its arguments, and those that are constants."""

    kernel: str
    dtype: str
    widths: tuple[int, int]
    arguments: tuple[Argument, ...]
    tile: int
    warps: int
    stages: int
    registers: int | None


def variants_of(call: Any) -> Iterator[Variant]:
    """What is compiled for a call: one variant for each number of stages."""
    from lln.backends.triton.configs import stages_of
    from lln.backends.triton.tuning import kernels

    config, given = call.config(), call.arguments | call.tiles()
    arguments = tuple(_described(given[x.name], x) for x in kernels()[call.kernel].params)
    dtype = str(call.dtype).removeprefix("torch.")
    for stages in dict.fromkeys(stages_of(call.kernel, config)):
        yield Variant(call.kernel, dtype, call.widths, arguments, *config._replace(stages=stages))


def _described(x: Any, parameter: Any) -> Argument:
    """An argument as Triton distinguishes kernels by it."""
    if isinstance(x, tuple):
        return type(x), tuple(_described(part, parameter) for part in x)
    is_one = isinstance(x, int) and x == 1 and not parameter.do_not_specialize
    if parameter.is_constexpr or x is None or is_one:
        return "constexpr", x, False
    if isinstance(x, Tensor):
        return TYPES[str(x.dtype).removeprefix("torch.")], None, not parameter.do_not_specialize
    if isinstance(x, float):
        return "fp32", None, False
    return "i32", None, x % 16 == 0 and not parameter.do_not_specialize


def _parts(argument: Argument, place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Type, constant and alignment of each number or tensor of an argument, with its place."""
    if len(argument) == 2:
        for number, part in enumerate(argument[1]):
            yield from _parts(part, (*place, number))
    else:
        yield place, argument


def _signature(argument: Argument) -> Any:
    return argument[0](*map(_signature, argument[1])) if len(argument) == 2 else argument[0]


def build(variant: Variant, arch: str) -> Any:
    """What Triton makes of a variant, with all stages of the compiler."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lln.backends.triton.tuning import kernels

    function = kernels()[variant.kernel]
    parts = [x for place, argument in enumerate(variant.arguments) for x in _parts(argument, (place,))]
    source = ASTSource(
        fn=function,
        signature=dict(zip(function.arg_names, map(_signature, variant.arguments), strict=True)),
        constexprs={place: x for place, (kind, x, _) in parts if kind == "constexpr"},
        attrs={place: [["tt.divisibility", 16]] for place, (_, _, is_aligned) in parts if is_aligned},
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "maxnreg": variant.registers}
    return triton.compile(source, target=GPUTarget("cuda", GPUS[arch].capability, 32), options=options)


def compile_variant(variant: Variant, arch: str) -> Compiled:
    done = build(variant, arch)
    return Compiled(variant, arch, *_usage(done.asm["cubin"]), done.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as cuobjdump, which comes with Triton, prints them."""
    from triton.backends import nvidia

    program = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no registers: {text!r}")
    return int(found[1]), int(found[2])


def bytes_of(call: Any) -> int:
    """Bytes that the programs of a call read and write, each tensor once, or as often as some of them read it."""
    from lln.backends.triton.tuning import tensors_of

    tensors = tensors_of(call.arguments)
    times: dict[int, float] = {id(tensors[name]): call.grid[1] for name in READ_AGAIN.get(call.kernel, ())}
    for name, x in tensors.items():
        if name.endswith("squares"):  # half of a symmetric matrix, see `kernels.moments.is_stored`
            times[id(x)] = (1 + 8 / x.shape[-1]) / 2
    seen = {id(x): x for x in tensors.values()}
    return round(sum(x.numel() * x.element_size() * times.get(place, 1) for place, x in seen.items()))


def operations_of(call: Any, tokens: int, heads: int) -> float:
    """Floating point operations of the products of a call."""
    given = call.arguments
    width, value, rows = given.get("D", 0), given.get("V", 0), tokens * heads
    tile = call.config().tile
    square, pair = 2 * width * width, 2 * width * value
    chunk = 2 * tile * (width + value)
    near = 2 * 64 * (width + value)
    blocks = given.get("VALUE_BLOCKS", 1)
    each = {
        "moments_kernel": 2 * square,  # queries and keys
        "summarize_kernel": pair,
        "recall_kernel": pair,
        "queries_backward_kernel": 2 * pair,
        "keys_backward_kernel": 2 * pair,
        "causal_kernel": 2 * pair + chunk * blocks,
        "causal_queries_backward_kernel": (2 * pair + chunk) / blocks,
        "causal_keys_backward_kernel": (2 * pair + chunk) / blocks,
        "near_kernel": near,
        "near_queries_backward_kernel": 2.5 * near,
        "near_keys_backward_kernel": 2 * near,
    }
    return float(each.get(call.kernel, 0) * rows)


@dataclass(frozen=True)
class Bound:
    """What a pass needs at least."""

    bytes: int
    operations: float
    seconds: float
    once_seconds: float  # of reading queries, keys and values and writing the output, once each


def bound_of(calls: Sequence[Any], gpu: Gpu, *, tokens: int, heads: int, head_dim: int, dtype: str) -> Bound:
    sizes, work = [bytes_of(call) for call in calls], [operations_of(call, tokens, heads) for call in calls]
    rate = gpu.operations / (3 if dtype == "float32" else 1)
    times = []
    for call, size, each in zip(calls, sizes, work, strict=True):
        busy = min(1.0, math.prod(call.grid) / gpu.multiprocessors)  # a program runs on one multiprocessor
        times.append(max(size / min(gpu.bandwidth, gpu.cache_bandwidth * busy), each / (rate * busy)))
    once = 4 * tokens * heads * head_dim * DTYPES[dtype].itemsize / gpu.bandwidth
    return Bound(sum(sizes), sum(work), sum(times), once)


def all_variants(dtypes: Sequence[str], widths: Sequence[tuple[int, int]]) -> list[Variant]:
    """Every kernel and config that the backend ships for some dtypes, and head and value widths."""
    found: dict[Variant, None] = {}
    for dtype in dtypes:
        for head_dim, value_dim in widths:
            if max(head_dim, value_dim) <= widest(dtype):
                for call in all_calls(dtype, head_dim, value_dim):
                    found |= dict.fromkeys(variants_of(call))
    return list(found)


def cover(variants: Sequence[Variant], archs: Sequence[str]) -> list[tuple[Variant, str]]:
    """Some variants and architectures, of each kernel such that any two choices that occur together are compiled.

    Choices are the dtype, each width, the number of stages, the architecture, and what is compiled in for each
    argument: whether there is one, and flags. A kernel spills where it holds much at a time, which two choices or the
    largest width bring about; all combinations take hours.
    """
    chosen: list[tuple[Variant, str]] = []
    by_kernel: dict[str, list[tuple[Variant, str]]] = {}
    for variant in variants:
        by_kernel.setdefault(variant.kernel, []).extend((variant, arch) for arch in archs)
    for jobs in by_kernel.values():
        bits: dict[Any, int] = {}  # each pair of choices has a bit
        masks = [sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(_choices(*job), 2)) for job in jobs]
        left = (1 << len(bits)) - 1
        while left:
            best = max(range(len(jobs)), key=[(mask & left).bit_count() for mask in masks].__getitem__)
            chosen.append(jobs[best])
            left &= ~masks[best]
    return chosen


def _choices(variant: Variant, arch: str) -> list[Any]:
    named = [("dtype", variant.dtype), ("stages", variant.stages), ("arch", arch)]
    return [*named, *(x for place, y in enumerate(variant.arguments) for x in _compiled_in(y, (place,)))]


def _compiled_in(argument: Argument, place: tuple[int, ...]) -> Iterator[Any]:
    """What is a constant of an argument and its parts, and which of them are given."""
    yield place, argument[1] if argument[0] == "constexpr" else "given"
    if len(argument) == 2:
        for number, part in enumerate(argument[1]):
            yield from _compiled_in(part, (*place, number))


def widest(dtype: str) -> int:
    from lln.backends.triton.configs import WIDEST, kind_of

    return WIDEST[kind_of(is_float32=dtype == "float32")]


def compile_all(jobs: Sequence[tuple[Variant, str]], workers: int = 1) -> Iterator[Compiled]:
    """Variants compiled for architectures, as they are done, by some processes."""
    if workers == 1:
        yield from (compile_variant(*job) for job in jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_variant, *job) for job in jobs]):
            yield done.result()


def bound_rows(arch: str, *, dtype: str, head_dim: int, heads: int) -> list[dict[str, Any]]:
    """The bounds of attention at the lengths of the paper's table 2: of a forward pass, and of all passes."""
    gpu, rows = GPUS[arch], []
    for tokens in LENGTHS:
        passes = record_calls(tokens, dtype=dtype, head_dim=head_dim, heads=heads)
        options: dict[str, Any] = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
        bounds = {name: bound_of(calls, gpu, **options) for name, calls in passes.items()}
        forward = bounds["LLN forward"]
        lln = forward.seconds + bounds["LLN backward"].seconds
        near = [bounds[name].seconds for name in ("blocks forward", "blocks backward") if name in bounds]
        rows.append(
            {
                "gpu": gpu.name,
                **options,
                "bytes": forward.bytes,
                "operations": forward.operations,
                "seconds": forward.seconds,
                "of_once": forward.seconds / forward.once_seconds,
                "lln_seconds": lln * LAYERS,
                "lln_diag_seconds": (lln + sum(near)) * LAYERS if near else None,
            }
        )
    return rows
