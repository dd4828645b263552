"""Packed sequences in models of transformers: several in one row, none of which attends to another.

transformers marks this in four ways, all of which become the `cu_seqlens` of our mechanisms:

- `position_ids` that start again within a row: the mask that the model makes separates the sequences;
- `position_ids` that reach the attention function beside no mask, which transformers' flash attention reads alike;
- `cu_seq_lens_q` and `cu_seq_lens_k`, where sequences start, of `DataCollatorWithFlattening`;
- `seq_idx`, the number of each token's sequence, of the same collator.

Shapes: B batch, H heads, N tokens of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
)

from lln.checks import check_values
from lln.packed import INTEGERS

PLAIN_MASKS = (causal_mask_function, bidirectional_mask_function)


@dataclass(frozen=True)
class PackedMask:
    """A mask that separates sequences and hides nothing else: where they start in the rows, laid end to end."""

    cu_seqlens: Tensor


def packed_mask(mask_function: Any) -> PackedMask | None:
    """The mask that a mask function of transformers stands for, if it is a plain one inside of packed sequences.

    Such a function holds the number of each token's sequence. Calling it for all pairs of tokens would take N² calls.
    """
    parts = _variables_of(mask_function, and_masks).get("mask_functions", ())
    if len(parts) != 2 or parts[0] not in PLAIN_MASKS:
        return None
    numbers = _variables_of(parts[1], packed_sequence_mask_function).get("packed_sequence_mask")
    return None if numbers is None else PackedMask(_starts(numbers).cpu())


def _variables_of(function: Any, maker: Callable[..., Any]) -> dict[str, Any]:
    """What a function that `maker` returned holds of its arguments; nothing if another made it."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker.__qualname__}.<locals>."):
        return {}
    return dict(zip(function.__code__.co_freevars, (x.cell_contents for x in function.__closure__ or ()), strict=True))


def read_packing(mask: Any, query: Tensor, key: Tensor, rest: dict[str, Any]) -> Tensor | None:
    """`cu_seqlens` of the rows laid end to end; None if each row is one sequence.

    Args:
        mask: what `packed_mask` made, or the padding of the tokens, or None.
        query, key: (B, H, N, D) and (B, H_k, M, D).
        rest: the other arguments of the attention function.
    """
    found = {
        "position_ids": mask.cu_seqlens if isinstance(mask, PackedMask) else _from_positions(mask, query, key, rest),
        "cu_seq_lens_q": _from_starts(rest),
        "seq_idx": _from_numbers(query, rest),
    }
    given = {name: _without_empty(x.cpu().long()) for name, x in found.items() if x is not None}
    if not given:
        return None
    names, starts = list(given), list(given.values())
    for name, other in zip(names[1:], starts[1:], strict=True):
        if not torch.equal(other, starts[0]):
            raise ValueError(
                f"{names[0]} and {name} differ about where sequences start: {starts[0].tolist()} and {other.tolist()}"
            )
    if isinstance(mask, Tensor):
        check_values(
            mask,
            "packed sequences leave no padding; leave attention_mask out, or pad each sequence in a row of its own",
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"packed sequences are for as many queries as keys, got {query.shape[2]} and {key.shape[2]}; pass "
            "use_cache=False"
        )
    rows = torch.arange(query.shape[0] + 1) * query.shape[2]
    return None if torch.equal(starts[0], rows) else starts[0]


def attend_rows(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, is_causal: bool
) -> Tensor:
    """The attention of packed sequences, (B, H, N, V): rows are laid end to end, as `cu_seqlens` has them."""
    output = attention(*map(_end_to_end, (query, key, value)), cu_seqlens=cu_seqlens, is_causal=is_causal)
    return torch.unflatten(output.squeeze(0), 1, (query.shape[0], query.shape[2])).transpose(0, 1)


def _end_to_end(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _from_positions(mask: Any, query: Tensor, key: Tensor, rest: dict[str, Any]) -> Tensor | None:
    """From position_ids beside no mask, as flash attention in transformers reads them."""
    positions = rest.get("position_ids")
    if mask is not None or not isinstance(positions, Tensor) or positions.dim() != 2 or torch.compiler.is_compiling():
        return None  # with padding, positions start again where it ends; others have three numbers a token
    if positions.shape[1] != query.shape[2] or query.shape[2] < 2 or query.shape[2] != key.shape[2]:
        return None
    starts_again = positions.diff(dim=1) != 1
    if not bool(starts_again.any()):
        return None
    numbers = torch.nn.functional.pad(starts_again.cumsum(dim=1), (1, 0))
    return _starts(numbers.expand(query.shape[0], -1))


def _from_starts(rest: dict[str, Any]) -> Any:
    starts: Any = rest.get("cu_seq_lens_q")
    of_keys: Any = rest.get("cu_seq_lens_k")
    if starts is None and of_keys is None:
        return None
    for name, x in (("cu_seq_lens_q", starts), ("cu_seq_lens_k", of_keys)):
        if not isinstance(x, Tensor) or x.dtype not in INTEGERS or x.dim() != 1:
            what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be an int32 tensor (sequences + 1,), got {what}")
    if starts.shape != of_keys.shape or not torch.equal(starts, of_keys.to(starts)):
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must be equal, since each sequence attends to itself; got "
            f"{starts.tolist()} and {of_keys.tolist()}"
        )
    return starts


def _from_numbers(query: Tensor, rest: dict[str, Any]) -> Tensor | None:
    numbers = rest.get("seq_idx")
    if numbers is None:
        return None
    rows = (query.shape[0], query.shape[2])
    if not isinstance(numbers, Tensor) or tuple(numbers.shape) != rows:
        what = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(f"seq_idx must have the number of each token's sequence, {rows}, got {what}")
    return _starts(numbers)


def _starts(numbers: Tensor) -> Tensor:
    """Where sequences start in the rows laid end to end, and where the last ends, from the number of each token's."""
    is_start = torch.ones_like(numbers, dtype=torch.bool)
    is_start[:, 1:] = numbers.diff(dim=1) != 0
    return torch.cat([is_start.flatten().nonzero()[:, 0], torch.tensor([numbers.numel()], device=numbers.device)])


def _without_empty(starts: Tensor) -> Tensor:
    return torch.cat([starts[:1], starts[1:][starts.diff() != 0]])
