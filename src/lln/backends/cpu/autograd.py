"""Attention by the fused CPU code, with gradients: directly in eager mode, as torch.library ops under torch.compile.

Both ways keep the inputs, alpha, beta and the memory of the keys, and recompute the rest on the way back. Gradients of
gradients are those of the plain formula in eager mode, and refused by the compiled op.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lln.backends.cpu import binding
from lln.backends.torch import TorchBackend
from lln.backends.torch.recompute import is_transformed
from lln.curves import Matching
from lln.problem import Problem, Tokens


class Settings(NamedTuple):
    """What the C code is to do, beside its tensors."""

    far: bool
    block_size: int  # 0: no blocks
    is_causal: bool


def _is_window(problem: Problem) -> bool:
    return problem.near == "window"


def attention(problem: Problem) -> Tensor:
    """LLN attention, softmax attention inside blocks, or the mean of both, with gradients."""
    query, key, value, alpha, beta = problem.query, problem.key, problem.value, problem.alpha, problem.beta
    key_weight = problem.key_weight if problem.far else None
    keep_query, keep_key = problem.queries.keep, problem.keys.keep
    settings = Settings(problem.far, problem.block_size, problem.is_causal)
    if torch.compiler.is_compiling():
        tensors = (query, key, value, keep_query, keep_key, alpha, beta)
        output: Tensor = forward_op(*tensors, *settings, problem.matching, _is_window(problem), key_weight)[0]
        return output
    differentiable = (query, key, value, alpha, beta, key_weight)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
        return cast(Tensor, _Attention.apply(*differentiable, problem, settings))  # type: ignore[no-untyped-call]
    arguments = (query, key, value, keep_query, keep_key, alpha, beta, *settings, problem.matching)
    return binding.forward(*arguments, _is_window(problem), key_weight)[0]


class _Attention(torch.autograd.Function):
    """Tensors that may require gradients are arguments; the problem brings the rest."""

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
        settings: Settings,
    ) -> Tensor:
        keep_query, keep_key = problem.queries.keep, problem.keys.keep
        arguments = (query, key, value, keep_query, keep_key, alpha, beta, *settings, problem.matching)
        output, *kept = binding.forward(*arguments, _is_window(problem), key_weight)
        ctx.settings, ctx.options = settings, (problem.near, problem.matching, problem.scope)
        ctx.save_for_backward(query, key, value, keep_query, keep_key, *kept, key_weight)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_transformed(grad):
            return (*_plain_gradients(ctx, grad), None, None)
        *tensors, key_weight = ctx.saved_tensors
        of_scales, of_weight = ctx.needs_input_grad[3:5], ctx.needs_input_grad[5]
        options = (any(of_scales), ctx.options[0] == "window", key_weight, of_weight)
        arguments: tuple[Any, ...] = (grad, *tensors, *ctx.settings, *options)
        *grads, grad_weight = binding.backward(*arguments)
        grad_alpha, grad_beta = (
            x.sum_to_size(scale.shape) if needed else None
            for x, scale, needed in zip(grads[3:], tensors[5:7], of_scales, strict=True)
        )
        return (*grads[:3], grad_alpha, grad_beta, grad_weight if of_weight else None, None, None)


def _plain_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the plain formula, which can be differentiated again, and batched (`is_grads_batched`)."""
    query, key, value, keep_query, keep_key, alpha, beta, _, _, key_weight = ctx.saved_tensors
    far, block_size, is_causal = ctx.settings
    near, matching, scope = ctx.options
    tokens = Tokens(keep_query), Tokens(keep_key)
    options = (is_causal, far, near, block_size, alpha, beta, matching, scope)
    problem = Problem(query, key, value, *tokens, *options, key_weight=key_weight)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        output = TorchBackend().attention(problem)
        inputs = (query, key, value, alpha, beta, key_weight)
        wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=create_graph))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:6])


@torch.library.custom_op("lln::fused_forward", mutates_args=(), device_types="cpu")
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    with_lln: bool,
    block_size: int,
    is_causal: bool,
    matching: str,
    is_window: bool = False,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = (with_lln, block_size, is_causal, cast(Matching, matching), is_window, key_weight)
    output, *rest = binding.forward(query, key, value, keep_query, keep_key, alpha, beta, *settings)
    # an op must not return what it was given
    used = [x.clone() if x is given else x for x, given in zip(rest[:2], (alpha, beta), strict=True)]
    return output, used[0], used[1], rest[2], rest[3]


@forward_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    with_lln: bool,
    block_size: int,
    is_causal: bool,
    matching: str,
    is_window: bool = False,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    room = binding.make_room(query, value, alpha, beta, with_lln, is_causal)
    used = [x.clone() if x is given else x for x, given in zip(room[1:3], (alpha, beta), strict=True)]
    return room[0], used[0], used[1], room[3], room[4]


backward_op = torch.library.custom_op("lln::fused_backward", binding.backward, mutates_args=(), device_types="cpu")


@backward_op.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    mass: Tensor,
    values: Tensor,
    with_lln: bool,
    block_size: int,
    is_causal: bool,
    grad_scales: bool,
    is_window: bool = False,
    key_weight: Tensor | None = None,
    grad_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return binding.make_gradients(query, key, value, keep_key, grad_scales, grad_weight)


def _keep_for_backward(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, keep_query, keep_key, alpha, beta, with_lln, block_size, is_causal, _, *rest = inputs
    is_window, key_weight = rest
    ctx.save_for_backward(query, key, value, keep_query, keep_key, *output[1:], key_weight)
    ctx.settings = with_lln, block_size, is_causal  # type: ignore[attr-defined]
    ctx.is_window = is_window  # type: ignore[attr-defined]
    ctx.scales = tuple(None if x is None else x.shape for x in (alpha, beta))  # type: ignore[attr-defined]


def _backward_of_op(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, key_weight = ctx.saved_tensors
    wanted = [shape is not None and needed for shape, needed in zip(ctx.scales, ctx.needs_input_grad[5:7], strict=True)]
    of_weight = key_weight is not None and ctx.needs_input_grad[12]  # without, the dispatcher leaves it out
    *grads, grad_weight = backward_op(grad, *tensors, *ctx.settings, any(wanted), ctx.is_window, key_weight, of_weight)
    of_scales = (
        x.sum_to_size(shape) if needed else None for x, shape, needed in zip(grads[3:], ctx.scales, wanted, strict=True)
    )
    return (*grads[:3], None, None, *of_scales, *[None] * 5, grad_weight if of_weight else None)


forward_op.register_autograd(_backward_of_op, setup_context=_keep_for_backward)
