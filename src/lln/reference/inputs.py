"""What the functions on explicit matrices share: packed sequences, heads, pairs that attend to each other, scales."""

import math
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lln.checks import check_inputs
from lln.masks import read_paddings
from lln.problem import read_scale

Attention = TypeVar("Attention", bound=Callable[..., Tensor])
PER_TOKEN = ("alpha", "beta", "key_weight")


def packed(attention: Attention) -> Attention:
    """With `cu_seqlens`, run an attention on each of the sequences that (1, H, total, D) inputs hold."""

    @wraps(attention)
    def wrapped(
        query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor | None = None, **options: Any
    ) -> Tensor:
        if cu_seqlens is None:
            return attention(query, key, value, **options)
        check_inputs(query, key, value, same_length="cu_seqlens")
        total = query.shape[2]
        outputs = [query.new_zeros(*query.shape[:2], 0, value.shape[3])]
        for start, end in pairwise(_read_cu_seqlens(cu_seqlens, query, options)):
            if start < end:
                own = {name: _part(options[name], start, end, total) for name in PER_TOKEN if name in options}
                tokens = (x[:, :, start:end] for x in (query, key, value))
                outputs.append(attention(*tokens, **options | own))
        return torch.cat(outputs, dim=2)

    return cast(Attention, wrapped)


def _read_cu_seqlens(cu_seqlens: Tensor, query: Tensor, options: dict[str, Any]) -> list[int]:
    """Where the sequences start, and where the last one ends."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype is not torch.int32:
        what = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 tensor, got {what}; convert with .int()")
    for name in ("key_padding_mask", "query_padding_mask"):
        if options.get(name) is not None:
            raise ValueError(f"packed sequences hold no padding; give cu_seqlens or {name}, not both")
    if options.get("scope", "sample") != "sample":
        raise ValueError('with cu_seqlens each sequence has its own statistics; use scope="sample"')
    batch, total = query.shape[0], query.shape[2]
    if batch != 1:
        raise ValueError(f"with cu_seqlens all sequences are in one sample, (1, heads, tokens, D); got batch {batch}")
    ends: list[int] = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or any(end < start for start, end in pairwise(ends)):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {total}, in a tensor (sequences + 1,); "
            f"got {cu_seqlens.tolist()}"
        )
    return ends


def _part(scale: float | Tensor | None, start: int, end: int, total: int) -> float | Tensor | None:
    """The tokens of one sequence of a (1, H, total) alpha, beta or key_weight."""
    if isinstance(scale, Tensor) and scale.dim() == 3 and scale.shape[2] == total:
        return scale[:, :, start:end]
    return scale


def allowed_pairs(query: Tensor, key: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Which key each query may attend to, (B, 1, N, M)."""
    _, keep = read_paddings(query, key, key_padding_mask, None)
    allowed = torch.ones(query.shape[0], 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    return allowed if keep is None else allowed & keep[:, None, None, :]


def normalise(log_weights: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; zeros where none is."""
    masked = log_weights.masked_fill(~allowed, -math.inf)
    return torch.softmax(masked, dim=-1).masked_fill(~allowed, 0.0)


def repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def broadcast_scale(name: str, given: float | Tensor | None, matched: Tensor, tokens: Tensor, *, heads: int) -> Tensor:
    """The alpha or beta that was given, or else the matched one, as a tensor that broadcasts to (B, H, tokens, 1)."""
    if given is not None:
        return read_scale(name, given, tokens, heads=heads)[..., None]
    return matched[..., None] if matched.dim() == 3 else matched[..., None, None]
