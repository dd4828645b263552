"""Softmax attention in sliding windows, and what mechanisms that depend on positions share.

Shapes: B batch, H heads, N tokens, D features of a head, V value width; n blocks of C tokens, each of which attends to
L = before + C + after keys; E extra keys that do not depend on the position of the query.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.backends.torch.summary import join_pieces, mask_value
from lln.masks import fill_padding, front_order, take_tokens
from lln.matching.moments import CHUNK_TOKENS, chunks
from lln.precision import accumulator

# Under the root of the mean square, so that a row of zeros (no score above 0) stays zero and has a finite gradient.
# The authors of TransNormer and TNN add 1e-8 to the root mean square itself, whose gradient at zero is not a number.
RMS_EPSILON = 1e-8

Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Extra(NamedTuple):
    """Keys and values that stand beside the window in the same softmax."""

    key: Tensor  # (B, H, E, D)
    value: Tensor  # (B, H, E, V)
    allowed: Tensor  # bool, broadcasts to (B, N, E)


def on_kept_tokens(mix: Mix, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """`mix(query, key, value, kept)` in at least float32 with the kept tokens in front, and its output back in place.

    So positions count kept tokens only: padding on the left, on the right or in between moves no block boundary and no
    distance. Padding is blanked on the way in, whatever it holds, and gets zeros on the way out.
    """
    dtype = query.dtype
    query, key, value = (x.to(accumulator(dtype)) for x in (query, key, value))
    if keep is None:
        return mix(query, key, value, None).to(dtype)
    order = front_order(keep)
    query, key, value = (take_tokens(fill_padding(x, keep), order) for x in (query, key, value))
    output = take_tokens(mix(query, key, value, keep.gather(1, order)), order.argsort(dim=1))
    return fill_padding(output, keep).to(dtype)


def check_value_width(name: str, value: Tensor, head_dim: int) -> None:
    """Refuse values that do not have the width that parameters for each feature were made for."""
    if value.shape[3] != head_dim:
        raise ValueError(
            f"{name} has parameters for each feature of the values and was built for head_dim={head_dim}, "
            f"got value {tuple(value.shape)}"
        )


def rms_norm(x: Tensor) -> Tensor:
    """x over the root mean square of its last dimension."""
    return x * (x.square().mean(dim=-1, keepdim=True) + RMS_EPSILON).rsqrt()


def join_heads(x: Tensor) -> Tensor:
    """Heads (B, H, N, D) side by side, (B, N, H D)."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """The heads (B, H, N, D) of (B, N, H D) again."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def blocks(x: Tensor, size: int) -> Tensor:
    """Tokens (B, H, N, D) in blocks (B, H, n, C, D), the last one filled up with zeros."""
    filled = pad(x, (0, 0, 0, -x.shape[2] % size))
    return filled.reshape(*x.shape[:2], filled.shape[2] // size, size, x.shape[3])


def join_blocks(x: Tensor, tokens: int) -> Tensor:
    """Blocks (B, H, n, C, D) as tokens (B, H, N, D) again."""
    return x.flatten(2, 3)[:, :, :tokens]


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over what is allowed; zeros where nothing is."""
    weights = torch.softmax(scores.masked_fill(~allowed, mask_value(scores.dtype)), dim=-1)
    return weights.masked_fill(~allowed, 0.0)


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    block: int,
    before: int,
    after: int,
    may_attend: Callable[[Tensor, Tensor], Tensor],
    extra: Extra,
) -> Tensor:
    """Softmax attention of each block of queries to the visible keys (B, N) in and around it, and to the extra keys.

    `may_attend(i, j)` is True where the query at position i attends to the key at j of the neighbourhood.
    """
    tokens, num_extra = query.shape[2], extra.key.shape[2]
    block, before, after = (min(size, tokens) for size in (block, before, after))
    beside_all = extra.allowed.expand(visible.shape[0], tokens, -1)

    def attend(part: slice) -> Tensor:  # whole blocks, a few at a time
        start = torch.arange(part.start, part.stop, block, device=query.device)[:, None]
        i = start + torch.arange(block, device=query.device)  # (n, C)
        j = start + torch.arange(-before, block + after, device=query.device)  # (n, L)
        missing = (part.start - part.stop) % block
        first, end = max(part.start - before, 0), part.stop + missing + after
        outside = (0, 0, before - (part.start - first), max(end - tokens, 0))

        def around(x: Tensor) -> Tensor:  # (B, H, N, D) to (B, H, n, D, L)
            return pad(x[:, :, first : min(end, tokens)], outside).unfold(2, j.shape[1], block)

        seen = around(visible[:, None, :, None])  # (B, 1, n, 1, L)
        allowed = pad(beside_all[:, None, part], (0, 0, 0, missing))
        allowed = allowed.reshape(visible.shape[0], 1, len(start), block, num_extra)
        allowed = torch.cat((allowed, seen & may_attend(i[:, :, None], j[:, None, :])), dim=-1)
        q = query[:, :, part] * query.shape[3] ** -0.5
        scores = torch.cat((blocks(q @ extra.key.mT, block), blocks(q, block) @ around(key)), dim=-1)
        weights = masked_softmax(scores, allowed)
        beside, inside = weights[..., :num_extra], weights[..., num_extra:]
        return join_blocks(beside @ extra.value[:, :, None] + inside @ around(value).mT, q.shape[2])

    parts = (attend(part) for part in chunks(tokens, max(block, CHUNK_TOKENS // block * block)))
    return join_pieces(parts, query, value.shape[3])
