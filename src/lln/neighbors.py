"""How many tokens an attention among neighbours sees, and how many are further away.

Shapes: B batch, N tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lln.masks import kept_tokens
from lln.problem import Near


class TokenRanks(NamedTuple):
    """The rank of each token among the kept ones of its sequence (B, N), from 0, and their number, (B, N) or (B, 1)."""

    rank: Tensor
    total: Tensor


def token_ranks(like: Tensor, keep: Tensor | None = None, cu_seqlens: Tensor | None = None) -> TokenRanks:
    """Of the tokens of `like` (B, heads, N, features)."""
    places = torch.arange(like.shape[2], device=like.device)[None]
    if cu_seqlens is not None:
        return packed_ranks(places, cu_seqlens.to(like.device))
    if keep is None:
        return TokenRanks(places, places.new_full((1, 1), like.shape[2]))
    rank = kept_tokens(keep, like).cumsum(dim=1) - 1
    return TokenRanks(rank, keep.sum(dim=1, keepdim=True))


def packed_ranks(places: Tensor, cu_seqlens: Tensor) -> TokenRanks:
    """Of the tokens at `places` (1, N) of a row of sequences laid end to end."""
    starts = cu_seqlens.to(places.dtype)
    sequence = torch.searchsorted(starts, places, right=True) - 1
    return TokenRanks(places - starts[sequence], starts.diff()[sequence])


def log_far_ratio(ranks: TokenRanks, *, near: Near, block_size: int, is_causal: bool) -> Tensor:
    """ln(far tokens / near tokens) of each token, (B, N) in float32; -inf where all that it may see is near."""
    rank, total = ranks
    if is_causal:
        total = rank + 1
    if near == "window":
        right = 0 if is_causal else block_size // 2
        first = (rank - (block_size - 1 - right)).clamp(min=0)
        last = torch.minimum(rank + right, total - 1)
    else:
        first = rank - rank % block_size
        last = torch.minimum(first + block_size, total) - 1
    # At least 1: what a token that is not kept gets does not matter, as long as it is finite.
    neighbors = (last - first + 1).clamp(min=1)
    return ((total - neighbors).clamp(min=0) / neighbors).log()
