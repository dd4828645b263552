"""LLN attention to the tokens that are not near, most of which other processes hold; see `lln.neighbors`.

A process has its own tokens and those of its halo, and needs a state of all others. The states of processes without a
token in its halo are merged by the owners of their rows; those of processes with such tokens come from each of them,
without these tokens. No sum is then the small difference of two large ones.

Backward passes are exchanges in the other direction. Autograd runs them in the same order on all processes, which make
the same exchanges in the same order, also those without a token of their own.

Shapes: P processes, B batch, H heads, N tokens of this process, F features, V value width.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln import neighbors
from lln.backends.torch.summary import KeySummary, attend_summary, mask_value, merge
from lln.distributed.far import summary_of
from lln.distributed.merge import Layout, merge_all, refuse_second_order
from lln.distributed.near import Neighbors
from lln.distributed.ranks import Ranks
from lln.masks import kept_tokens
from lln.problem import Problem, Tokens


def beyond_neighbors(problem: Problem, layout: Layout) -> Tensor:
    """As `lln.neighbors.beyond_neighbors` of whole sequences: the output and the ratio (B, H, N, V + 1).

    The features a and b are the query and the key of the problem, with as many heads as the value.
    """
    near, tokens = Neighbors(problem, layout), problem.query.shape[2]
    around = _Around.apply(near, problem.key, problem.value)  # type: ignore[no-untyped-call]
    keep = near.keep
    if tokens == 0:  # a token of padding, so that the graph has the same exchanges as that of others
        keep = torch.zeros(len(problem.key), 1, dtype=torch.bool, device=problem.key.device)
        query, key, value = (pad(x, (0, 0, 0, 1)) for x in (problem.query, problem.key, problem.value))
        problem = replace(problem, query=query, key=key, value=value, keys=Tokens(keep))
    found, is_far = _of_tokens_here(problem, near, around, keep)
    own = slice(near.halo.left, near.halo.left + problem.query.shape[2])
    here, ln_near, ln_here = (x[:, :, own] for x in (found.output, found.near + found.unit, found.far + found.unit))
    # A feature of -inf is a weight of 0, which a state does not take.
    lowest = mask_value(problem.query.dtype)
    a, b = (x.masked_fill(x == -math.inf, lowest) for x in (problem.query, problem.key))
    memory = _elsewhere(replace(problem, query=a, key=b), near, layout)
    elsewhere = attend_summary(a, a.new_ones(1, 1, 1, 1), memory)
    ln_elsewhere = (a + memory.mass[:, :, None]).logsumexp(dim=3, keepdim=True)
    # Not torch.lerp, which has NaN where one of both is infinite.
    output = here * (ln_here - ln_elsewhere).sigmoid() + elsewhere * (ln_elsewhere - ln_here).sigmoid()
    ratio = torch.logaddexp(ln_here, ln_elsewhere) - ln_near
    kept = torch.tensor([own.stop + near.halo.right]) if keep is None else keep.sum(dim=1).cpu()
    is_far = is_far[:, :, own] | (layout.total(1) > kept).to(output.device)[:, None, None]
    return torch.cat((output, ratio.masked_fill(~is_far[..., None], -math.inf)), dim=3)[:, :, :tokens]


def _of_tokens_here(
    problem: Problem, near: Neighbors, around: Sequence[Tensor], keep: Tensor | None
) -> tuple[neighbors.Beyond, Tensor]:
    """What the own tokens and the halo have beyond the neighbours of each, and for which that is anything."""
    left, right = near.halo.left, near.halo.right
    a = pad(problem.query, (0, 0, left, right))
    b, value = (
        torch.cat((x[:, :, :left], own, x[:, :, left:]), dim=2)
        for x, own in zip(around, (problem.key, problem.value), strict=True)
    )
    options: Any = {"near": near.near, "block_size": near.block_size}
    found = neighbors.sums_beyond_neighbors(a, b, value, keep, **options)
    nothing = a.new_zeros(len(a), 1, a.shape[2])
    return found, neighbors.log_far_mass(nothing, keep, is_causal=False, **options) > -math.inf


def _elsewhere(problem: Problem, near: Neighbors, layout: Layout) -> KeySummary:
    """The state of all tokens that this process has neither itself nor in its halo."""
    own, start, counts = layout.ranks.rank, layout.starts(), layout.tokens[:, 1]
    # [s, r]: process s has tokens in the halo of process r.
    first, last = torch.maximum(near.low, start[:, None]), torch.minimum(near.high, (start + counts)[:, None])
    are_apart = ~torch.eye(len(counts), dtype=torch.bool)
    is_halo = ((last > first) & layout.together & are_apart[..., None]).any(dim=2)
    keep = kept_tokens(problem.keys.keep, problem.key)
    number = start[own].to(keep.device)[:, None] + keep.cumsum(dim=1) - 1  # of a kept token in its sequence

    def state(keep: Tensor) -> Tensor:
        one = problem.key.new_ones(1, 1, 1, 1)
        found = summary_of(problem.query, problem.key, problem.value, one, keep, None)
        return torch.cat((found.mass[..., None], found.values), dim=3)

    def without_halo(rank: int) -> Tensor:
        low, high, together = (
            x.to(keep.device)[:, None] for x in (near.low[rank], near.high[rank], layout.together[own, rank])
        )
        return keep & together & ((number < low) | (number >= high))

    whole = state(keep)
    rows = whole.flatten(0, 2)
    found = _ToOwners.apply(layout, rows)  # type: ignore[no-untyped-call]
    which = layout.together & (are_apart & ~is_halo.T)[..., None]  # [r, s]
    allowed = which[:, :, layout.rows(len(rows)).samples].to(found.device)
    mass, values = merge_all(found[..., 0], found[..., 1:], allowed)
    merged = torch.cat((mass[..., None], values), dim=-1)
    merged = _FromOwners.apply(layout, merged, len(rows))  # type: ignore[no-untyped-call]
    for_others = [whole[None][:0], *(state(without_halo(r))[None] for r in is_halo[own].nonzero()[:, 0].tolist())]
    sizes = is_halo[own].long().tolist(), is_halo[:, own].long().tolist()
    direct = _Direct.apply(layout.ranks, torch.cat([x.flatten(1) for x in for_others]), *sizes)  # type: ignore[no-untyped-call]
    states = torch.cat((merged.view(1, *whole.shape), direct.view(len(direct), *whole.shape)))
    return reduce(merge, [KeySummary(x[..., 0], x[..., 1:]) for x in states.unbind()])


class _Around(torch.autograd.Function):
    """The keys and values of the halo."""

    @staticmethod
    def forward(ctx: Any, near: Neighbors, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.halo, ctx.shapes = near.halo, [x.shape for x in tokens]
        return tuple(near.halo.receive(near.pending, *tokens))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        totals = [x.new_zeros(shape) for x, shape in zip(gradients, ctx.shapes, strict=True)]
        ctx.halo.send_back(gradients, totals)
        return None, *totals


class _ToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor) -> Tensor:
        ctx.layout, ctx.rows = layout, len(x)
        return layout.to_owners(x).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        refuse_second_order()
        return None, ctx.layout.from_owners(gradient, ctx.rows)


class _FromOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, rows: int) -> Tensor:
        ctx.layout = layout
        return layout.from_owners(x, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        refuse_second_order()
        return None, ctx.layout.to_owners(gradient).wait(), None


class _Direct(torch.autograd.Function):
    """Rows for some processes."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, (receive, send)
        return ranks.exchange(x, send, receive, sparse=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        refuse_second_order()
        return None, ctx.ranks.exchange(gradient, *ctx.sizes, sparse=True).wait(), None, None
