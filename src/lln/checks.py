"""What is refused, and what to do instead: every function of the core checks its input here, in the same words."""

import math
from typing import Any

import torch
from torch import Tensor

_LEAVE_OUT = "; leave it out to have it matched to the input"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_inputs(query: Tensor, key: Tensor, value: Tensor | None = None, *, same_length: str | None = None) -> None:
    """Refuse what is not query (B, H, N, D), key (B, H_k, M, D) and value (B, H_k, M, Dv), with H a multiple of H_k.

    `same_length` names who needs N = M, for the error message.
    """
    tensors = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, heads, tokens, features), got {tuple(x.shape)} with {x.dim()} dimensions; "
                "reshape it, e.g. x.unflatten(-1, (heads, -1)).transpose(1, 2) for a (batch, tokens, width) tensor"
            )
        if x.dtype not in FLOATS:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; convert with .float()"
            )
        if x is query:
            dtype, device, (batch, heads, queries, features) = x.dtype, x.device, x.shape
            continue
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype} but query is {dtype}; convert them to one dtype")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} but query is on {device}; move them to one device")
        if x.shape[0] != batch:
            raise ValueError(f"{name} has batch {x.shape[0]} but query has batch {batch}: {_shapes(tensors)}")
    _, key_heads, keys, key_features = key.shape
    if features == 0 or heads == 0 or key_heads == 0:
        raise ValueError(f"at least one head and one feature are needed: {_shapes(tensors)}")
    if features != key_features:
        raise ValueError(f"query and key must have the same number of features: {_shapes(tensors)}")
    if heads % key_heads != 0:
        raise ValueError(f"the {heads} query heads must be a multiple of the {key_heads} key heads: {_shapes(tensors)}")
    if value is not None and value.shape[1:3] != (key_heads, keys):
        raise ValueError(f"key and value must have the same heads and tokens: {_shapes(tensors)}")
    if same_length is not None and queries != keys:
        raise ValueError(
            f"{same_length} needs as many queries as keys, got {_shapes(tensors)}; "
            "for cross attention use lln_attention with is_causal=False"
        )


def check_at_least(lowest: int, **options: int) -> None:
    """Refuse options that are not whole numbers from `lowest` on."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < lowest:
            raise ValueError(f"{name} must be at least {lowest}, got {value}")


def check_block_size(block_size: int) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size must be an int, got {type(block_size).__name__}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}; 64 is a good start")


def check_scale(name: str, scale: float | Tensor | None, *, batch: int, heads: int, tokens: int) -> None:
    """Refuse an alpha or beta that is not positive, or not of shape (), (H,), (B, H) or (B, H, tokens)."""
    if scale is None:
        return
    if isinstance(scale, Tensor):
        full = (batch, heads, tokens)
        expected = {0: (), 1: (heads,), 2: full[:2], 3: full}.get(scale.dim())
        if expected is None or any(s not in (1, e) for s, e in zip(scale.shape, expected, strict=True)):
            raise ValueError(
                f"{name} must have shape (), ({heads},), ({batch}, {heads}) or {full} "
                f"(heads; batch and heads; batch, heads and tokens), got {tuple(scale.shape)}"
            )
        if not scale.is_floating_point():
            raise TypeError(f"{name} must be a floating point tensor, got {scale.dtype}")
        check_values((scale > 0) & scale.isfinite(), f"{name} must be positive and finite{_LEAVE_OUT}", scale)
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{name} must be a number, a tensor or None, got {type(scale).__name__}")
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{name} must be positive and finite, got {scale}{_LEAVE_OUT}")


def check_values(condition: Tensor, message: str, shown: Tensor | None = None) -> None:
    """Refuse input whose values do not meet a condition, a bool tensor of any shape.

    Under torch.compile and torch.export the check becomes a part of the graph and fails when that runs, as a
    RuntimeError with the same message; on CUDA it is a device-side assertion, as torch's own checks of indices are.
    Tensors without values (`meta`) pass.

    Args:
        condition: what must be true everywhere.
        message: what is wrong otherwise, and what to do.
        shown: a small tensor to quote in the message where its values can be read.

    Raises:
        ValueError: the condition is false somewhere, or torch.jit.trace, which would not record the check, is active.
    """
    if torch.compiler.is_compiling() or condition.device.type == "cuda" or torch._C._len_torch_dispatch_stack() > 0:
        torch._assert_async(condition.all(), message)
        return
    if torch._C._get_tracing_state() is not None:
        raise ValueError(f"{message}; torch.jit.trace cannot record this check, use torch.compile or torch.export")
    while torch._C._functorch.is_functorch_wrapped_tensor(condition):
        condition, shown = torch._C._functorch.get_unwrapped(condition), None  # the values of the whole batch
    if condition.device.type != "meta" and not bool(condition.all()):
        raise ValueError(message if shown is None or shown.numel() > 16 else f"{message}, got {shown.tolist()}")


def is_readable(flag: Tensor) -> bool:
    """Whether the value of a flag can be read now and for free, for shortcuts that do not change the result.

    Not while compiling, tracing or under torch.func, nor on another device. Use `check_values` for what must hold.
    """
    return (
        flag.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not is_recorded()
        and not torch._C._functorch.is_functorch_wrapped_tensor(flag)
    )


def is_recorded() -> bool:
    """Whether torch.jit.trace, make_fx or another dispatch mode wants to see every operation, which C code hides."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def _shapes(tensors: dict[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
