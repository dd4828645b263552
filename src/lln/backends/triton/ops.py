"""LLN attention and softmax attention among neighbours as torch.library ops, in eager mode and under torch.compile.

Both keep their inputs and a few numbers for each head or query, and compute the rest once more on the way back.
Gradients of gradients are those of the plain formula in eager mode; there are none under torch.compile.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lln.backends.base import empty_rows
from lln.backends.torch import TorchBackend
from lln.backends.torch.recompute import apart, is_transformed
from lln.backends.triton import backward, forward, near
from lln.backends.triton.arguments import FarInputs, new_floats, padded_values
from lln.backends.triton.backward import Wanted
from lln.backends.triton.configs import power_of_two
from lln.matching.curves import Form, Matching
from lln.problem import Near, Problem, Tokens


@torch.library.custom_op("lln::triton_far", mutates_args=())
def far_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_weight: Tensor | None,
    center_query: Tensor | None,
    center_key: Tensor | None,
    matching: str,
    form: str,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = FarInputs(query, key, value, keep_query, keep_key, alpha, beta, key_weight, center_query, center_key)
    found = forward.far_forward(inputs, cast(Matching, matching), cast(Form, form), is_causal=is_causal)
    output, used_alpha, used_beta, *others = found
    # An op must not return its arguments.
    used_alpha = used_alpha.clone() if used_alpha is alpha else used_alpha
    used_beta = used_beta.clone() if used_beta is beta else used_beta
    return output, used_alpha, used_beta, others[0], others[1]


@far_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    alpha, beta, is_causal = others[2], others[3], others[-1]
    batch, heads, tokens, width = query.shape
    scale = (batch, heads, tokens if is_causal else 1)
    used_alpha, used_beta = (new_floats(query, *scale) if x is None else x.clone() for x in (alpha, beta))
    output = empty_rows(query, value.shape[3])
    if is_causal:
        return output, used_alpha, used_beta, new_floats(query, batch, heads, tokens), new_floats(query, 0)
    block = power_of_two(width)
    values = new_floats(query, batch, heads, block, padded_values(query, value))
    return output, used_alpha, used_beta, new_floats(query, batch, heads, block), values


@torch.library.custom_op("lln::triton_far_backward", mutates_args=())
def far_backward_op(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    key_weight: Tensor | None,
    center_query: Tensor | None,
    center_key: Tensor | None,
    output: Tensor,
    first: Tensor,
    second: Tensor,
    form: str,
    is_causal: bool,
    of_scales: bool,
    of_weight: bool,
    of_centers: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = FarInputs(query, key, value, keep_query, keep_key, alpha, beta, key_weight, center_query, center_key)
    wanted = Wanted(of_scales, of_weight, of_centers)
    found = backward.far_backward(
        gradient, inputs, output, first, second, cast(Form, form), wanted, is_causal=is_causal
    )
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], found)


@far_backward_op.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_scales, of_weight, of_centers = others[-3:]
    (batch, heads, tokens, width), (_, key_heads, keys, _) = query.shape, key.shape
    tokens_of_scales = (tokens, keys) if of_scales else (0, 0)
    center = width if of_centers else 0
    return (
        empty_rows(query, width),
        empty_rows(key, width),
        empty_rows(value, value.shape[3]),
        new_floats(query, batch, heads, tokens_of_scales[0]),
        new_floats(query, batch, heads, tokens_of_scales[1]),
        new_floats(query, batch, heads, keys if of_weight else 0),
        new_floats(query, batch, heads, center),
        new_floats(query, batch, key_heads, center),
    )


def _keep_far(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, matching, form, is_causal = inputs
    result, used_alpha, used_beta, *others = output
    given = tensors[5:7]
    tensors[5:7] = [used_alpha, used_beta]
    ctx.save_for_backward(*tensors, result if is_causal else None, *others)  # type: ignore[arg-type]
    ctx.options = matching, form, is_causal  # type: ignore[attr-defined]
    ctx.shapes = tuple(None if x is None else x.shape for x in given)  # type: ignore[attr-defined]


def _far_backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    tensors, (output, first, second) = saved[:10], saved[10:]
    needed = list(ctx.needs_input_grad[:10])
    needed += [False] * (10 - len(needed))
    needed = [x is not None and is_needed for x, is_needed in zip(tensors, needed, strict=True)]
    needed[5], needed[6] = (shape is not None and x for shape, x in zip(ctx.shapes, needed[5:7], strict=True))
    matching, form, is_causal = ctx.options
    if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or is_transformed(gradient)):
        options: dict[str, Any] = {"is_causal": is_causal, "matching": matching, "form": form}
        return (*plain_gradients(gradient, tensors, needed, far=True, **options), None, None, None)
    wanted = any(needed[5:7]), needed[7], any(needed[8:10])
    output = gradient if output is None else output  # not read
    found = list(far_backward_op(gradient, *tensors, output, first, second, form, is_causal, *wanted))
    for place, shape in ((5, ctx.shapes[0]), (6, ctx.shapes[1])):
        if needed[place]:
            found[place - 2] = found[place - 2].sum_to_size(shape)
    for place in (8, 9):
        if needed[place]:
            like = tensors[place]
            found[place - 2] = found[place - 2].sum_to_size(like.shape).to(like.dtype)
    results = [*found[:3], None, None, *found[3:]]
    return (*(x if is_needed else None for x, is_needed in zip(results, needed, strict=True)), None, None, None)


far_op.register_autograd(_far_backward, setup_context=_keep_far)


@torch.library.custom_op("lln::triton_near", mutates_args=())
def near_op(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, block_size: int, is_window: bool, is_causal: bool
) -> tuple[Tensor, Tensor]:
    return near.near_forward(query, key, value, keep, block_size, is_window=is_window, is_causal=is_causal)


@near_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(query, value.shape[3]), new_floats(query, *query.shape[:3])


@torch.library.custom_op("lln::triton_near_backward", mutates_args=())
def near_backward_op(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    logs: Tensor,
    d_logs: Tensor | None,
    block_size: int,
    is_window: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (gradient, query, key, value, keep, logs, d_logs)
    return near.near_backward(*tensors, block_size, is_window=is_window, is_causal=is_causal)


@near_backward_op.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(query, query.shape[3]), empty_rows(key, key.shape[3]), empty_rows(value, value.shape[3])


def _keep_near(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, keep, *options = inputs
    ctx.save_for_backward(query, key, value, keep, output[1])
    ctx.set_materialize_grads(False)  # the logsumexp is seldom used
    ctx.options = options  # type: ignore[attr-defined]


def _near_backward(ctx: Any, gradient: Tensor | None, d_logs: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, logs = ctx.saved_tensors  # once: activation checkpointing forgets them then
    block_size, is_window, is_causal = ctx.options
    needed = [*ctx.needs_input_grad[:3]]
    if gradient is None:
        gradient = empty_rows(tensors[0], tensors[2].shape[3]).zero_()
    if not torch.compiler.is_compiling() and (
        torch.is_grad_enabled() or any(x is not None and is_transformed(x) for x in (gradient, d_logs))
    ):
        inputs = (*tensors[:3], tensors[3], tensors[3], *[None] * 5)
        options: dict[str, Any] = {"near": "window" if is_window else "blocks", "block_size": block_size}
        wanted = [*needed, *[False] * 7]
        found = plain_gradients(gradient, inputs, wanted, d_logs=d_logs, far=False, is_causal=is_causal, **options)[:3]
    else:
        found = near_backward_op(gradient, *tensors, logs, d_logs, block_size, is_window, is_causal)
    return (*(x if is_needed else None for x, is_needed in zip(found, needed, strict=True)), None, None, None, None)


near_op.register_autograd(_near_backward, setup_context=_keep_near)


def plain_gradients(
    gradient: Tensor,
    tensors: tuple[Tensor | None, ...],
    needed: list[bool],
    *,
    d_logs: Tensor | None = None,
    far: bool,
    is_causal: bool,
    near: Near | None = None,
    block_size: int = 0,
    matching: Matching = "variance",
    form: Form = "paper",
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain formula, which can be differentiated again, and batched (`is_grads_batched`)."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = apart(tensors)
        query, key, value, keep_query, keep_key, alpha, beta, weight, center_query, center_key = inputs
        centers = None if center_query is None else (center_query, center_key)
        problem = Problem(
            query,
            key,
            value,
            Tokens(keep_query),
            Tokens(keep_key),
            is_causal,
            far,
            near,
            block_size,
            alpha,
            beta,
            matching,
            "sample",
            form,
            centers,
            weight,
        )
        plain = TorchBackend()
        outputs: Any = plain.attention(problem) if d_logs is None else plain.near_with_lse(problem)
        gradients: Any = gradient if d_logs is None else (gradient, d_logs)
        wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=create_graph))
    return tuple(next(found) if is_needed else None for is_needed in needed)
