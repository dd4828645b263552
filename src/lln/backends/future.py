"""Gradients of the past where later tokens of causal attention are not finite and have no part in the loss.

Backends multiply what such tokens hold with their gradients of 0, and 0 times NaN is NaN.
"""

from typing import Any

import torch
from torch import Tensor


def without_nonfinite_future(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scales: tuple[Tensor | None, ...],
    grad_lse: Tensor | None,
) -> tuple[Any, ...] | None:
    """The same with zeros (scales: ones) from the first token of each sample on that is not finite.

    Samples whose later tokens have gradients stay as they are. None: all do. Scales that tokens have of their own, and
    `grad_lse`, are (B, H, N) or (B, H, N, 1).
    """
    nonfinite = torch.stack([~x.isfinite().all(dim=3).all(dim=1) for x in (query, key, value)]).any(dim=0)
    later = nonfinite.cumsum(dim=1) > 0  # (B, N)
    part = (grad != 0).any(dim=3).any(dim=1)
    if grad_lse is not None:
        part = part | (grad_lse.flatten(2) != 0).any(dim=1)
    has_part = (part & later).any(dim=1)
    later = later & ~has_part[:, None]
    if not bool(later.any()):
        return None

    def fill(x: Tensor, number: float) -> Tensor:
        # A clone keeps the strides, on which it depends how products are rounded.
        return x.clone().masked_fill_(later[:, None] if x.dim() == 3 else later[:, None, :, None], number)

    tokens = (fill(x, 0.0) for x in (grad, query, key, value))
    each = tuple(fill(x, 1.0) if x is not None and x.dim() > 2 and x.shape[2] == later.shape[1] else x for x in scales)
    return (*tokens, each, None if grad_lse is None else fill(grad_lse, 0.0))
