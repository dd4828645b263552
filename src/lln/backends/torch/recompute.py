"""Attention whose gradients are computed from its inputs once more, instead of from what it kept on the way.

Autograd keeps every intermediate result until the backward pass, which for linear attention is many times its inputs.
An `Attention` has a backward pass of its own, which computes them again piece by piece. Where that one does not
apply (gradients of gradients, forward-mode derivatives, torch.func, torch.compile, which recomputes by itself), its
`traced` form runs: the same mathematics in operations that may all be differentiated, batched or traced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from lln.backends.future import without_nonfinite_future
from lln.checks import is_readable, is_recorded

Tensors = tuple[Tensor, ...]
Inputs = Sequence[Any]  # tensors, or None where an optional one was left out


@dataclass(frozen=True)
class Attention:
    """How to compute an attention of some inputs, of which the optional ones (masks) may be None."""

    traced: Callable[..., Tensors]  # inputs -> outputs
    forward: Callable[..., tuple[Tensors, Tensors]]  # inputs -> outputs, and what else the backward pass should have
    # inputs, what else, gradients of the outputs, which inputs require one -> gradients of the inputs
    backward: Callable[[Inputs, Tensors, Tensors, Sequence[bool]], Sequence[Tensor | None]]
    # Causal ones begin with query, key and value; with scales alpha, beta, the mask and weights of keys come next.
    is_causal: bool = False
    has_scales: bool = False

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
            return None, *_gradients(ctx.attention, inputs, others, gradients, wanted)
        with torch.enable_grad():
            inputs = apart(inputs)
            outputs = ctx.attention.traced(*inputs)
            targets = [x for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(outputs, targets, gradients, create_graph=again, allow_unused=True))
        return None, *(next(found) if is_wanted else None for is_wanted in wanted)


def _gradients(
    attention: Attention, inputs: Inputs, others: Tensors, gradients: Tensors, wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Those of an attention; of a causal one, without what later tokens that are not finite and have no part spoil."""
    found = attention.backward(inputs, others, gradients, wanted)
    if not attention.is_causal or not is_readable(gradients[0]):
        return found
    if all(x is None or bool(x.sum().isfinite()) for x in found):
        return found
    gradient, *more = gradients  # of log-sum-exps, or of the memory after the last token
    scales = [3, 4, 6] if attention.has_scales else []
    if scales and any(bool(x.any()) for x in more):
        return found
    lse = None if scales or not more else more[0]
    query, key, value = inputs[:3]
    clean = without_nonfinite_future(gradient, query, key, value, tuple(inputs[i] for i in scales), lse)
    if clean is None:
        return found
    gradient, *tokens, cleaned, lse = clean
    inputs = [*tokens, *inputs[3:]]
    for i, x in zip(scales, cleaned, strict=True):
        inputs[i] = x
    more = more if lse is None else [lse]
    return attention.backward(inputs, attention.forward(*inputs)[1], (gradient, *more), wanted)
