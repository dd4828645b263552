"""Causal LLN attention: every query attends to the memory of what came before and to the keys up to its own.

P_ij is proportional to sum_l exp(a_il + b_jl) over the keys j <= i. To make matrix products of it the exponential has
to be split, exp(a_i + m_i) exp(b_j - m_i), at a reference m_i that keeps both factors from overflowing whatever comes
later in the sequence: the largest b up to token i. With e_j = exp(b_j - m_j) and the decay d_i = exp(m_(i-1) - m_i),

    exp(b_j - m_i) = e_j d_(j+1) ... d_i

is a product of factors that are at most 1. So tokens are joined to blocks, and blocks to blocks of twice the size: the
e_j of a block reach to its end, f_i = exp(a_i + m_i) d_i d_(i-1) ... to its start, and the queries of a right half meet
the keys of the left half in a matrix product f eᵀ. Joining multiplies by a decay and takes no exponential. m and d are
constants to autograd, because they cancel.

Shapes: B batch, H heads, D features of a head, V value width; n chunks of C tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lln.backends.torch.blocks import cut_blocks, join_blocks
from lln.backends.torch.recompute import Attention, Inputs, Tensors
from lln.backends.torch.summary import (
    KeySummary,
    add_scale_gradient,
    join_pieces,
    mask_value,
    may_overwrite,
    minus_infinity,
    repeat_heads,
    scaled_queries,
    scales,
    size_of_pieces,
    sum_groups,
    weighted_keys,
)
from lln.masks import fill_padding
from lln.matching.moments import chunks
from lln.precision import in_full_precision

# Tokens that a causal chunk handles with one matrix product; a power of two.
CAUSAL_CHUNK = 64


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    keep: Tensor | None,
    memory: KeySummary,
    weight: Tensor | None = None,
) -> tuple[Tensor, KeySummary]:
    """LLN attention of every query to the memory and to the kept keys up to its own, and the memory after the last."""
    output, mass, values = CAUSAL(query, key, value, alpha, beta, keep, weight, *memory)
    return output, KeySummary(mass, values)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    keep: Tensor | None,
    weight: Tensor | None,
    mass: Tensor,
    values: Tensor,
) -> tuple[Tensors, Tensors]:
    """Output and memory, and the memories that each piece started from."""
    size = size_of_pieces(query, value, query.shape[1])
    starts: list[Tensor] = []
    memory = KeySummary(mass, values)

    def parts() -> Iterator[Tensor]:
        nonlocal memory
        keys = weighted_keys(key, value, beta, keep, weight, query.shape[1], size)
        for (q, scale), (b, v) in zip(scaled_queries(query, alpha, size), keys, strict=True):
            starts.extend(memory)
            output, memory = _segment(q * scale, b, v, memory)
            yield output

    return (join_pieces(parts(), query, value.shape[3]), *memory), tuple(starts)


def _segment(a: Tensor, b: Tensor, v: Tensor, memory: KeySummary) -> tuple[Tensor, KeySummary]:
    """Causal attention of queries a to keys b and values v and to the memory before them, and the memory after."""
    factors, v = _Factors(a, b, memory), cut_blocks(v, _chunk(a))
    output, total, weight, sums = _attend(factors, v, memory)
    after = KeySummary(factors.highest[:, :, -1] + weight[:, :, -1].log(), sums[:, :, -1] / weight[:, :, -1, :, None])
    return join_blocks(output / total, a.shape[2]), after


def _chunk(a: Tensor) -> int:
    size = 1
    while size < min(a.shape[2], CAUSAL_CHUNK):
        size *= 2
    return size


class _Factors:
    """f, e and the decay (B, H, n, C / size, D) of blocks of some size, at first of one token."""

    def __init__(self, a: Tensor, b: Tensor, memory: KeySummary) -> None:
        self.in_place = may_overwrite(a, b, *memory)
        size = _chunk(a)
        a, b = cut_blocks(a, size), cut_blocks(b, size, mask_value(b.dtype))
        # The largest b up to each token, and before each chunk (and after the last).
        highest, self.highest = _references(b.detach(), memory.mass.detach())
        self.decay = (torch.cat((self.highest[:, :, :-1, None], highest[..., :-1, :]), dim=3) - highest).exp()
        self.e = (b - highest).exp() + minus_infinity(b, -1)
        a = a + highest
        f = (a - a.detach().amax(dim=-1, keepdim=True)).exp()
        self.own = f * self.e  # the weight of a token for itself
        self.f = f * self.decay

    def levels(self) -> Iterator[int]:
        """Half the size of blocks while they are joined, until they are chunks."""
        half = 1
        while half < self.f.shape[3]:
            yield half
            left, right = torch.unflatten(self.decay, 3, (-1, 2)).unbind(dim=4)
            self.f = self._scale(self.f, half, 1, left[..., None, :])
            self.e = self._scale(self.e, half, 0, right[..., None, :])
            self.decay = left * right
            half *= 2

    def _scale(self, x: Tensor, half: int, side: int, factor: Tensor) -> Tensor:
        halves = list(_halves(x, half))
        if self.in_place:
            halves[side].mul_(factor)
            return x
        halves[side] = halves[side] * factor
        return torch.stack(halves, dim=4).flatten(3, 5)


def _attend(factors: _Factors, v: Tensor, memory: KeySummary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of weighted values (B, H, n, C, V) and of weights for each token, and both before each chunk (and after)."""
    total = factors.own.sum(dim=-1, keepdim=True)
    output = total * v
    for half in factors.levels():
        f_right, e_left, v_left = _halves(factors.f, half)[1], _halves(factors.e, half)[0], _halves(v, half)[0]
        weights = _product(f_right, e_left)
        output = _add_right(output, half, _mix(weights, v_left))
        total = _add_right(total, half, weights.sum(dim=-1, keepdim=True))
    f, e = factors.f, factors.e
    first = (memory.mass - memory.mass.detach()).exp()[:, :, None]  # 1, with a gradient
    weight = torch.cat((first, e.sum(dim=3)), dim=2)
    sums = torch.cat((first[..., None] * memory.values[:, :, None], e.mT @ v), dim=2)
    weight, sums = _running_sums(weight, sums, _decay_after(first, factors.decay))
    output = output + f @ sums[:, :, :-1]
    total = total + (f * weight[:, :, :-1, None]).sum(dim=-1, keepdim=True)
    return output, total, weight, sums


def _decay_after(first: Tensor, decay: Tensor) -> Tensor:
    return torch.cat((torch.ones_like(first), decay[..., 0, :]), dim=2)


def _segment_gradients(
    g: Tensor, a: Tensor, b: Tensor, v: Tensor, memory: KeySummary, after: KeySummary
) -> tuple[Tensor, Tensor, Tensor, KeySummary]:
    """The gradients of a, b, v and memory, from those of the output and of the memory after.

    A weight W_ij = f_i . e_j has the gradient (g_i . v_j - g_i . out_i) / total_i, and passes it on to a_i and b_j as a
    factor of f_i * e_j, wherever i and j meet: at themselves, at each level, and through the sums before a chunk.
    """
    tokens, v = a.shape[2], cut_blocks(v, _chunk(a))
    factors, again = _Factors(a, b, memory), _Factors(a, b, memory)
    output, total, weight, sums = _attend(factors, v, memory)
    g = cut_blocks(g, v.shape[3]) / total
    r = (g * output).sum(dim=-1, keepdim=True) / total

    f, e = factors.f, factors.e
    last = weight[:, :, -1, :, None]
    d_sums = torch.cat((f.mT @ g, (after.values / last)[:, :, None]), dim=2)
    mean = sums[:, :, -1] / last
    d_last = (after.mass - (after.values * mean).sum(dim=-1)) / last[..., 0]
    d_weight = torch.cat((-(f * r).sum(dim=3), d_last[:, :, None]), dim=2)
    decay = _decay_after(d_last[:, :, None], factors.decay.flip(2))
    d_weight, d_sums = (x.flip(2) for x in _running_sums(d_weight.flip(2), d_sums.flip(2), decay))
    da = (g @ sums[:, :, :-1].mT).addcmul_(r, weight[:, :, :-1, None], value=-1).mul_(f)
    dv = e @ d_sums[:, :, 1:]
    db = (v @ d_sums[:, :, 1:].mT).add_(d_weight[:, :, 1:, None]).mul_(e)
    start = KeySummary((d_sums[:, :, 0] * memory.values).sum(dim=-1) + d_weight[:, :, 0], d_sums[:, :, 0])

    own = again.own
    dv.addcmul_(own.sum(dim=-1, keepdim=True), g)
    own.mul_((g * v).sum(dim=-1, keepdim=True) - r)
    da, db = da.add_(own), db.add_(own)
    for half in again.levels():
        f_right, g_right, r_right, da_right = (_halves(x, half)[1] for x in (again.f, g, r, da))
        e_left, v_left, db_left, dv_left = (_halves(x, half)[0] for x in (again.e, v, db, dv))
        dv_left += _mix(_product(f_right, e_left).mT, g_right)
        d_weights = _product(g_right, v_left).sub_(r_right)
        da_right.addcmul_(_mix(d_weights, e_left), f_right)
        db_left.addcmul_(_mix(d_weights.mT, f_right), e_left)
    da, db, dv = (x.flatten(2, 3)[:, :, :tokens] for x in (da, db, dv))
    return da, db, dv, start


def _references(b: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of b and the mass up to each token (B, H, n, C, D), and before each chunk and after the last one."""
    highest = b.clone()
    half = 1
    while half < b.shape[3]:
        left, right = _halves(highest, half)
        right.copy_(torch.maximum(right, left[..., -1:, :]))
        half *= 2
    before = torch.cat((mass[:, :, None], highest[..., -1, :]), dim=2)
    shift = 1
    while shift < before.shape[2]:
        before = torch.cat((before[:, :, :shift], torch.maximum(before[:, :, shift:], before[:, :, :-shift])), dim=2)
        shift *= 2
    return torch.maximum(highest, before[:, :, :-1, None]), before


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Left and right halves (B, H, n, C / 2h, h, features) of the blocks of 2h tokens in each chunk."""
    left, right = torch.unflatten(x, 3, (-1, 2, half)).unbind(dim=4)
    return left, right


def _add_right(x: Tensor, half: int, gained: Tensor) -> Tensor:
    """`x` with `gained` added to the right halves of its blocks."""
    left, right = _halves(x, half)
    if not may_overwrite(x, gained):
        return torch.stack((left, right + gained), dim=4).flatten(3, 5)
    right += gained
    return x


def _product(f: Tensor, e: Tensor) -> Tensor:
    """f eᵀ; matrices of one or two rows are multiplied one entry at a time, which is quicker."""
    return f @ e.mT if f.shape[-2] > 2 else (f[..., :, None, :] * e[..., None, :, :]).sum(dim=-1)


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v if v.shape[-2] > 2 else (weights[..., None] * v[..., None, :, :]).sum(dim=-2)


def _running_sums(weight: Tensor, sums: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (B, H, n, D) and sums (B, H, n, D, V), to each of which all before it are added, decayed."""
    shift = 1
    while shift < weight.shape[2]:
        later = decay[:, :, shift:]
        weight = torch.cat((weight[:, :, :shift], weight[:, :, shift:] + weight[:, :, :-shift] * later), dim=2)
        sums = torch.cat((sums[:, :, :shift], sums[:, :, shift:] + sums[:, :, :-shift] * later[..., None]), dim=2)
        decay = torch.cat((decay[:, :, :shift], decay[:, :, :-shift] * later), dim=2)
        shift *= 2
    return weight, sums


@in_full_precision
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    keep: Tensor | None,
    weight: Tensor | None,
    *,
    starts: Tensors,
    after: KeySummary,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, alpha, beta, weight and memory, piece by piece from the last to the first."""
    heads, tokens = query.shape[1], query.shape[2]
    groups, size = heads // key.shape[1], size_of_pieces(query, value, query.shape[1])
    d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
    d_alpha, d_beta = (torch.zeros_like(x) for x in (alpha, beta))
    d_weight = None if weight is None else torch.empty_like(weight)
    alphas, betas = list(scales(alpha, query, size)), list(scales(beta, key, size))
    for i, part in reversed(list(enumerate(chunks(tokens, size)))):
        memory = KeySummary(*starts[2 * i : 2 * i + 2])
        kept = None if keep is None else keep[:, part]
        ((q, scale),) = scaled_queries(query[:, :, part], alphas[i], tokens)
        own = None if weight is None else weight[:, :, part]
        ((b, v),) = weighted_keys(key[:, :, part], value[:, :, part], betas[i], kept, own, heads, tokens)
        da, db, dv, after = _segment_gradients(gradient[:, :, part].to(v.dtype), q * scale, b, v, memory, after)
        db = fill_padding(db, kept)
        if wanted[3]:
            add_scale_gradient(d_alpha, da, q, part, tokens)
        if wanted[4]:
            k = fill_padding(key[:, :, part].to(db.dtype), kept)
            add_scale_gradient(d_beta, db, repeat_heads(k, groups), part, tokens)
        if d_weight is not None:
            d_weight[:, :, part] = db.sum(dim=-1)
        d_query[:, :, part] = da * scale
        d_key[:, :, part] = sum_groups(db * betas[i], groups)
        d_value[:, :, part] = sum_groups(fill_padding(dv, kept), groups)
    return d_query, d_key, d_value, d_alpha, d_beta, d_weight, *after


def _backward(inputs: Inputs, others: Tensors, gradients: Tensors, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    after = KeySummary(*gradients[1:])
    found = list(_gradients(gradients[0], *inputs[:7], starts=others, after=after, wanted=wanted))
    found.insert(5, None)  # of `keep`
    return found


CAUSAL = Attention(
    traced=lambda *inputs: _forward(*inputs)[0], forward=_forward, backward=_backward, is_causal=True, has_scales=True
)
