"""Triton for NVIDIA GPUs: LLN attention, full and causal, and softmax among neighbours, with gradients.

`kernels` has the code that runs on the GPU, `statistics`, `forward`, `backward`, `near` and `step` call it, `ops` makes
torch.library ops of it, and `configs` has the sizes of tiles. Without a GPU it runs in Triton's interpreter
(`TRITON_INTERPRET=1` before the process starts), slowly, for tests; it was compiled for real GPUs (`lln bench kernels`)
and not timed on one.
"""

import functools
import os
from dataclasses import replace

import torch
from torch import Tensor

from lln.backends.base import Backend, transformed_reason
from lln.backends.torch.advance import centered_recurrence
from lln.backends.triton.configs import WIDEST, WIDEST_CAUSAL, WIDEST_NEAR, kind_of
from lln.forms import centered, sample_centers
from lln.problem import Problem
from lln.recurrence import Advance, Recurrence

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # compute capability: the first with TF32
OLDEST_TRITON = (3, 4)  # as the extra in pyproject.toml asks for; kernels take named tuples as arguments


class TritonBackend(Backend):
    """float32, float16 and bfloat16 on NVIDIA GPUs, for widths up to 256 (float32: 128)."""

    name = "triton"
    has_lse = True

    def why_not(self, problem: Problem) -> str | None:
        reason = unsupported_reason(problem.query, problem.value)
        if reason is not None:
            return reason
        if problem.far and problem.is_causal and problem.query.shape[3] > WIDEST_CAUSAL:
            return f"causal attention of head dimension {problem.query.shape[3]} is wider than {WIDEST_CAUSAL}"
        widest = max(problem.query.shape[3], problem.value.shape[3])
        if problem.near is not None and widest > WIDEST_NEAR:
            return f"width {widest} is larger than {WIDEST_NEAR}, the most for attention among neighbours"
        return transformed_reason((problem.query, problem.key, problem.value))

    def far(self, problem: Problem) -> Tensor:
        from lln.backends.triton.ops import far_op

        if problem.form == "decomposed" and problem.centers is None:
            problem = replace(problem, centers=sample_centers(problem))
        alpha, beta = problem.alpha, problem.beta
        if problem.scope == "batch" and (alpha is None or beta is None):
            alpha, beta = centered(problem)[0].scales()
        output: Tensor = far_op(
            problem.query,
            problem.key,
            problem.value,
            problem.queries.keep,
            problem.keys.keep,
            alpha,
            beta,
            problem.key_weight,
            *(problem.centers or (None, None)),
            problem.matching,
            problem.form,
            problem.is_causal,
        )[0]
        return output

    def near(self, problem: Problem) -> Tensor:
        return self.near_with_lse(problem)[0]

    def near_with_lse(self, problem: Problem) -> tuple[Tensor, Tensor]:
        from lln.backends.triton.ops import near_op

        tokens = (problem.query, problem.key, problem.value, problem.keys.keep)
        found: tuple[Tensor, Tensor] = near_op(*tokens, problem.block_size, problem.near == "window", problem.is_causal)
        return found

    def why_not_advance(self, recurrence: Recurrence) -> str | None:
        query, key, value, memory = recurrence.query, recurrence.key, recurrence.value, recurrence.memory
        near_query, near_key = recurrence.near_query, recurrence.near_key
        reason = unsupported_reason(query, value)
        if reason is None and near_query is not None:
            reason = unsupported_reason(near_query, value)
        if reason is not None:
            return reason
        if query.shape[2] != 1:
            return "several tokens at once advance a state in plain torch"
        if torch.compiler.is_compiling():
            return "torch.compile wants to see the operations of a state"
        if memory.mass.dtype != torch.float32 or memory.query_sums.dtype != torch.float64:
            return "the state has other dtypes than one made for these tokens"
        tensors = (query, key, value, *memory, recurrence.alpha, recurrence.beta, recurrence.key_weight)
        tensors += (near_query, near_key, *(recurrence.centers or ()))
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return "gradients flow through a state in plain torch"
        return transformed_reason(tensors)

    def advance(self, recurrence: Recurrence) -> Advance:
        from lln.backends.triton.step import step

        return step(recurrence if recurrence.centers is None else centered_recurrence(recurrence, *recurrence.centers))


def unsupported_reason(query: Tensor, value: Tensor) -> str | None:
    """Why there are no kernels for tokens of this kind."""
    if query.device.type != "cuda" and not (query.is_cpu and is_interpreted()):
        return f"device is {query.device.type}"
    if query.dtype not in DTYPES:
        return f"dtype is {str(query.dtype).removeprefix('torch.')}"
    widest = WIDEST[kind_of(is_float32=query.dtype == torch.float32)]
    for name, width in (("head dimension", query.shape[3]), ("value width", value.shape[3])):
        if width > widest:
            return f"{name} {width} is larger than {widest}"
    return missing_reason() or (device_reason(query.device) if query.device.type == "cuda" else None)


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _missing_reason() -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        return f"triton {triton.__version__} is older than {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}"
    return None


def missing_reason() -> str | None:
    """Why Triton cannot be used; None if it can."""
    return _missing_reason()


@functools.cache
def _device_reason(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "the kernels were not compiled for AMD GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return f"compute capability {capability[0]}.{capability[1]} is older than {OLDEST[0]}.{OLDEST[1]}"
    return None


def device_reason(device: torch.device) -> str | None:
    """Why a GPU cannot run the kernels; None if it can."""
    return _device_reason(device)


# All that torch.compiler.assume_constant_result does; calling it would import the compiler, which takes seconds.
for _constant in (is_interpreted, missing_reason, device_reason):
    _constant._dynamo_marked_constant = True  # type: ignore[union-attr]
