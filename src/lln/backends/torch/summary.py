"""What linear attention keeps of a set of keys, and how tokens come to it: in pieces, scaled, with padding absent.

With b = beta k and the log-mass of each feature L_l = logsumexp_j b_jl over the keys, all that is ever kept of them is
L and the mean values S = softmax over keys of (b)ᵀ V that the features point to. Both are bounded by what was put in.

Shapes: B batch, H heads, D features of a head, V value width. Tensors are in the accumulator's dtype, at least float32;
`alpha` and `beta` broadcast to (B, H, tokens, 1), and `weight` (B, H, tokens) is added to b of each key.
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lln.checks import is_recorded
from lln.masks import fill_padding
from lln.matching.moments import chunks, cut, piece_tokens, pieces
from lln.precision import accumulator


class KeySummary(NamedTuple):
    """What is kept of a set of keys and values."""

    mass: Tensor  # (B, H, D) L, the log of the summed exp(b)
    values: Tensor  # (B, H, D, V) S, for each feature the mean value under softmax(b)


def mask_value(dtype: torch.dtype) -> float:
    """What the score or b of a masked key is set to: below every other, yet finite: differences of two are not NaN."""
    return torch.finfo(dtype).min / 2


def empty_summary(batch: int, heads: int, head_dim: int, value_dim: int, like: Tensor) -> KeySummary:
    dtype = accumulator(like.dtype)
    mass = torch.full((batch, heads, head_dim), mask_value(dtype), dtype=dtype, device=like.device)
    return KeySummary(mass, torch.zeros(batch, heads, head_dim, value_dim, dtype=dtype, device=like.device))


def merge(first: KeySummary, second: KeySummary) -> KeySummary:
    """The summary of two sets of keys together."""
    mass = log_add(first.mass, second.mass)
    first_share, second_share = (first.mass - mass).exp()[..., None], (second.mass - mass).exp()[..., None]
    return KeySummary(mass, first.values * first_share + second.values * second_share)


def log_add(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)), differentiable twice also where one is absent (torch.logaddexp gives NaN there)."""
    return torch.logsumexp(torch.stack((x, y)), dim=0)


def summarize(
    key: Tensor, value: Tensor, beta: Tensor, keep: Tensor | None, weight: Tensor | None = None, *, heads: int
) -> KeySummary:
    """The summary of all kept keys, piece by piece."""
    found: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for b, v in weighted_keys(key, value, beta, keep, weight, heads, size_of_pieces(key, value, heads)):
        highest, lowest = (extreme(b.detach(), dim=2, keepdim=True) for extreme in (torch.amax, torch.amin))
        if found is not None:
            highest, lowest = torch.maximum(highest, found[0]), torch.minimum(lowest, found[1])
        weights = b.sub_(highest).exp_() if may_overwrite(b) else (b - highest).exp()
        total, sums = weights.sum(dim=2, keepdim=True), weights.mT @ v
        if found is not None:
            fade = (found[0] - highest).exp()
            total, sums = total + found[2] * fade, sums + found[3] * fade.mT
        found = highest, lowest, total, sums
    assert found is not None
    highest, lowest, total, sums = found
    mass = highest + total.log() + lowest * 0  # NaN if there was a -inf, which the exponential hides
    return KeySummary(mass[:, :, 0], sums / total.mT)


def attend_summary(query: Tensor, alpha: Tensor, memory: KeySummary) -> Tensor:
    """out = softmax(alpha q + L) S, piece by piece."""
    mass, values = memory.mass[:, :, None], memory.values
    queries = scaled_queries(query, alpha, size_of_pieces(query, values, query.shape[1]))
    parts = (torch.softmax(torch.addcmul(mass, q, scale), dim=-1) @ values for q, scale in queries)
    return join_pieces(parts, query, values.shape[3])


def size_of_pieces(tokens: Tensor, value: Tensor, heads: int) -> int:
    return piece_tokens(tokens.shape[0], heads, max(tokens.shape[3], value.shape[3]), device=tokens.device)


def scaled_queries(query: Tensor, alpha: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """q and its alpha in pieces; alpha is NaN for a row that is not finite."""
    for piece, scale in zip(cut(query, size), scales(alpha, query, size), strict=True):
        q = piece.to(accumulator(query.dtype))
        yield q, scale + minus_infinity(q, -1)


def weighted_keys(
    key: Tensor, value: Tensor, beta: Tensor, keep: Tensor | None, weight: Tensor | None, heads: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """b = beta k + weight and the values in pieces, for every query head, with padding absent."""
    groups = heads // key.shape[1]
    parts = zip(
        chunks(key.shape[2], size),
        pieces(key, keep, size),
        pieces(value, keep, size),
        scales(beta, key, size),
        strict=True,
    )
    for part, (k, kept), (v, _), scale in parts:
        b = repeat_heads(k, groups) * scale
        if weight is not None:
            b = b + weight[:, :, part, None]
        yield fill_padding(b, kept, mask_value(b.dtype)), repeat_heads(v, groups)


def scales(scale: Tensor, tokens: Tensor, size: int) -> Iterator[Tensor]:
    """alpha or beta for each piece of the tokens."""
    if scale.shape[2] == tokens.shape[2]:
        return iter(cut(scale, size))
    return (scale for _ in chunks(tokens.shape[2], size))


def minus_infinity(x: Tensor, dim: int) -> Tensor:
    """NaN where an entry along `dim` is -inf or NaN, else 0: an exponential would hide it, while inf - inf shows."""
    return x.detach().amin(dim=dim, keepdim=True) * 0


def may_overwrite(*tensors: Tensor) -> bool:
    """Whether results may replace these tensors: they are not differentiated, and no tracer compares two graphs."""
    return not is_recorded() and not any(x.requires_grad for x in tensors)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def add_scale_gradient(total: Tensor, gradient: Tensor, x: Tensor, part: slice, tokens: int) -> None:
    """Add to the gradient of alpha or beta what comes of the gradient of alpha x, where x is `part` of the tokens."""
    place = total[:, :, part] if total.shape[2] == tokens else total
    place += (gradient * x).sum(dim=-1, keepdim=True).sum_to_size(place.shape)


def sum_groups(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else torch.unflatten(x, 1, (-1, groups)).sum(dim=2)


def join_pieces(parts: Iterator[Tensor], query: Tensor, width: int) -> Tensor:
    """The pieces of an output one after the other.

    Without gradients they are written where they belong, because a list of them would take the output's memory twice;
    with gradients they are joined, because the gradient of each write would be as large as the output.
    """
    first = next(parts)
    if first.shape[2] == query.shape[2]:
        return first
    if not may_overwrite(first):
        return torch.cat((first, *parts), dim=2)
    output = first.new_empty(*query.shape[:3], width)
    end = 0
    for part in chain((first,), parts):
        start, end = end, end + part.shape[2]
        output[:, :, start:end] = part
    return output
