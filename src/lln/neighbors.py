"""How much of softmax attention lies among the neighbours of a token, and how much further away.

With scores s_ij = q_i . k_j / sqrt(D) and log-weights w_j of the keys, which all queries share,

    ln(far / near)_i  =  ln sum over far j of exp(w_j)  -  ln sum over near j of exp(s_ij)

The sum over the near tokens is exact. That over the far tokens, which must take linear time, leaves out the part of a
score that depends on the query: a learned gate adds it.

Shapes: B batch, H heads, a multiple of H_k key heads, N tokens, D features of a head, C block size; n tiles of T
queries and the S keys that they may see.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from lln.backends.torch.summary import absent, repeat_heads
from lln.masks import blank, front_order, take_tokens
from lln.precision import accumulator, in_full_precision
from lln.problem import Near

SMALLEST_TILE = 32  # queries of a tile where neighbours are few: most of a smaller one would be the keys around it


class Past(NamedTuple):
    """The tokens before those of a call: what `lln.LLNState` keeps of them."""

    tokens: Tensor  # (B,) kept tokens
    key: Tensor  # (B, H_k, C, D), token t at place t % C
    key_weight: Tensor | None  # (B, H, C) of the same tokens
    log_weight: Tensor | None  # (B, H) ln of the sum of all weights; None: of their number


@in_full_precision
def log_mass_ratio(
    query: Tensor,
    key: Tensor,
    key_weight: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    near: Near,
    block_size: int,
    is_causal: bool,
    past: Past | None = None,
) -> Tensor:
    """ln(far / near) of each query, (B, H, N); -inf where all that it may see is near.

    Args:
        query, key: (B, H, N, D) and (B, H_k, N, D).
        key_weight: log-weights (B, H, N) of the keys; left out, 0.
        keep: (B, N) bool; what a token that is not kept gets is finite or -inf, and means nothing.
        near, block_size: which tokens are near, see `lln.block_diagonal_attention`.
        is_causal: tokens see only those before them.
        past: tokens before the first one, for causal attention.
    """
    dtype = accumulator(query.dtype)
    if query.shape[2] == 0:
        return query.new_zeros(query.shape[:3], dtype=dtype)
    query, key = query.to(dtype), key.to(dtype)
    weight = query.new_zeros(1, 1, 1).expand(*query.shape[:3]) if key_weight is None else key_weight.to(dtype)
    order = None
    if keep is not None:
        order = front_order(keep)
        kept, query, key = keep.gather(1, order), take_tokens(query, order), take_tokens(key, order)
        query, key = blank(query, kept), blank(key, kept)
        weight = weight.gather(2, order[:, None].expand_as(weight)).masked_fill(~kept[:, None], absent(dtype))
    total = torch.logcumsumexp(weight, dim=2) if is_causal else weight.logsumexp(dim=2, keepdim=True)
    number = torch.arange(query.shape[2], device=query.device)[None]
    tokens = number.new_full((1,), query.shape[2]) if keep is None else keep.sum(dim=1)
    before = number.new_zeros(1) if past is None else past.tokens.to(number.dtype)
    if past is not None:
        first = past.tokens.to(dtype).log()[:, None] if past.log_weight is None else past.log_weight.to(dtype)
        total = torch.logaddexp(total, first.expand(*weight.shape[:2])[..., None])
    neighbors = _Neighbors(near, block_size, is_causal)
    scores, weights = neighbors.log_sums(query, key, weight, tokens, before, past)
    # Far is what is left of the total. Where nothing is left, logarithms and their gradients would not be finite.
    seen = before[:, None] + (number + 1 if is_causal else tokens[:, None])
    is_far = (seen > neighbors.number(number + before[:, None], seen))[:, None] & (weights < total)
    rest = torch.where(is_far, weights - total, math.log(0.5))
    ratio = (total + torch.log(-torch.expm1(rest)) - scores).masked_fill(~is_far, -math.inf)
    return ratio if order is None else ratio.gather(2, order.argsort(dim=1)[:, None].expand_as(ratio))


def packed_log_mass_ratio(
    query: Tensor,
    key: Tensor,
    key_weight: Tensor | None,
    cu_seqlens: Tensor,
    *,
    near: Near,
    block_size: int,
    is_causal: bool,
) -> Tensor:
    """As `log_mass_ratio`, for a row (1, H, N, D) of sequences laid end to end."""
    lengths = cu_seqlens.diff().tolist()
    longest = torch.arange(max(lengths, default=0), device=query.device)
    keep = longest < torch.tensor(lengths, device=query.device)[:, None]

    def samples(x: Tensor) -> Tensor:  # (1, heads, N, features) to (sequences, heads, longest, features)
        return pad_sequence(list(torch.split(x[0].transpose(0, 1), lengths)), batch_first=True).transpose(1, 2)

    weight = None if key_weight is None else samples(key_weight[..., None])[..., 0]
    options = {"near": near, "block_size": block_size, "is_causal": is_causal}
    ratio = log_mass_ratio(samples(query), samples(key), weight, keep, **options)  # type: ignore[arg-type]
    return ratio.transpose(1, 2)[keep].mT[None]


class _Neighbors(NamedTuple):
    """Which tokens are near each other, by their numbers among the kept tokens of a sequence."""

    near: Near
    block_size: int
    is_causal: bool

    @property
    def right(self) -> int:
        """The furthest token that is near, counted from a token; of a block, from its first one."""
        if self.is_causal:
            return 0
        return self.block_size // 2 if self.near == "window" else self.block_size - 1

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the token `key` is near the token `query`."""
        if self.near == "window":
            left = self.block_size - 1 - self.right
            return (key >= query - left) & (key <= query + self.right)
        same = query.div(self.block_size, rounding_mode="floor") == key.div(self.block_size, rounding_mode="floor")
        return same & (key <= query) if self.is_causal else same

    def number(self, query: Tensor, tokens: Tensor) -> Tensor:
        """How many of the first `tokens` are near the token `query`, itself included."""
        if self.near == "window":
            first, last = query - (self.block_size - 1 - self.right), query + self.right
        else:
            first = query - query % self.block_size
            last = query if self.is_causal else first + self.block_size - 1
        return torch.minimum(last, tokens - 1) - first.clamp(min=0) + 1

    def log_sums(
        self, query: Tensor, key: Tensor, weight: Tensor, tokens: Tensor, before: Tensor, past: Past | None
    ) -> tuple[Tensor, Tensor]:
        """The logarithms of the sums of exp(s_ij) and of exp(w_j) over the near tokens, each (B, H, N).

        Kept tokens come first, `tokens` of them; their numbers begin at `before`.
        """
        count, groups = query.shape[2], query.shape[1] // key.shape[1]
        left, right = self.block_size - 1, self.right
        size = min(max(self.block_size, SMALLEST_TILE), count)
        tiles = -(-count // size)
        span = size + left + right
        fill = (0, tiles * size - count + right)
        if past is None:
            key, weight = pad(key, (0, 0, left, fill[1])), pad(weight, (left, fill[1]))
        else:  # the last `left` tokens, in their order
            places = (past.tokens[:, None].long() + torch.arange(-left, 0, device=key.device)) % past.key.shape[2]
            recent = take_tokens(past.key.to(key.dtype), places)
            key = pad(torch.cat((recent, key), dim=2), (0, 0, *fill))
            recent_weight = weight.new_zeros(*weight.shape[:2], left)
            if past.key_weight is not None:
                index = places[:, None].expand(-1, weight.shape[1], -1)
                recent_weight = past.key_weight.to(weight.dtype).gather(2, index)
            weight = pad(torch.cat((recent_weight, weight), dim=2), fill)
        q = torch.unflatten(pad(query, (0, 0, 0, tiles * size - count)), 2, (tiles, size))
        k = repeat_heads(key, groups).unfold(2, span, size)  # (B, H, n, D, S)
        w = weight.unfold(2, span, size)[..., None, :]  # (B, H, n, 1, S)
        starts = torch.arange(tiles, device=query.device)[:, None, None] * size
        rows = starts + torch.arange(size, device=query.device)[:, None]
        columns = starts + torch.arange(span, device=query.device) - left
        first, end = (x[:, None, None, None] for x in (-before.clamp(max=left), tokens))
        shift = before[:, None, None, None]
        # A row that is padding sees itself, so that its sum is not empty.
        near = self.allowed(rows + shift, columns + shift) & (columns >= first) & (columns < end) | (rows == columns)
        near = near[:, None]
        sums = []
        for x in ((q * query.shape[3] ** -0.5) @ k, w.expand(*w.shape[:3], size, span)):
            found = x.masked_fill(~near, absent(x.dtype)).logsumexp(dim=-1)
            sums.append(found.flatten(2, 3)[:, :, :count])
        return sums[0], sums[1]
