"""Gradients of the past where later tokens of causal attention are not finite and have no part in the loss.

The code multiplies what such tokens hold with their gradients of 0, and 0 times NaN is NaN. It says so (`SPOILED`).
"""

from typing import Any

import torch
from torch import Tensor

SPOILED = 2  # what lln_backward returns then


def without_nonfinite_future(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Any, ...] | None:
    """The same with zeros (alpha and beta: ones) from the first token of each sample on that is not finite.

    Samples whose later tokens have gradients stay as they are. None: all do.
    """
    nonfinite = torch.stack([~x.isfinite().all(dim=3).all(dim=1) for x in (query, key, value)]).any(dim=0)
    later = nonfinite.cumsum(dim=1) > 0  # (B, N)
    part = (grad != 0).any(dim=3).any(dim=1)
    if grad_lse is not None:
        part = part | (grad_lse != 0).any(dim=1)
    has_part = (part & later).any(dim=1)
    later = later & ~has_part[:, None]
    if not bool(later.any()):
        return None
    tokens = (x.masked_fill(later[:, None, :, None], 0.0) for x in (grad, query, key, value))
    scales = (x.masked_fill(later[:, None], 1.0) if x.dim() == 3 else x for x in (alpha, beta))
    return (*tokens, *scales, None if grad_lse is None else grad_lse.masked_fill(later[:, None], 0.0))
