"""The weights of the keys that are far from a query, most of which other processes hold; see `lln.neighbors`.

A process has the weights of its own tokens and of those of its halo. Of all other tokens its queries need one number a
head: each process sends every other one the logarithm of the sum over those of its tokens that are not in the halo of
that process. No sum is then the small difference of two large ones.

Shapes: P processes, B batch, H heads, N tokens of this process.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln import neighbors
from lln.distributed.merge import Layout, refuse_second_order
from lln.distributed.near import Halo, Neighbors
from lln.masks import front_order
from lln.precision import in_full_precision, sum_dtype


@in_full_precision
def log_far_mass(weight: Tensor, keep: Tensor | None, near: Neighbors, layout: Layout) -> Tensor:
    """As `lln.neighbors.log_far_mass` of whole sequences, for the tokens (B, H, N) of this process."""
    sums = _sums_for_others(weight, keep, near, layout)
    around, found = _Exchange.apply(near.halo, weight, sums)  # type: ignore[no-untyped-call]
    before, after = torch.split(around, [near.halo.left, near.halo.right], dim=2)
    options: Any = {"near": near.near, "block_size": near.block_size, "is_causal": near.is_causal}
    here = neighbors.log_far_mass(torch.cat((before, weight, after), dim=2), near.keep, **options)
    here = here[:, :, near.halo.left : near.halo.left + weight.shape[2]]
    elsewhere = _log_sum(found)[..., None].to(here.dtype)
    return _log_sum(torch.stack((here, elsewhere.expand_as(here))))


def _sums_for_others(weight: Tensor, keep: Tensor | None, near: Neighbors, layout: Layout) -> Tensor:
    """(P, B, H) ln of the sum over the own tokens in the rows of each process but not in its halo; -inf for none."""
    own, device = layout.ranks.rank, weight.device
    start, count = layout.start(1), layout.tokens[own, 1]
    first, end = (torch.minimum((x - start).clamp(min=0), count).to(device) for x in (near.low, near.high))
    allowed = layout.together[own].clone()
    allowed[own] = False
    x = weight.to(sum_dtype(device))
    if keep is not None:
        order = front_order(keep)[:, None].expand_as(x)
        x = x.masked_fill(~keep[:, None], -math.inf).gather(2, order)
    highest = x.detach().amax(dim=2, keepdim=True) if x.shape[2] else x.new_zeros(*x.shape[:2], 1)
    highest = highest.clamp(min=torch.finfo(x.dtype).min)
    mass = (x - highest).exp()
    total = _take(pad(mass.cumsum(dim=2), (1, 0)), first)
    if not near.is_causal:
        total = total + _take(pad(mass.flip(2).cumsum(dim=2).flip(2), (0, 1)), end)
    is_some = (total > 0) & allowed.T[:, None].to(device)
    logarithm = total.where(is_some, 1.0).log() + highest
    return logarithm.masked_fill(~is_some, -math.inf).permute(2, 0, 1).to(weight.dtype)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """(B, H, P) the entries of x (B, H, N + 1) at places (P, B)."""
    return x.gather(2, places.T[:, None].expand(-1, x.shape[1], -1))


def _log_sum(x: Tensor) -> Tensor:
    """torch.logsumexp over the first dimension, whose gradients are not NaN where all terms are -inf."""
    highest = x.detach().amax(dim=0)
    is_some = highest > -math.inf
    total = (x - highest.where(is_some, 0.0)).exp().sum(dim=0)
    return (total.where(is_some, 1.0).log() + highest).masked_fill(~is_some, -math.inf)


class _Exchange(torch.autograd.Function):
    """The weights (B, H, left + right) of the halo, and what all processes have for this one, (P, B, H)."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, weight: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        ctx.halo, ctx.shape = halo, weight.shape
        pending = halo.send(weight[..., None])
        each = [1] * halo.ranks.size
        found = halo.ranks.exchange(sums, each, each).wait()
        return halo.receive(pending, weight[..., None])[0][..., 0], found

    @staticmethod
    def backward(ctx: Any, d_around: Tensor, d_found: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        halo: Halo = ctx.halo
        each = [1] * halo.ranks.size
        d_sums = halo.ranks.exchange(d_found, each, each).wait()
        d_weight = d_around.new_zeros(*ctx.shape, 1)
        halo.send_back([d_around[..., None]], [d_weight])
        return None, d_weight[..., 0], d_sums
