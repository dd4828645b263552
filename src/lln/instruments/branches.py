"""How much each branch of LLN + Diag attention contributes to its output (figure 3 of the paper)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lln.functional import block_diagonal_attention, lln_attention
from lln.masks import fill_padding, read_padding
from lln.matching.curves import Matching
from lln.matching.moments import Scope
from lln.precision import accumulator


@dataclass(frozen=True)
class Branches:
    """Shares of the output's length, far + near = 1, and how the branches agree; each is (B, H)."""

    far: Tensor  # of LLN attention
    near: Tensor  # of block-diagonal attention
    cosine: Tensor  # 1: both are the same, 0: nothing in common


@torch.no_grad()
def branches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: Matching = "variance",
    scope: Scope = "sample",
) -> Branches:
    """The shares of the far and the near branch in the output of `lln.lln_diag_attention` with the same arguments:

        far = |LLN| / (|LLN| + |Diag|)        |X|² = sum over kept tokens and features of X²

    NaN if both branches are zero, as in a sample without any kept key.

    Args:
        query, key, value: as in `lln.lln_diag_attention`, and so are all options.

    Returns:
        `Branches`, whose fields are tensors (B, H).

    Raises:
        ValueError: what `lln.lln_diag_attention` refuses.

    Example:
        >>> query, key, value = torch.randn(3, 1, 4, 100, 16)
        >>> branches(query, key, value, block_size=16).far.shape
        torch.Size([1, 4])
    """
    far = lln_attention(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        is_causal=is_causal,
        alpha=alpha,
        beta=beta,
        matching=matching,
        scope=scope,
    )
    near = block_diagonal_attention(
        query, key, value, block_size=block_size, key_padding_mask=key_padding_mask, is_causal=is_causal
    )
    keep = read_padding(key_padding_mask, query)
    far, near = (fill_padding(x.to(accumulator(x.dtype)), keep).flatten(2) for x in (far, near))
    far_length, near_length = far.norm(dim=-1), near.norm(dim=-1)
    total = far_length + near_length
    return Branches(
        far=far_length / total,
        near=near_length / total,
        cosine=(far * near).sum(dim=-1) / (far_length * near_length),
    )
