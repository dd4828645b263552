"""LLN attention in plain torch, linear in the number of tokens.

Everything rests on the two-softmax form of eq. 9. With a = alpha q, b = beta k and the log-mass of each feature
L_l = logsumexp_j b_jl over the keys,

    A = softmax over features of (a + L)      B = softmax over keys of b      out = A (Bᵀ V)

All that is ever kept of a set of keys is its `Memory`: the log-mass L and the mean values S = Bᵀ V that its features
point to. Both are bounded by what was put in, no epsilon is needed and nothing overflows, however long the sequence.

Shapes: B batch, H heads, N queries, M keys, D features of a head, V value width; n chunks of C tokens. Tensors are in
the accumulator's dtype inside, at least float32; `alpha` and `beta` broadcast to (B, H, tokens, 1).
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln import moments
from lln.masks import blank, front_order, kept_tokens, take_tokens
from lln.moments import accumulator, chunks, cut, not_finite, pieces

# Tokens that a causal chunk handles with one matrix product; a power of two.
CAUSAL_CHUNK = 64


class Memory(NamedTuple):
    """What is kept of a set of keys and values."""

    mass: Tensor  # (B, H, D) L, the log of the summed exp(b)
    values: Tensor  # (B, H, D, V) S, for each feature the mean value under softmax(b)


def absent(dtype: torch.dtype) -> float:
    """The b of a key that is not there: below every other, yet finite, so that differences of two are not NaN."""
    return torch.finfo(dtype).min / 2


def empty_memory(batch: int, heads: int, head_dim: int, value_dim: int, like: Tensor) -> Memory:
    dtype = accumulator(like.dtype)
    mass = torch.full((batch, heads, head_dim), absent(dtype), dtype=dtype, device=like.device)
    return Memory(mass, torch.zeros(batch, heads, head_dim, value_dim, dtype=dtype, device=like.device))


def merge(first: Memory, second: Memory) -> Memory:
    """The memory of two sets of keys together."""
    mass = log_add(first.mass, second.mass)
    first_share, second_share = (first.mass - mass).exp()[..., None], (second.mass - mass).exp()[..., None]
    return Memory(mass, first.values * first_share + second.values * second_share)


def log_add(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)), differentiable twice also where one is absent (torch.logaddexp gives NaN there)."""
    return torch.logsumexp(torch.stack((x, y)), dim=0)


def remember(key: Tensor, value: Tensor, beta: Tensor, keep: Tensor | None, *, heads: int) -> Memory:
    """The memory of all kept keys, piece by piece."""
    memory: Memory | None = None
    for b, v in _weighted_keys(key, value, beta, keep, heads):
        part = Memory(torch.logsumexp(b, dim=2), torch.softmax(b, dim=2).mT @ v)
        memory = part if memory is None else merge(memory, part)
    assert memory is not None
    return memory


def recall(query: Tensor, alpha: Tensor, memory: Memory) -> Tensor:
    """out = softmax(alpha q + L) S, piece by piece."""
    mass, values = memory.mass[:, :, None], memory.values
    parts = (torch.softmax(a + mass, dim=-1) @ values for a in _weighted_queries(query, alpha))
    return collect(parts, query, values.shape[3])


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor, keep: Tensor | None
) -> Tensor:
    """LLN attention of every query to every kept key."""
    return recall(query, alpha, remember(key, value, beta, keep, heads=query.shape[1]))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor, keep: Tensor | None, memory: Memory
) -> tuple[Tensor, Memory]:
    """LLN attention of every query to the memory and to the kept keys up to its own, and the memory after the last."""

    def parts() -> Iterator[Tensor]:
        nonlocal memory
        queries = _weighted_queries(query, alpha)
        for a, (b, v) in zip(queries, _weighted_keys(key, value, beta, keep, query.shape[1]), strict=True):
            output, memory = _causal_segment(a, b, v, memory)
            yield output

    return collect(parts(), query, value.shape[3]), memory


def block_diagonal_attention(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *, block_size: int, is_causal: bool
) -> Tensor:
    """Softmax attention inside consecutive blocks of kept tokens.

    Blocks count kept tokens only, so that padding on the left, on the right or in between moves no block boundary;
    a token that is not kept lies in no block and gets zeros.
    """
    if keep is None:
        return collect(_blocks(query, key, value, None, block_size, is_causal), query, value.shape[3])
    order = front_order(keep)
    query, key, value = (take_tokens(x, order) for x in (query, key, value))
    parts = _blocks(query, key, value, keep.gather(1, order), block_size, is_causal)
    output = collect(parts, query, value.shape[3])
    return blank(take_tokens(output, order.argsort(dim=1)), keep)


def collect(parts: Iterator[Tensor], query: Tensor, width: int) -> Tensor:
    """The pieces of an output one after the other.

    Without gradients they are written where they belong, because a list of them would take the output's memory twice;
    with gradients they are joined, because the gradient of each write would be as large as the output.
    """
    first = next(parts)
    if first.shape[2] == query.shape[2]:
        return first
    if first.requires_grad:
        return torch.cat((first, *parts), dim=2)
    output = first.new_empty(*query.shape[:3], width)
    end = 0
    for part in chain((first,), parts):
        start, end = end, end + part.shape[2]
        output[:, :, start:end] = part
    return output


def _weighted_queries(query: Tensor, alpha: Tensor) -> Iterator[Tensor]:
    """a = alpha q in pieces."""
    for piece, scale in zip(cut(query), _scales(alpha, query), strict=True):
        q = piece.to(accumulator(query.dtype))
        yield q * (scale + not_finite(q, -1))


def _weighted_keys(
    key: Tensor, value: Tensor, beta: Tensor, keep: Tensor | None, heads: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """b = beta k and the values in pieces, for every query head, with padding absent."""
    groups = heads // key.shape[1]
    for (k, kept), (v, _), scale in zip(pieces(key, keep), pieces(value, keep), _scales(beta, key), strict=True):
        b = _repeat(k, groups) * (scale + _repeat(not_finite(k, -1), groups))
        yield blank(b, kept, absent(b.dtype)), _repeat(v, groups)


def _scales(scale: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """alpha or beta for each piece of the tokens."""
    return iter(cut(scale)) if scale.shape[2] == tokens.shape[2] else (scale for _ in chunks(tokens.shape[2]))


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _causal_segment(a: Tensor, b: Tensor, v: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """Causal attention in chunks: what came before a chunk through the memory at its start, the rest pair by pair.

    P_ij = sum_l A_il exp(b_jl - L_il) for j <= i, where L_i is the log-mass up to token i. To make matrix products of
    it, exp(b_j - L_i) must be split at some reference r as exp(b_j - r) exp(r - L_i). With r the log-mass at any point
    between j and i both factors are at most 1, whatever comes later in the sequence; so each chunk is halved again and
    again, and the queries of a right half meet the keys of its left half with the log-mass between them as reference.
    """
    tokens = a.shape[2]
    size = 1
    while size < min(tokens, CAUSAL_CHUNK):
        size *= 2
    a, v, b = _cut(a, size), _cut(v, size), _cut(b, size, absent(b.dtype))  # (B, H, n, C, D)

    within = _running_mass(b)
    chunk_memory = Memory(within[..., -1, :], torch.softmax(b, dim=3).mT @ v)
    first = Memory(*(x[:, :, None] for x in memory))
    before = _running_merge(Memory(*(torch.cat(pair, dim=2) for pair in zip(first, chunk_memory, strict=True))))
    start = Memory(*(x[:, :, :-1] for x in before))

    mass = log_add(start.mass[..., None, :].expand_as(within), within)
    A = torch.softmax(a + mass, dim=-1)
    output = (A * (start.mass[..., None, :] - mass).exp()) @ start.values
    output = output + (A * (b - mass).exp()).sum(dim=-1, keepdim=True) * v  # a token and itself
    half = 1
    while half < size:
        A_right, mass_right = (_halves(x, half)[1] for x in (A, mass))
        b_left, v_left, mass_left = (_halves(x, half)[0] for x in (b, v, mass))
        between = mass_left[..., -1:, :]
        weights = (A_right * (between - mass_right).exp()) @ (b_left - between).exp().mT
        gained = weights @ v_left
        output = output + _join_halves(torch.zeros_like(gained), gained)
        half *= 2
    return _uncut(output, tokens), Memory(*(x[:, :, -1] for x in before))


def _cut(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Tokens (B, H, tokens, features) in pieces (B, H, n, size, features), the last one filled up."""
    batch, heads, tokens, features = x.shape
    number = (tokens + size - 1) // size
    return pad(x, (0, 0, 0, number * size - tokens), value=fill).reshape(batch, heads, number, size, features)


def _uncut(x: Tensor, tokens: int) -> Tensor:
    """The first tokens of pieces; a slice would make a compiler ask whether the last piece was full."""
    return pad(x.flatten(2, 3), (0, 0, 0, tokens - x.shape[2] * x.shape[3]))


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Left and right halves (B, H, n, C / 2h, h, features) of the pieces of 2h tokens in each chunk."""
    batch, heads, number, size, features = x.shape
    left, right = x.reshape(batch, heads, number, size // (2 * half), 2, half, features).unbind(dim=4)
    return left, right


def _join_halves(left: Tensor, right: Tensor) -> Tensor:
    return torch.stack((left, right), dim=4).flatten(3, 5)


def _running_mass(b: Tensor) -> Tensor:
    """logsumexp of b over the tokens of a chunk up to each one (torch.logcumsumexp does not differentiate twice)."""
    half = 1
    while half < b.shape[3]:
        left, right = _halves(b, half)
        b = _join_halves(left, log_add(right, left[..., -1:, :].expand_as(right)))
        half *= 2
    return b


def _running_merge(memory: Memory) -> Memory:
    """Memories (B, H, n, ...) merged with all that stand before them, in log2(n) steps."""
    shift = 1
    while shift < memory.mass.shape[2]:
        earlier, later = Memory(*(x[:, :, :-shift] for x in memory)), Memory(*(x[:, :, shift:] for x in memory))
        merged = merge(earlier, later)
        memory = Memory(*(torch.cat((x[:, :, :shift], y), dim=2) for x, y in zip(memory, merged, strict=True)))
        shift *= 2
    return memory


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, block_size: int, is_causal: bool
) -> Iterator[Tensor]:
    """Attention inside blocks, piece by piece."""
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    if tokens < block_size:
        block_size = tokens
    size = max(block_size, moments.CHUNK_TOKENS // block_size * block_size)
    for part, *parts in zip(chunks(tokens, size), *(cut(x, size) for x in (query, key, value)), strict=True):
        kept = None if keep is None else keep[:, part]
        q, k, v = (x.to(accumulator(x.dtype)) for x in parts)
        real = kept_tokens(kept, q)
        q, k, v = (_cut(x, block_size) for x in (q, _repeat(blank(k, kept), groups), _repeat(blank(v, kept), groups)))
        allowed = _cut(real[:, None, :, None], block_size).mT  # (B, 1, n, 1, C)
        if is_causal:
            allowed = allowed & torch.ones(block_size, block_size, dtype=torch.bool, device=q.device).tril()
        scores = (q * query.shape[3] ** -0.5) @ k.mT
        weights = torch.softmax(scores.masked_fill(~allowed, absent(scores.dtype)), dim=-1)
        yield _uncut(weights @ v, real.shape[1])
