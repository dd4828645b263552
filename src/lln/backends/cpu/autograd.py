"""Attention by the fused CPU code, with gradients: directly in eager mode, as torch.library ops under torch.compile.

Both ways keep the inputs, alpha, beta and the memory of the keys, and recompute the rest on the way back. Gradients of
gradients are those of the plain formula in eager mode, and refused by the compiled op.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lln.backends.base import Prepared
from lln.backends.cpu import allocation, binding
from lln.backends.cpu.prepared import Call, prepare
from lln.backends.torch import TorchBackend
from lln.backends.torch.recompute import apart, is_transformed
from lln.problem import Centers, Problem, Tokens


def attention(problem: Problem) -> Tensor:
    """LLN attention, softmax attention inside blocks, or the mean of both, with gradients."""
    query, key, value = problem.query, problem.key, problem.value
    if torch.compiler.is_compiling():
        output: Tensor = forward_op(query, key, value, *binding.settings_of(problem), False)[0]
        return output
    differentiable = (query, key, value, problem.alpha, problem.beta, problem.key_weight if problem.far else None)
    if _requires_grad(differentiable):
        return cast(Tensor, _Attention.apply(*differentiable, problem, False))  # type: ignore[no-untyped-call]
    query, key, value = (allocation.as_rows(x) for x in (query, key, value))
    return prepare(replace(problem, query=query, key=key, value=value))(query, key, value)


def near_with_lse(problem: Problem) -> tuple[Tensor, Tensor]:
    """Softmax attention inside blocks or windows and the log-sum-exp of its scores (B, H, N), with gradients."""
    tokens = (problem.query, problem.key, problem.value)
    if not torch.compiler.is_compiling() and _requires_grad(tokens):
        found: tuple[Tensor, Tensor] = _Attention.apply(*tokens, None, None, None, problem, True)  # type: ignore[no-untyped-call]
        return found
    forward: Any = forward_op if torch.compiler.is_compiling() else binding.forward
    output, *_, lse = forward(*tokens, *binding.settings_of(problem), True)
    return output, lse


def _requires_grad(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _Attention(torch.autograd.Function):
    """Tensors that may require gradients are arguments; the problem has the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor | None,
        beta: Tensor | None,
        key_weight: Tensor | None,
        problem: Problem,
        with_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        settings = binding.settings_of(problem)
        keep_query, keep_key, _, _, far, block_size, is_causal, matching, _, _, form, *centers = settings
        arguments: tuple[Any, ...] = (query, key, value, *settings, with_lse)
        output, *kept, lse = binding.forward(*arguments)
        kept[:2] = (x if given is None else given for x, given in zip(kept, (alpha, beta), strict=False))
        ctx.settings = far, block_size, is_causal
        ctx.options = problem.near, matching, problem.scope, form
        ctx.save_for_backward(query, key, value, keep_query, keep_key, *kept, key_weight, *centers)
        return (output, lse) if with_lse else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_transformed(grad) or (grad_lse is not None and is_transformed(grad_lse)):
            *tensors, _, _, key_weight, center_query, center_key = ctx.saved_tensors
            centers = None if center_query is None else (center_query, center_key)
            needed = ctx.needs_input_grad[:6]
            tensors.append(key_weight)
            found = _plain_gradients(grad, tensors, ctx.settings, ctx.options, centers, needed, grad_lse)
            return (*found, None, None)
        *tensors, key_weight, center_query, center_key = ctx.saved_tensors
        of_scales, of_weight = ctx.needs_input_grad[3:5], ctx.needs_input_grad[5]
        near, _, _, form = ctx.options
        options = (any(of_scales), near == "window", key_weight, of_weight, form, center_query, center_key, grad_lse)
        arguments: tuple[Any, ...] = (grad, *tensors, *ctx.settings, *options)
        *grads, grad_weight = binding.backward(*arguments)
        grad_alpha, grad_beta = (
            x.sum_to_size(scale.shape) if needed else None
            for x, scale, needed in zip(grads[3:], tensors[5:7], of_scales, strict=True)
        )
        return (*grads[:3], grad_alpha, grad_beta, grad_weight if of_weight else None, None, None)


def prepare_gradients(problem: Problem) -> Prepared:
    """Calls with gradients like that of a problem without padding, alpha, beta and weights of keys."""
    call = Call(problem)
    return lambda query, key, value: cast(Tensor, _Repeated.apply(query, key, value, call))  # type: ignore[no-untyped-call]


class _Repeated(torch.autograd.Function):
    """The same for a prepared call."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        output, kept = call.forward(query, key, value)
        ctx.call = call
        ctx.save_for_backward(query, key, value, kept, *(call.centers or ()))  # centres: if they change, it is an error
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, kept, *_ = ctx.saved_tensors
        call: Call = ctx.call
        if not torch.is_grad_enabled() and not is_transformed(grad):
            return (*call.backward(grad, query, key, value, kept), None)
        tensors = [query, key, value, None, None, *call.kept(kept)[:2], None]
        options = (call.near, call.matching, "sample", call.form)
        needed = (*ctx.needs_input_grad[:3], False, False, False)
        return (*_plain_gradients(grad, tensors, call.settings, options, call.centers, needed)[:3], None)


def _plain_gradients(
    grad: Tensor,
    tensors: list[Any],
    settings: tuple[bool, int, bool],
    options: tuple[Any, ...],
    centers: Centers | None,
    needed: tuple[bool, ...],
    grad_lse: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain formula, which can be differentiated again, and batched (`is_grads_batched`)."""
    query, key, value, keep_query, keep_key, alpha, beta, key_weight = tensors
    far, block_size, is_causal = settings
    near, matching, scope, form = options
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = apart((query, key, value, alpha, beta, key_weight))
        query, key, value, alpha, beta, key_weight = inputs
        tokens = Tokens(keep_query), Tokens(keep_key)
        rest: Any = (is_causal, far, near, block_size, alpha, beta, matching, scope, form, centers, key_weight)
        problem, backend = Problem(query, key, value, *tokens, *rest), TorchBackend()
        outputs: Any = backend.attention(problem) if grad_lse is None else backend.near_with_lse(problem)
        gradients: Any = grad if grad_lse is None else (grad, grad_lse)
        wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=create_graph))
    return tuple(next(found) if is_needed else None for is_needed in needed)


forward_op = torch.library.custom_op("lln::fused_forward", binding.forward, mutates_args=(), device_types="cpu")
backward_op = torch.library.custom_op("lln::fused_backward", binding.backward, mutates_args=(), device_types="cpu")


def _arguments_of(function: Callable[..., Any], names: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The arguments of a call of `function` that are named as those of another function are."""
    signature, wanted = inspect.signature(function), inspect.signature(names).parameters

    def read(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: x for name, x in bound.arguments.items() if name in wanted}

    return read


_results_arguments = _arguments_of(binding.forward, allocation.allocate_results)
_gradients_arguments = _arguments_of(binding.backward, allocation.allocate_gradients)


@forward_op.register_fake
def _(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return allocation.allocate_results(**_results_arguments(*args, **kwargs))


@backward_op.register_fake
def _(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return allocation.allocate_gradients(**_gradients_arguments(*args, **kwargs))


def _keep_for_backward(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, keep_query, keep_key, alpha, beta, with_lln, block_size, is_causal, _, *rest = inputs
    is_window, key_weight, form, *centers, with_lse = rest
    ctx.save_for_backward(query, key, value, keep_query, keep_key, *output[1:5], key_weight, *centers)
    ctx.with_lse = with_lse  # type: ignore[attr-defined]
    ctx.form = form  # type: ignore[attr-defined]
    ctx.settings = with_lln, block_size, is_causal  # type: ignore[attr-defined]
    ctx.is_window = is_window  # type: ignore[attr-defined]
    ctx.scales = tuple(None if x is None else x.shape for x in (alpha, beta))  # type: ignore[attr-defined]


def _backward_of_op(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, key_weight, center_query, center_key = ctx.saved_tensors
    wanted = [shape is not None and needed for shape, needed in zip(ctx.scales, ctx.needs_input_grad[5:7], strict=True)]
    of_weight = key_weight is not None and ctx.needs_input_grad[12]  # without, the dispatcher leaves it out
    form = (ctx.form, center_query, center_key, others[-1] if ctx.with_lse else None)
    arguments = (grad, *tensors, *ctx.settings, any(wanted), ctx.is_window, key_weight, of_weight, *form)
    *grads, grad_weight = backward_op(*arguments)
    of_scales = (
        x.sum_to_size(shape) if needed else None for x, shape, needed in zip(grads[3:], ctx.scales, wanted, strict=True)
    )
    return (*grads[:3], None, None, *of_scales, *[None] * 5, grad_weight if of_weight else None, *[None] * 4)


forward_op.register_autograd(_backward_of_op, setup_context=_keep_for_backward)
