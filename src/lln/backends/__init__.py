"""Which code computes attention, and why.

- `cpu`: C for CPUs, built at first use (float32, float16, bfloat16);
- `triton`: kernels for NVIDIA GPUs (float32, float16, bfloat16);
- `torch`: plain torch, on any device; compiles, exports, differentiates twice.

The first that can takes the problem. `LLN_BACKEND=torch` (or another name) leaves only that one and `torch`; inside
`with lln.backends.use("torch")` there is only that one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Unpack

from torch import Tensor

from lln.backends.base import Backend, Prepared
from lln.backends.cpu import CpuBackend
from lln.backends.torch import TorchBackend
from lln.backends.torch.advance import near_lse
from lln.backends.triton import TritonBackend
from lln.precision import accumulator
from lln.problem import Options, Problem
from lln.recurrence import Advance, Recurrence
from lln.repeats import Signature

BACKENDS: tuple[Backend, ...] = (CpuBackend(), TritonBackend(), TorchBackend())

__all__ = ["BACKENDS", "Backend", "UnsupportedError", "advance", "attention", "choose", "explain", "use"]

_used: ContextVar[str | None] = ContextVar("lln.backends.use", default=None)


class UnsupportedError(ValueError):
    """The backend of `use` cannot compute a problem; the message has its reason."""


@contextmanager
def use(name: str) -> Iterator[None]:
    """Compute everything in a `with` block by one backend, whatever LLN_BACKEND is.

    A function that torch.compile compiled before the block keeps the backend that it was compiled for.

    Args:
        name: of a backend, "torch" or "cpu".

    Returns:
        A context manager; in it, the blocks of other threads do not count.

    Raises:
        ValueError: there is no backend of that name.
        UnsupportedError: the backend cannot compute a problem of the block.

    Example:
        >>> x = torch.ones(1, 1, 4, 8)
        >>> with lln.backends.use("torch"):
        ...     print(lln.lln_attention(x, x, x).shape)
        torch.Size([1, 1, 4, 8])
    """
    if name not in (names := [x.name for x in BACKENDS]):
        raise ValueError(f"a backend must be one of {', '.join(names)}, got {name!r}")
    token = _used.set(name)
    try:
        yield
    finally:
        _used.reset(token)


class Repeats:
    """Prepared calls by signature (`lln.repeats`), of some number at most."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._prepared: dict[Signature, tuple[str, Prepared]] = {}

    def find(self, signature: Signature | None) -> Prepared | None:
        if signature is None:  # also where torch.compile traces: it would guard on each signature of the dictionary
            return None
        found = self._prepared.get(signature)
        return found[1] if found is not None and disabled_reason(found[0]) is None else None

    def keep(self, signature: Signature, backend: Backend, prepared: Prepared) -> None:
        if len(self._prepared) >= self._size:
            self._prepared.clear()
        self._prepared[signature] = backend.name, prepared


CALLS = Repeats(1024)


def attention(problem: Problem, signature: Signature | None = None) -> Tensor:
    """Compute a problem with the first backend that can.

    Args:
        problem: a validated call, `Problem.make`.
        signature: that of a call that may be repeated (`lln.repeats`), which is prepared then.

    Returns:
        The output (B, H, N, V).

    Raises:
        UnsupportedError: the backend of `use` cannot compute it.

    Example:
        >>> x = torch.ones(1, 1, 4, 8)
        >>> attention(Problem.make(x, x, x, far=True, near=None)).shape
        torch.Size([1, 1, 4, 8])
    """
    if problem.is_empty:
        return problem.output_of_nothing()
    backend = choose(problem)
    if signature is not None and (prepared := backend.prepare(problem)) is not None:
        CALLS.keep(signature, backend, prepared)
        return prepared(problem.query, problem.key, problem.value)
    return backend.attention(problem)


def near_with_lse(problem: Problem) -> tuple[Tensor, Tensor]:
    """Softmax attention among neighbours and the log-sum-exp (B, H, N) of its scores, in the accumulator's dtype.

    Where the first backend that can compute the attention has no log-sum-exp, both are computed by plain torch.
    """
    if problem.is_empty:
        output = problem.output_of_nothing()
        return output, output.new_zeros(output.shape[:3], dtype=accumulator(output.dtype))
    backend = choose(problem)
    return (backend if backend.has_lse else TorchBackend()).near_with_lse(problem)


def advance(recurrence: Recurrence, signature: Signature | None = None, repeats: Repeats | None = None) -> Advance:
    """Compute the next tokens of a state with the first backend that can; `lln.LLNState` calls it.

    Args:
        recurrence: the validated call of a state.
        signature: that of a step that may be repeated (`lln.repeats`), which is prepared then.
        repeats: where prepared steps of this state are kept.

    Returns:
        The outputs of the tokens, and the memory after them.

    Raises:
        UnsupportedError: the backend of `use` cannot compute it.

    Example:
        >>> state, x = lln.LLNState.empty(batch=1, heads=1, head_dim=8), torch.ones(1, 1, 1, 8)
        >>> state.step(x, x, x)[0].shape  # by way of this function
        torch.Size([1, 1, 1, 8])
    """
    backend = _first(lambda backend: backend.why_not_advance(recurrence))
    if signature is not None and repeats is not None and (prepared := backend.prepare_step(recurrence)) is not None:
        repeats.keep(signature, backend, prepared)
    if backend.has_lse or not recurrence.apart or recurrence.memory.recent_key is None:
        return backend.advance(recurrence)
    lse = near_lse(recurrence)  # before its memory is overwritten
    return backend.advance(recurrence)._replace(near_lse=lse)


def choose(problem: Problem) -> Backend:
    """The first backend that can compute a problem; the last one, plain torch, always can.

    Args:
        problem: a validated call, `Problem.make`.

    Returns:
        The backend.

    Raises:
        UnsupportedError: the backend of `use` cannot compute it.

    Example:
        >>> x = torch.ones(1, 1, 4, 8)
        >>> with lln.backends.use("torch"):
        ...     choose(Problem.make(x, x, x, far=True, near=None)).name
        'torch'
    """
    return _first(lambda backend: backend.why_not(problem))


def _first(why_not: Callable[[Backend], str | None]) -> Backend:
    """The first backend that is not disabled and has no reason not to compute."""
    refused = ""
    for backend in BACKENDS:
        if disabled_reason(backend.name) is None:
            reason = why_not(backend)
            if reason is None:
                return backend
            refused = f"{backend.name} cannot compute this, because {reason}"
    raise UnsupportedError(f"{refused}; leave lln.backends.use out, or name a backend that can (lln.backends.explain)")


def explain(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> str:
    """The backends that can compute this attention, with the reasons of those that cannot: "cpu: yes; torch: yes".

    The first without a reason against it is taken. Options are those of `lln.lln_diag_attention`; without `block_size`
    it is about `lln.lln_attention`.

    Args:
        query: (B, H, N, D).
        key: (B, H_k, M, D).
        value: (B, H_k, M, V).
        options: those of the attention, without `cu_seqlens`.

    Returns:
        A line for people to read.

    Raises:
        TypeError, ValueError: the input is refused by the attention functions, too.

    Example:
        >>> x = torch.ones(1, 1, 4, 8, dtype=torch.float64)
        >>> explain(x, x, x).endswith("torch: yes")
        True
    """
    given: dict[str, Any] = dict(options)
    if given.pop("cu_seqlens", None) is not None:
        raise ValueError("explain is about one batch; leave cu_seqlens out")
    near: Any = given.pop("near", None) or ("blocks" if given.get("block_size") is not None else None)
    problem = Problem.make(query, key, value, far=True, near=near, **given)
    reasons = ((x.name, disabled_reason(x.name) or x.why_not(problem)) for x in BACKENDS)
    return "; ".join(f"{name}: {'yes' if reason is None else f'no, {reason}'}" for name, reason in reasons)


def disabled_reason(name: str) -> str | None:
    """Why a backend is not used whatever the problem: `use` or the environment variable LLN_BACKEND names another."""
    used = _used.get()
    if used is not None:
        return None if name == used else f"lln.backends.use({used!r})"
    wanted = os.environ.get("LLN_BACKEND", "")
    if wanted and wanted not in (names := [x.name for x in BACKENDS]):
        raise ValueError(f"LLN_BACKEND must be {', '.join(names)} or not set, got {wanted!r}")
    return f"LLN_BACKEND={wanted}" if wanted and name not in (wanted, "torch") else None


# All that torch.compiler.assume_constant_result does; calling it would import the compiler, which takes seconds.
disabled_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
