"""Attention by the fused CPU code, with gradients: directly in eager mode, as torch.library ops under torch.compile.

Both ways keep the inputs, alpha, beta and the memory of the keys, and recompute the rest on the way back. Gradients of
gradients are those of the plain formula in eager mode, and refused by the compiled op.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lln.curves import Matching
from lln.kernels import ops, plain
from lln.kernels.recompute import is_transformed
from lln.masks import blank_not_finite


class Settings(NamedTuple):
    with_lln: bool
    block_size: int  # 0: no blocks
    is_causal: bool


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    with_lln: bool = True,
    block_size: int | None = None,
    is_causal: bool = False,
    matching: Matching = "variance",
) -> Tensor:
    """LLN attention, with `block_size` its mean with the attention inside blocks, or without LLN the latter alone.

    alpha and beta broadcast to (B, H, tokens, 1) as in `plain`, or are matched to the input.
    """
    alpha, beta = (None if x is None else x[..., 0] for x in (alpha, beta))
    settings = Settings(with_lln, block_size or 0, is_causal)
    if torch.compiler.is_compiling():
        tensors = (query, key, value, keep_query, keep_key, alpha, beta)
        output: Tensor = forward_op(*tensors, *settings, matching)[0]
        return output
    tracked = (query, key, value, alpha, beta)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tracked):
        return cast(Tensor, _Attention.apply(*tracked, keep_query, keep_key, settings, matching))  # type: ignore[no-untyped-call]
    return ops.forward(query, key, value, keep_query, keep_key, alpha, beta, *settings, matching)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor | None,
        beta: Tensor | None,
        keep_query: Tensor | None,
        keep_key: Tensor | None,
        settings: Settings,
        matching: Matching,
    ) -> Tensor:
        output, *kept = ops.forward(query, key, value, keep_query, keep_key, alpha, beta, *settings, matching)
        ctx.given = alpha is not None, beta is not None
        if alpha is not None:
            kept[0] = alpha
        if beta is not None:
            kept[1] = beta
        ctx.settings = settings
        ctx.save_for_backward(query, key, value, keep_query, keep_key, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep_query, keep_key, alpha, beta, mass, values = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed(grad):
            return (*_plain_gradients(ctx, grad), None, None, None, None)
        of_scales = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        settings = cast(Settings, ctx.settings)
        tensors = (grad, query, key, value, keep_query, keep_key, alpha, beta, mass, values)
        grads = ops.backward(*tensors, *settings, of_scales)
        grad_alpha, grad_beta = (
            x.sum_to_size(scale.shape) if needed else None
            for x, scale, needed in zip(grads[3:], (alpha, beta), ctx.needs_input_grad[3:5], strict=True)
        )
        return (*grads[:3], grad_alpha, grad_beta, None, None, None, None)


def _plain_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the plain formula, which can be differentiated again, and batched (`is_grads_batched`)."""
    query, key, value, keep_query, keep, alpha, beta, _, _ = ctx.saved_tensors
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        output = _plain_attention(query, key, value, keep_query, keep, alpha, beta, ctx.settings)
        inputs = (query, key, value, alpha, beta)
        wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=create_graph))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:5])


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    settings: Settings,
) -> Tensor:
    with_lln, block_size, is_causal = settings
    query = blank_not_finite(query, keep_query)
    parts = []
    if with_lln and is_causal:
        batch, heads, _, width = query.shape
        memory = plain.empty_memory(batch, heads, width, value.shape[3], like=query)
        parts = [plain.causal_attention(query, key, value, alpha[..., None], beta[..., None], keep, memory)[0]]
    elif with_lln:
        parts = [plain.full_attention(query, key, value, alpha[..., None], beta[..., None], keep)]
    if block_size:
        parts.append(
            plain.block_diagonal_attention(query, key, value, keep, block_size=block_size, is_causal=is_causal)
        )
    return (parts[0] if len(parts) == 1 else (parts[0] + parts[1]) / 2).to(query.dtype)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    output, *rest = ops.forward(
        query, key, value, keep_query, keep_key, alpha, beta, with_lln, block_size, is_causal, cast(Matching, matching)
    )
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    room = ops.make_room(query, value, alpha, beta, with_lln, is_causal)
    used = [x.clone() if x is given else x for x, given in zip(room[1:3], (alpha, beta), strict=True)]
    return room[0], used[0], used[1], room[3], room[4]


backward_op = torch.library.custom_op("lln::fused_backward", ops.backward, mutates_args=(), device_types="cpu")


@backward_op.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, keep_key: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return ops.make_gradients(query, key, value, keep_key, rest[-1])


def _keep_for_backward(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, keep_query, keep_key, alpha, beta, with_lln, block_size, is_causal, _ = inputs
    ctx.save_for_backward(query, key, value, keep_query, keep_key, *output[1:])
    ctx.settings = with_lln, block_size, is_causal  # type: ignore[attr-defined]
    ctx.scales = tuple(None if x is None else x.shape for x in (alpha, beta))  # type: ignore[attr-defined]


def _backward_of_op(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, alpha, beta, mass, values = ctx.saved_tensors
    wanted = [shape is not None and needed for shape, needed in zip(ctx.scales, ctx.needs_input_grad[5:7], strict=True)]
    grads = backward_op(grad, *tensors, alpha, beta, mass, values, *ctx.settings, any(wanted))
    of_scales = (
        x.sum_to_size(shape) if needed else None for x, shape, needed in zip(grads[3:], ctx.scales, wanted, strict=True)
    )
    return (*grads[:3], None, None, *of_scales, None, None, None, None)


forward_op.register_autograd(_backward_of_op, setup_context=_keep_for_backward)
