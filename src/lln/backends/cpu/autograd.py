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
from lln.backends.torch.recompute import apart, is_transformed
from lln.matching.curves import Form, Matching
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
    form, center_query, center_key = _form_of(problem)
    keep_query, keep_key = problem.queries.keep, problem.keys.keep
    settings = Settings(problem.far, problem.block_size, problem.is_causal)
    if torch.compiler.is_compiling():
        tensors = (query, key, value, keep_query, keep_key, alpha, beta)
        rest = (problem.matching, _is_window(problem), key_weight, form, center_query, center_key)
        output: Tensor = forward_op(*tensors, *settings, *rest)[0]
        return output
    differentiable = (query, key, value, alpha, beta, key_weight)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
        return cast(Tensor, _Attention.apply(*differentiable, problem, settings))  # type: ignore[no-untyped-call]
    arguments = (query, key, value, keep_query, keep_key, alpha, beta, *settings, problem.matching)
    others = (_is_window(problem), key_weight, form, center_query, center_key)
    return binding.forward(*arguments, *others, for_backward=False)[0]


def _form_of(problem: Problem) -> tuple[Form, Tensor | None, Tensor | None]:
    """The form of the far part, and its centres if they are given."""
    if not problem.far:
        return "paper", None, None
    return (problem.form, *(problem.centers or (None, None)))


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
        form, *centers = _form_of(problem)
        output, *kept = binding.forward(*arguments, _is_window(problem), key_weight, form, centers[0], centers[1])
        ctx.settings, ctx.options = settings, (problem.near, problem.matching, problem.scope, form)
        ctx.save_for_backward(query, key, value, keep_query, keep_key, *kept, key_weight, *centers)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_transformed(grad):
            return (*_plain_gradients(ctx, grad), None, None)
        *tensors, key_weight, center_query, center_key = ctx.saved_tensors
        of_scales, of_weight = ctx.needs_input_grad[3:5], ctx.needs_input_grad[5]
        near, _, _, form = ctx.options
        options = (any(of_scales), near == "window", key_weight, of_weight, form, center_query, center_key)
        arguments: tuple[Any, ...] = (grad, *tensors, *ctx.settings, *options)
        *grads, grad_weight = binding.backward(*arguments)
        grad_alpha, grad_beta = (
            x.sum_to_size(scale.shape) if needed else None
            for x, scale, needed in zip(grads[3:], tensors[5:7], of_scales, strict=True)
        )
        return (*grads[:3], grad_alpha, grad_beta, grad_weight if of_weight else None, None, None)


def _plain_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the plain formula, which can be differentiated again, and batched (`is_grads_batched`)."""
    query, key, value, keep_query, keep_key, alpha, beta, _, _, key_weight, *centers = ctx.saved_tensors
    far, block_size, is_causal = ctx.settings
    near, matching, scope, form = ctx.options
    tokens = Tokens(keep_query), Tokens(keep_key)
    given = None if centers[0] is None else (centers[0], centers[1])
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = apart((query, key, value, alpha, beta, key_weight))
        query, key, value, alpha, beta, key_weight = inputs
        options = (is_causal, far, near, block_size, alpha, beta, matching, scope)
        problem = Problem(query, key, value, *tokens, *options, form, given, key_weight)
        output = TorchBackend().attention(problem)
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
    form: str = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = (with_lln, block_size, is_causal, cast(Matching, matching), is_window, key_weight)
    centers = (cast(Form, form), center_query, center_key)
    results = binding.forward(query, key, value, keep_query, keep_key, alpha, beta, *settings, *centers)
    return _results_of_op(*cast(binding.Results, results), alpha, beta)


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
    form: str = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_means = form == "decomposed" and center_query is None
    return _results_of_op(*binding.make_room(query, value, alpha, beta, with_lln, is_causal, by_means), alpha, beta)


def _results_of_op(
    output: Tensor,
    used_alpha: Tensor,
    used_beta: Tensor,
    mass: Tensor,
    values: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
) -> binding.Results:
    """The results of `binding.forward` with copies of the given alpha and beta: an op must not return its arguments."""
    used_alpha = used_alpha.clone() if used_alpha is alpha else used_alpha
    used_beta = used_beta.clone() if used_beta is beta else used_beta
    return output, used_alpha, used_beta, mass, values


@torch.library.custom_op("lln::fused_backward", mutates_args=(), device_types="cpu")
def backward_op(
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
    form: str = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (grad, query, key, value, keep_query, keep_key, alpha, beta, mass, values)
    settings = (with_lln, block_size, is_causal, grad_scales, is_window, key_weight, grad_weight)
    return binding.backward(*tensors, *settings, cast(Form, form), center_query, center_key)


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
    form: str = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return binding.make_gradients(query, key, value, keep_key, grad_scales, grad_weight)


def _keep_for_backward(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, keep_query, keep_key, alpha, beta, with_lln, block_size, is_causal, _, *rest = inputs
    is_window, key_weight, form, *centers = rest
    ctx.save_for_backward(query, key, value, keep_query, keep_key, *output[1:], key_weight, *centers)
    ctx.form = form  # type: ignore[attr-defined]
    ctx.settings = with_lln, block_size, is_causal  # type: ignore[attr-defined]
    ctx.is_window = is_window  # type: ignore[attr-defined]
    ctx.scales = tuple(None if x is None else x.shape for x in (alpha, beta))  # type: ignore[attr-defined]


def _backward_of_op(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, key_weight, center_query, center_key = ctx.saved_tensors
    wanted = [shape is not None and needed for shape, needed in zip(ctx.scales, ctx.needs_input_grad[5:7], strict=True)]
    of_weight = key_weight is not None and ctx.needs_input_grad[12]  # without, the dispatcher leaves it out
    form = (ctx.form, center_query, center_key)
    arguments = (grad, *tensors, *ctx.settings, any(wanted), ctx.is_window, key_weight, of_weight, *form)
    *grads, grad_weight = backward_op(*arguments)
    of_scales = (
        x.sum_to_size(shape) if needed else None for x, shape, needed in zip(grads[3:], ctx.scales, wanted, strict=True)
    )
    return (*grads[:3], None, None, *of_scales, *[None] * 5, grad_weight if of_weight else None, *[None] * 3)


forward_op.register_autograd(_backward_of_op, setup_context=_keep_for_backward)
