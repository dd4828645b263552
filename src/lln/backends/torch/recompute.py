"""Attention whose gradients are computed from its inputs once more, instead of from what it kept on the way.

Autograd keeps every intermediate result until the backward pass, which for linear attention is many times its inputs.
An `Attention` brings a backward pass of its own, which computes them again piece by piece. Where that one does not
apply (gradients of gradients, forward-mode derivatives, torch.func, torch.compile, which has a plan of its own), its
`traced` form runs: the same mathematics in operations that may all be differentiated, batched or traced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from lln.checks import is_recorded

Tensors = tuple[Tensor, ...]
Inputs = Sequence[Any]  # tensors, or None where an optional one was left out


@dataclass(frozen=True)
class Attention:
    """How to compute an attention of some inputs, of which the optional ones (masks) may be None."""

    traced: Callable[..., Tensors]  # inputs -> outputs
    forward: Callable[..., tuple[Tensors, Tensors]]  # inputs -> outputs, and what else the backward pass should have
    # inputs, what else, gradients of the outputs, which inputs require one -> gradients of the inputs
    backward: Callable[[Inputs, Tensors, Tensors, Sequence[bool]], Sequence[Tensor | None]]

    def __call__(self, *inputs: Tensor | None) -> Tensors:
        given = [x for x in inputs if x is not None]
        if torch.compiler.is_compiling() or is_recorded() or any(is_transformed(x) for x in given):
            return self.traced(*inputs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            outputs: Tensors = _Recomputed.apply(self, *inputs)  # type: ignore[no-untyped-call]
            return outputs
        return self.forward(*inputs)[0]


def is_transformed(x: Tensor) -> bool:
    """Whether torch.func is at work on a tensor, a batch of gradients, or a forward-mode derivative."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_legacy_batchedtensor(x):
        return True
    return unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def apart(inputs: Inputs) -> list[Any]:
    """Views of the inputs of a function, for its gradients: with `torch.autograd.grad` each gradient is that of one
    argument alone, also where another argument is the same tensor or was computed from it.
    """
    return [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: Attention, *inputs: Tensor | None) -> Tensors:
        outputs, others = attention.forward(*inputs)
        ctx.attention, ctx.number = attention, len(inputs)
        ctx.save_for_backward(*inputs, *others)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: gradient checkpointing refuses a second time
        inputs, others = saved[: ctx.number], saved[ctx.number :]
        wanted = ctx.needs_input_grad[1:]
        again = torch.is_grad_enabled()  # whether the gradients will be differentiated
        if not again and not any(is_transformed(x) for x in gradients):
            return None, *ctx.attention.backward(inputs, others, gradients, wanted)
        with torch.enable_grad():
            inputs = apart(inputs)
            outputs = ctx.attention.traced(*inputs)
            targets = [x for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(outputs, targets, gradients, create_graph=again, allow_unused=True))
        return None, *(next(found) if is_wanted else None for is_wanted in wanted)
