"""Gradients of the past where later tokens of causal attention are not finite and have no part in the loss.

The code multiplies what such tokens hold with their gradients of 0, and 0 times NaN is NaN.
"""

import torch
from torch import Tensor


def is_spoiled(grad_key: Tensor, keep_key: Tensor | None, block_size: int) -> bool:
    """Whether gradients of keys are not all finite, judged by few of them.

    A token that is not finite spoils those of all keys before it, in blocks and windows of those next to it.
    """
    step = 1 if keep_key is not None else block_size or grad_key.shape[2]
    return not bool(grad_key[:, :, ::step].isfinite().all())


def without_odd_future(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor
) -> tuple[Tensor, ...] | None:
    """The same with zeros (alpha and beta: ones) from the first token of each sample on that is not finite.

    Samples whose later tokens have gradients stay as they are. None: all do.
    """
    odd = torch.stack([~x.isfinite().all(dim=3).all(dim=1) for x in (query, key, value)]).any(dim=0)
    later = odd.cumsum(dim=1) > 0  # (B, N)
    has_part = ((grad != 0).any(dim=3).any(dim=1) & later).any(dim=1)
    later = later & ~has_part[:, None]
    if not bool(later.any()):
        return None
    tokens = (x.masked_fill(later[:, None, :, None], 0.0) for x in (grad, query, key, value))
    scales = (x.masked_fill(later[:, None], 1.0) if x.dim() == 3 else x for x in (alpha, beta))
    return (*tokens, *scales)
