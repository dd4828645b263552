"""Peak memory of a call, measured inside a process of its own; see `new_process.in_new_process`."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lln.bench.measure import peak_bytes, reset_peak, total_bytes
from lln.zoo import build

SMALL = 64  # tokens of the call that loads what is loaded at first use

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@dataclass(frozen=True)
class Call:
    """Something to measure: its inputs, which were there before, and what it makes of them."""

    inputs: tuple[Tensor, ...]
    run: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Peak:
    peak_bytes: int  # beyond the inputs
    extra_bytes: int  # beyond the inputs and the results


def peak_of_call(make: Callable[[int], Call], tokens: int) -> Peak:
    give_back_what_is_freed()
    make(min(SMALL, tokens)).run()
    call = make(tokens)
    if call.inputs[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call.run()
        peak = torch.cuda.max_memory_allocated() - before
        return Peak(peak, max(0, peak - total_bytes(results)))
    reset_peak()
    before = peak_bytes()
    results = call.run()
    peak = peak_bytes() - before
    return Peak(peak, max(0, peak - total_bytes(results)))


def attention_call(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], *, like: Tensor | None) -> Call:
    """Attention on inputs: its output, or, given a tensor like the output, also the gradients of all inputs."""

    @torch.no_grad()
    def forward() -> tuple[Tensor, ...]:
        return (attend(*inputs),)

    if like is None:
        return Call(inputs, forward)
    slope = torch.randn_like(like)
    for x in inputs:
        x.requires_grad_()

    def forward_and_backward() -> tuple[Tensor, ...]:
        output = attend(*inputs)
        return (output, *torch.autograd.grad(output, inputs, slope))

    return Call((*inputs, slope), forward_and_backward)


def random_heads(tokens: int, *, heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Query, key and value (1, H, N, D)."""
    return tuple(torch.randn(1, heads, tokens, head_dim, dtype=dtype) for _ in range(3))


def zoo_call(mechanism: str, tokens: int, *, heads: int, head_dim: int, options: Mapping[str, Any]) -> Call:
    attention = build(mechanism, num_heads=heads, head_dim=head_dim, max_len=tokens, **options).eval()
    inputs = random_heads(tokens, heads=heads, head_dim=head_dim)
    return attention_call(attention, inputs, like=None)


def give_back_what_is_freed() -> None:
    """Let the C library return memory at once, where it can (glibc): what it keeps would hide later use."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 14)
        mallopt(M_TRIM_THRESHOLD, 0)
