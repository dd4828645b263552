"""C for CPUs: forward and backward in one pass over the tokens each, built with the system's compiler at first use.

`binding` describes tensors to the C code (`src/`) in the structs of `layout`, `prepared` does so once for many calls,
`autograd` makes functions with gradients and torch.library ops of it, and `build` compiles and loads it.
"""

import functools
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from lln.backends.base import Backend, Prepared, transformed_reason
from lln.backends.cpu import binding
from lln.backends.cpu.allocation import as_rows
from lln.backends.cpu.autograd import attention, near_with_lse, prepare_gradients
from lln.backends.cpu.binding import TYPES
from lln.backends.cpu.build import BuildError, load
from lln.backends.cpu.layout import MAX_BLOCK, MAX_WIDTH
from lln.backends.cpu.prepared import prepare
from lln.forms import centered
from lln.problem import Problem
from lln.recurrence import Advance, Recurrence


class CpuBackend(Backend):
    """float32, float16 and bfloat16 on CPUs, for widths that are multiples of 8."""

    name = "cpu"
    has_lse = True

    def why_not(self, problem: Problem) -> str | None:
        reason = _unsupported_reason(problem.query, problem.value)
        if reason is not None:
            return reason
        if problem.near and min(problem.block_size, problem.key.shape[2]) > MAX_BLOCK:
            what = "windows" if problem.near == "window" else "blocks"
            return f"{what} of {min(problem.block_size, problem.key.shape[2])} tokens are larger than {MAX_BLOCK}"
        if not problem.is_causal:
            for name, scale in (("alpha", problem.alpha), ("beta", problem.beta)):
                if scale is not None and scale.shape[2] != 1:
                    return f"{name} differs between tokens"
        if problem.centers is not None and torch.is_grad_enabled() and any(x.requires_grad for x in problem.centers):
            return "gradients flow to centers in plain torch"
        return transformed_reason((problem.query, problem.key, problem.value)) or build_problem()

    def far(self, problem: Problem) -> Tensor:
        return self.attention(replace(problem, near=None, block_size=0))

    def near(self, problem: Problem) -> Tensor:
        return self.attention(replace(problem, far=False))

    def near_with_lse(self, problem: Problem) -> tuple[Tensor, Tensor]:
        return near_with_lse(replace(problem, far=False))

    def attention(self, problem: Problem) -> Tensor:
        """Matching, LLN attention and its mean with the neighbours are one call into C."""
        is_weighted = problem.key_weight is not None and problem.form == "paper"
        apart = problem.scope == "batch" or is_weighted  # what the C code does not match itself
        if problem.far and apart and (problem.alpha is None or problem.beta is None):
            alpha, beta = centered(problem)[0].scales()
            problem = replace(problem, alpha=alpha, beta=beta)
        return attention(problem)

    def prepare(self, problem: Problem) -> Prepared | None:
        tokens = (problem.query, problem.key, problem.value)
        others = (problem.queries.keep, problem.keys.keep, problem.alpha, problem.beta, problem.key_weight)
        is_plain = problem.scope == "sample" and all(x is None for x in others)
        if problem.centers is not None:  # read where they are
            is_plain &= all(x.dtype is torch.float32 and x.is_contiguous() for x in problem.centers)
        if not is_plain or not all(as_rows(x) is x for x in tokens):
            return None
        is_tracked = torch.is_grad_enabled() and any(x.requires_grad for x in tokens)
        return prepare_gradients(problem) if is_tracked else prepare(problem)

    def why_not_advance(self, recurrence: Recurrence) -> str | None:
        if torch.compiler.is_compiling():
            return "torch.compile traces the operations of a state"
        query, key, value, memory, _, alpha, beta, _, _, key_weight, _, near_query, near_key, *_ = recurrence
        reason = _unsupported_reason(query, value)
        if reason is None and near_query is not None:
            reason = _unsupported_reason(near_query, value)
        if reason is not None:
            return reason
        if memory.recent_key is not None and memory.recent_key.shape[2] > MAX_BLOCK:
            what = "windows" if recurrence.near == "window" else "blocks"
            return f"{what} of {memory.recent_key.shape[2]} tokens are larger than {MAX_BLOCK}"
        tensors = (query, key, value, *memory, alpha, beta, key_weight, near_query, near_key)
        if torch.is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    return "gradients flow through a state in plain torch"
        if binding.dtypes_of(memory) != binding.MEMORY_DTYPES.get((memory.recent_key is None, value.dtype)):
            return "the state has other dtypes than one made for these tokens on a CPU"
        return transformed_reason(tensors) or build_problem()

    def advance(self, recurrence: Recurrence) -> Advance:
        return binding.advance(recurrence)

    def prepare_step(self, recurrence: Recurrence) -> Prepared | None:
        others = (recurrence.keep, recurrence.key_weight, recurrence.near_query, recurrence.near_key)
        tokens = recurrence[:3]
        is_plain = not recurrence.apart and all(x is None for x in others)
        return binding.prepare_step(recurrence) if is_plain and all(as_rows(x) is x for x in tokens) else None


def _unsupported_reason(query: Tensor, value: Tensor) -> str | None:
    """Why there is no C code for tokens of this kind."""
    if not query.is_cpu:
        return f"device is {query.device.type}"
    if query.dtype not in TYPES:
        return f"dtype is {str(query.dtype).removeprefix('torch.')}"
    for name, width in (("head dimension", query.shape[3]), ("value width", value.shape[3])):
        if width % 8 != 0 or not 8 <= width <= MAX_WIDTH:
            return f"{name} {width} is not a multiple of 8 up to {MAX_WIDTH}"
    return None


def build_problem() -> str | None:
    """Why the C code could not be built; None if it was."""
    return _build_once()


# All that torch.compiler.assume_constant_result does; calling it would import the compiler, which takes seconds.
build_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _build_once() -> str | None:
    """Why the C code could not be built, with a warning the first time; None if it was."""
    try:
        load()
    except BuildError as error:
        warnings.warn(f"attention runs in plain torch, because {error}", stacklevel=2)
        return str(error)
    return None
