"""`lln bench kernels`: the Triton kernels compiled for real GPUs, and the least time they could take. None is timed.

The calls of one forward and backward pass are recorded on tensors without memory, then each kernel is compiled as it
would be there. The bound of a call is the larger of the time that its bytes take at the bandwidth of the memory and the
time that its products take on the tensor cores. Every tensor counts once for each kernel that has it. Sums that kernels
hand to each other stay in the L2 cache if those of a call fit into half of it, and then do not count; `strict` counts
them.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.bench.candidates import DTYPES

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LAYERS = 12  # of RoBERTa-base, as in table 2
TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "float64": "*fp64", "uint8": "*u8"}
TYPES |= {"int32": "*i32", "int64": "*i64"}


@dataclass(frozen=True)
class Gpu:
    """What the maker publishes: memory in bytes a second, TF32 products (dense) in operations a second, bytes."""

    name: str
    capability: int
    bandwidth: float
    operations: float
    cache: float
    shared_block: int  # shared memory of a program
    shared: int  # of a multiprocessor
    warps: int = 64
    registers: int = 65536


GPUS = {
    "sm_80": Gpu("A100 40 GB", 80, 1.555e12, 156e12, 40e6, 163 << 10, 164 << 10),
    "sm_90": Gpu("H100 SXM", 90, 3.35e12, 494.7e12, 50e6, 227 << 10, 228 << 10),
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel."""

    kernel: str
    arch: str
    tile: int
    warps: int
    stages: int
    registers: int
    stack: int  # bytes of a thread that did not fit into registers
    shared: int

    @property
    def problem(self) -> str | None:
        if self.stack > 0:
            return f"{self.kernel} spills {self.stack} bytes a thread on {self.arch} with {self.stages} stages"
        if self.shared > GPUS[self.arch].shared_block:
            return f"{self.kernel} takes {self.shared} bytes of shared memory on {self.arch}"
        return None

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that can be there at a time."""
        gpu = GPUS[self.arch]
        by_registers = gpu.registers // (max(self.registers, 1) * 32 * self.warps)
        by_shared = gpu.shared // (self.shared + 1024)
        return min(by_registers, by_shared, gpu.warps // self.warps) * self.warps / gpu.warps


def record_calls(
    tokens: int, *, dtype: str, head_dim: int = 64, heads: int = 12, is_causal: bool = False, near: bool = True
) -> dict[str, list[Any]]:
    """The calls of kernels that LLN attention and softmax among neighbours make: forward and backward."""
    from lln.backends.triton import backward, forward, tuning
    from lln.backends.triton.arguments import FarInputs
    from lln.backends.triton.near import near_backward, near_forward

    found: dict[str, list[Any]] = {}
    q, k, v = (torch.empty(1, heads, tokens, head_dim, dtype=DTYPES[dtype], device="meta") for _ in range(3))
    inputs = FarInputs(q, k, v, *[None] * 7)
    with tuning.recording() as calls:
        far = forward.far_forward(inputs, "variance", "paper", is_causal=is_causal)
    found["LLN forward"] = calls
    with tuning.recording() as calls:
        wanted = backward.Wanted(False, False, False)
        used = inputs.with_scales(far[1], far[2])
        gradient = torch.empty_like(far[0])
        backward.far_backward(gradient, used, far[0], *far[3:], "paper", wanted, is_causal=is_causal)
    found["LLN backward"] = calls
    if near:
        options: dict[str, bool] = {"is_window": False, "is_causal": is_causal}
        with tuning.recording() as calls:
            output, logs = near_forward(q, k, v, None, 64, **options)
        found["blocks forward"] = calls
        with tuning.recording() as calls:
            near_backward(gradient, q, k, v, None, output, logs, 64, **options)
        found["blocks backward"] = calls
    return found


def compile_call(call: Any, arch: str, stages: int | None = None) -> Compiled:
    """Compile a kernel as it would be for this call."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lln.backends.triton.tuning import kernels

    function, config = kernels()[call.kernel], call.config()
    given = call.arguments | call.tiles()
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        x = given[parameter.name]
        kind = "constexpr"
        if parameter.is_constexpr or (isinstance(x, int) and x == 1):
            constants[(place,)] = x
        elif isinstance(x, Tensor):
            kind = TYPES[str(x.dtype).removeprefix("torch.")]
        else:
            kind = "fp32" if isinstance(x, float) else "i32"
        if isinstance(x, Tensor) or (kind == "i32" and x % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    stages = stages or config.stages
    target = GPUTarget("cuda", GPUS[arch].capability, 32)
    done = triton.compile(source, target=target, options={"num_warps": config.warps, "num_stages": stages})
    registers, stack = _usage(done.asm["cubin"])
    return Compiled(call.kernel, arch, config.tile, config.warps, stages, registers, stack, done.metadata.shared)


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
        raise RuntimeError(f"cuobjdump says nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


def bytes_of(call: Any, tokens: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Bytes of the tensors of a call: those with the shape of queries, keys or values, and all others."""
    seen = {id(x): x for x in call.arguments.values() if isinstance(x, Tensor)}.values()
    sizes = [(x.numel() * x.element_size(), tuple(x.shape) in tokens) for x in seen]
    return sum(n for n, is_token in sizes if is_token), sum(n for n, is_token in sizes if not is_token)


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
        "moments_kernel": square,
        "summarize_kernel": pair,
        "recall_kernel": pair,
        "queries_backward_kernel": 2 * pair,
        "keys_backward_kernel": 2 * pair,
        "causal_kernel": 2 * pair + chunk * blocks,
        "causal_queries_backward_kernel": (2 * pair + chunk) / blocks,
        "causal_keys_backward_kernel": (2 * pair + chunk) / blocks,
        "near_kernel": near,
        "near_queries_backward_kernel": 1.5 * near,
        "near_keys_backward_kernel": 2 * near,
    }
    return float(each.get(call.kernel, 0) * rows)


@dataclass(frozen=True)
class Bound:
    """What a pass needs at least."""

    token_bytes: int
    other_bytes: int
    operations: float
    seconds: float
    strict_seconds: float  # with the sums between kernels in the memory, too
    once_seconds: float  # of reading queries, keys and values and writing the output, once each


def bound_of(calls: Sequence[Any], gpu: Gpu, *, tokens: int, heads: int, head_dim: int, dtype: str) -> Bound:
    shape = (1, heads, tokens, head_dim)
    sizes = [bytes_of(call, [shape]) for call in calls]
    work = [operations_of(call, tokens, heads) for call in calls]
    rate = gpu.operations / (3 if dtype == "float32" else 1)
    fits = max(other for _, other in sizes) <= gpu.cache / 2
    products = [x / rate for x in work]
    times = [
        max((own + (0 if fits else other)) / gpu.bandwidth, product)
        for (own, other), product in zip(sizes, products, strict=True)
    ]
    strict = [max(sum(size) / gpu.bandwidth, product) for size, product in zip(sizes, products, strict=True)]
    once = 4 * tokens * heads * head_dim * DTYPES[dtype].itemsize / gpu.bandwidth
    totals = sum(own for own, _ in sizes), sum(other for _, other in sizes)
    return Bound(*totals, sum(work), sum(times), sum(strict), once)


def compile_all(archs: Sequence[str], *, dtype: str, head_dim: int, tuned: bool = False) -> list[Compiled]:
    """Every kernel of every pass that there is for a width, compiled; with `tuned` for all numbers of stages."""
    from lln.backends.triton.configs import WIDEST_CAUSAL, stages_of

    calls: dict[tuple[str, bool], Any] = {}
    for is_causal in (False, True) if head_dim <= WIDEST_CAUSAL else (False,):
        for some in record_calls(1024, dtype=dtype, head_dim=head_dim, heads=2, is_causal=is_causal).values():
            for call in some:
                calls.setdefault((call.kernel, call.arguments.get("OF_VALUES", False)), call)
    found = []
    for call in calls.values():
        choices = stages_of(call.kernel, call.config()) if tuned else (call.config().stages,)
        found += [compile_call(call, arch, stages) for arch in archs for stages in dict.fromkeys(choices)]
    return found


def bound_rows(gpu: Gpu, *, dtype: str, head_dim: int, heads: int) -> list[dict[str, Any]]:
    """The bounds of attention at the lengths of the paper's table 2: of a forward pass, and of all passes."""
    rows = []
    for tokens in LENGTHS:
        passes = record_calls(tokens, dtype=dtype, head_dim=head_dim, heads=heads)
        options: dict[str, Any] = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
        bounds = {name: bound_of(calls, gpu, **options) for name, calls in passes.items()}
        forward = bounds["LLN forward"]
        lln = forward.seconds + bounds["LLN backward"].seconds
        near = bounds["blocks forward"].seconds + bounds["blocks backward"].seconds
        rows.append(
            {
                "tokens": tokens,
                "bytes": forward.token_bytes + forward.other_bytes,
                "operations": forward.operations,
                "seconds": forward.seconds,
                "of_once": forward.seconds / forward.once_seconds,
                "strict_of_once": forward.strict_seconds / forward.once_seconds,
                "lln_seconds": lln * LAYERS,
                "lln_diag_seconds": (lln + near) * LAYERS,
            }
        )
    return rows
