"""The calls of Triton kernels that attention makes, recorded on tensors without memory.

`record_calls` has the passes of one attention; `all_calls` has every kernel with every option that is compiled into it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.backends.triton.configs import WIDEST_CAUSAL, WIDEST_NEAR
from lln.bench.candidates import DTYPES
from lln.matching.curves import Form, Matching
from lln.recurrence import Memory, Recurrence

BATCH, HEADS, BLOCK = 2, 4, 64  # of `all_calls`; one sample or head would be compiled into a kernel as a constant


class Case(NamedTuple):
    """Options of LLN attention that change which code is compiled."""

    form: Form = "paper"
    matching: Matching = "variance"
    tokens: int = 4096  # several splits
    padded: bool = False
    key_heads: int = HEADS
    given: bool = False  # alpha, beta of each token and log-weights of keys, with gradients


# Each option with and without each other, and all at once, which takes the most registers.
CASES = (
    Case(),
    Case(matching="linear", tokens=512, padded=True, given=True),
    Case("unbiased", padded=True, key_heads=2),
    Case("unbiased", tokens=512, key_heads=2, given=True),
    Case("decomposed", tokens=512),
    Case("decomposed", padded=True, key_heads=2, given=True),
)


class Tokens(NamedTuple):
    """Query, key and value on the meta device."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def make(
        cls, dtype: str, head_dim: int, value_dim: int, tokens: int, *, batch: int, heads: int, key_heads: int
    ) -> "Tokens":
        shapes = (heads, head_dim), (key_heads, head_dim), (key_heads, value_dim)
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "device": "meta"}
        return cls(*(torch.empty(batch, number, tokens, width, **options) for number, width in shapes))

    def floats(self, *shape: int) -> Tensor:
        return self.query.new_empty(shape, dtype=torch.float32)


def record_far(x: Tokens, case: Case, *, is_causal: bool) -> tuple[list[Any], list[Any]]:
    """The calls of LLN attention, forward and backward."""
    from lln.backends.triton import backward, forward, tuning
    from lln.backends.triton.arguments import FarInputs

    batch, heads, tokens, width = x.query.shape
    keep = torch.empty(batch, tokens, dtype=torch.bool, device="meta") if case.padded else None
    scales = [x.floats(batch, heads, tokens) for _ in range(3)] if case.given else [None] * 3
    is_centered = case.form == "decomposed"
    centers = [x.floats(batch, number, width) if is_centered else None for number in (heads, case.key_heads)]
    inputs = FarInputs(*x, keep, keep, *scales, *centers)
    with tuning.recording() as forward_calls:
        found = forward.far_forward(inputs, case.matching, case.form, is_causal=is_causal)
        if case.given:  # alpha and beta are matched all the same, so that each kernel has each option
            forward.far_forward(inputs._replace(alpha=None), case.matching, case.form, is_causal=is_causal)
    wanted = backward.Wanted(case.given, case.given, case.given and is_centered)
    used = inputs.with_scales(found[1], found[2])
    with tuning.recording() as backward_calls:
        gradient = torch.empty_like(found[0])
        backward.far_backward(gradient, used, found[0], *found[3:], case.form, wanted, is_causal=is_causal)
    return forward_calls, backward_calls


def record_near(
    x: Tokens, *, padded: bool, is_window: bool, is_causal: bool, with_lse: bool = False
) -> tuple[list[Any], list[Any]]:
    """The calls of softmax attention among neighbours, forward and backward; `with_lse`: with gradients of both."""
    from lln.backends.triton import tuning
    from lln.backends.triton.near import near_backward, near_forward

    keep = torch.empty(x.query.shape[0], x.query.shape[2], dtype=torch.bool, device="meta") if padded else None
    options: dict[str, Any] = {"is_window": is_window, "is_causal": is_causal}
    with tuning.recording() as forward_calls:
        output, logs = near_forward(*x, keep, BLOCK, **options)
    with tuning.recording() as backward_calls:
        d_logs = torch.empty_like(logs) if with_lse else None
        near_backward(torch.empty_like(output), *x, keep, logs, d_logs, BLOCK, **options)
    return forward_calls, backward_calls


def record_step(x: Tokens, case: Case, *, near: str | None, apart: bool = False) -> list[Any]:
    """The call of a decode step; `near` is "blocks", "window" or None."""
    from lln.backends.triton import tuning
    from lln.backends.triton.step import step

    (batch, heads, _, width), (_, key_heads, _, value_width) = x.query.shape, x.value.shape
    sums = [torch.empty(batch, heads, 3, dtype=torch.float64, device="meta") for _ in range(2)]
    num_tokens = torch.empty(batch, dtype=torch.int64, device="meta")
    rings = [None if near is None else x.query.new_empty(batch, key_heads, BLOCK, n) for n in (width, value_width)]
    memory = Memory(
        x.floats(batch, heads, width), x.floats(batch, heads, width, value_width), num_tokens, *sums, *rings
    )
    scale = x.floats(batch, heads) if case.given else None
    recurrence = Recurrence(
        *x,
        keep=torch.empty(batch, 1, dtype=torch.bool, device="meta") if case.padded else None,
        memory=memory,
        alpha=scale,
        beta=scale,
        matching=case.matching,
        form=case.form,
        key_weight=x.floats(batch, heads, 1) if case.given else None,
        near="window" if near == "window" else "blocks",
        apart=apart,
        in_place=True,
    )
    with tuning.recording() as calls:
        step(recurrence)
    return calls


def record_calls(
    tokens: int, *, dtype: str, head_dim: int = 64, heads: int = 12, is_causal: bool = False
) -> dict[str, list[Any]]:
    """The calls of one sample without options, by pass."""
    x = Tokens.make(dtype, head_dim, head_dim, tokens, batch=1, heads=heads, key_heads=heads)
    passes = dict(
        zip(("LLN forward", "LLN backward"), record_far(x, Case(key_heads=heads), is_causal=is_causal), strict=True)
    )
    if head_dim <= WIDEST_NEAR:
        near = record_near(x, padded=False, is_window=False, is_causal=is_causal)
        passes |= zip(("blocks forward", "blocks backward"), near, strict=True)
    return passes


def all_calls(dtype: str, head_dim: int, value_dim: int, cases: tuple[Case, ...] = CASES) -> Iterator[Any]:
    """Every kernel that runs for a width, with the options of `cases`; those that `why_not` refuses are left out."""
    sizes = dtype, head_dim, value_dim
    for case in cases:
        options: dict[str, Any] = {"batch": BATCH, "heads": HEADS, "key_heads": case.key_heads}
        x = Tokens.make(*sizes, case.tokens, **options)
        for is_causal in (False, True):
            if not is_causal or head_dim <= WIDEST_CAUSAL:
                for calls in record_far(x, case, is_causal=is_causal):
                    yield from calls
        if max(head_dim, value_dim) <= WIDEST_NEAR:  # windows and causal blocks differ in numbers alone
            of_near: dict[str, Any] = {"padded": case.padded, "with_lse": case.given}
            for calls in record_near(x, is_window=False, is_causal=False, **of_near):
                yield from calls
        one = Tokens.make(*sizes, 1, **options)
        for near in (None, "blocks", "window"):
            yield from record_step(one, case, near=near)
        yield from record_step(one, case, near="window", apart=True)
