"""Which code computes attention, and why.

- `cpu`: C for CPUs, built at first use (float32, float16, bfloat16);
- `torch`: plain torch, on any device; compiles, exports, differentiates twice.

The first that can takes the problem. `LLN_BACKEND=torch` (or another name) leaves only that one and `torch`.
"""

import os
from typing import Any, Unpack

from torch import Tensor

from lln.backends.base import Backend
from lln.backends.cpu import CpuBackend
from lln.backends.torch import TorchBackend
from lln.problem import Options, Problem
from lln.recurrence import Advance, Recurrence

BACKENDS: tuple[Backend, ...] = (CpuBackend(), TorchBackend())

__all__ = ["BACKENDS", "Backend", "advance", "attention", "choose", "explain"]


def attention(problem: Problem) -> Tensor:
    """Compute a problem with the first backend that can."""
    if problem.is_empty:
        return problem.output_of_nothing()
    return choose(problem).attention(problem)


def advance(recurrence: Recurrence) -> Advance:
    """Compute the next tokens of a state with the first backend that can."""
    for backend in BACKENDS[:-1]:
        if disabled_reason(backend.name) is None and backend.why_not_advance(recurrence) is None:
            return backend.advance(recurrence)
    return BACKENDS[-1].advance(recurrence)


def choose(problem: Problem) -> Backend:
    """The first backend that can compute a problem; the last one, plain torch, always can."""
    for backend in BACKENDS[:-1]:
        if disabled_reason(backend.name) is None and backend.why_not(problem) is None:
            return backend
    return BACKENDS[-1]


def explain(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> str:
    """The backends that can compute this attention, with the reasons of those that cannot: "cpu: yes; torch: yes".

    The first that says yes is taken. Options are those of `lln.lln_diag_attention`; without `block_size` it is about
    `lln.lln_attention`.

    Raises:
        TypeError, ValueError: the input is refused by the attention functions, too.
    """
    given: dict[str, Any] = dict(options)
    if given.pop("cu_seqlens", None) is not None:
        raise ValueError("explain is about one batch; leave cu_seqlens out")
    near: Any = given.pop("near", None) or ("blocks" if given.get("block_size") is not None else None)
    problem = Problem.make(query, key, value, far=True, near=near, **given)
    reasons = ((x.name, disabled_reason(x.name) or x.why_not(problem)) for x in BACKENDS)
    return "; ".join(f"{name}: {'yes' if reason is None else f'no, {reason}'}" for name, reason in reasons)


def disabled_reason(name: str) -> str | None:
    """Why a backend is not used whatever the problem: the environment variable LLN_BACKEND names another one."""
    wanted = os.environ.get("LLN_BACKEND", "")
    if wanted and wanted not in (names := [x.name for x in BACKENDS]):
        raise ValueError(f"LLN_BACKEND must be {', '.join(names)} or not set, got {wanted!r}")
    return f"LLN_BACKEND={wanted}" if wanted and name not in (wanted, "torch") else None


# All that torch.compiler.assume_constant_result does; calling it would import the compiler, which takes seconds.
disabled_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
