"""Which kernel an input takes, and why not the other."""

import functools
import os
import warnings

import torch
from torch import Tensor

from lln.checks import is_recorded
from lln.kernels.build import BuildError, load
from lln.kernels.ops import TYPES

# What the fused code has room for in its tiles.
MAX_WIDTH = 256
MAX_BLOCK = 1024


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    block_size: int | None = None,
) -> str:
    """The kernels that can compute this attention, with the reason of those that cannot.

    The first that says yes is taken. `block_size` is that of the diagonal part, if there is one.
    """
    reason = why_not_fused(query, key, value, is_causal=is_causal, alpha=alpha, beta=beta, block_size=block_size)
    return f"cpu_fused: {'yes' if reason is None else f'no, {reason}'}; torch: yes"


def why_not_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    block_size: int | None,
) -> str | None:
    """Why the fused CPU code cannot take this attention; None if it can."""
    tensors = (query, key, value)
    if query.device.type != "cpu":
        return f"device is {query.device.type}"
    if query.dtype not in TYPES:
        return f"dtype is {str(query.dtype).removeprefix('torch.')}"
    for name, width in (("head dimension", query.shape[3]), ("value width", value.shape[3])):
        if width % 8 != 0 or not 8 <= width <= MAX_WIDTH:
            return f"{name} {width} is not a multiple of 8 up to {MAX_WIDTH}"
    if block_size is not None and min(block_size, key.shape[2]) > MAX_BLOCK:
        return f"blocks of {min(block_size, key.shape[2])} tokens are larger than {MAX_BLOCK}"
    if not is_causal:
        for name, scale, tokens in (("alpha", alpha, query.shape[2]), ("beta", beta, key.shape[2])):
            if isinstance(scale, Tensor) and scale.dim() == 3 and scale.shape[2] == tokens != 1:
                return f"{name} differs between tokens"
    if query.shape[0] == 0:
        return "the batch is empty"
    if not torch.compiler.is_compiling():
        if any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in tensors):
            return "a tensor is of a class of its own"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "torch.func is transforming it"
        if is_recorded():
            return "a tracer or dispatch mode is recording the operations of torch"
        if torch.autograd.forward_ad._current_level >= 0:
            return "forward-mode differentiation is on"
    elif is_exporting():
        return "torch.export is to give a graph that runs anywhere"
    reason: str | None = why_not_at_all()
    return reason


def is_exporting() -> bool:
    return torch.compiler.is_exporting() if hasattr(torch.compiler, "is_exporting") else False


def why_not_at_all() -> str | None:
    """What keeps the fused code from running whatever the input: a setting, or this machine."""
    wanted = os.environ.get("LLN_KERNEL", "")
    if wanted == "torch":
        return "LLN_KERNEL=torch"
    if wanted not in ("", "cpu_fused"):
        raise ValueError(f"LLN_KERNEL must be torch, cpu_fused or not set, got {wanted!r}")
    return build_problem()


# All that torch.compiler.assume_constant_result does; calling it would import the compiler, which takes seconds.
why_not_at_all._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def build_problem() -> str | None:
    """Why the fused code could not be built, with a warning the first time; None if it was."""
    try:
        load()
    except BuildError as error:
        warnings.warn(f"attention runs in plain torch, because {error}", stacklevel=2)
        return str(error)
    return None
