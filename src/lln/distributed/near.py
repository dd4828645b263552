"""Softmax attention among neighbours of which some belong to other processes: a halo of keys and values.

Blocks and windows count kept tokens, so a process needs the kept tokens from `low` to `high` of each sequence, where
those that it holds itself go from `start` to `stop`:

    blocks   low = the beginning of the block of `start`      high = the end of the block of `stop` (causal: `stop`)
    window   low = start - left                               high = stop + right

What is missing comes from the processes before and after, as many as it takes, and is at most block_size - 1 tokens on
each side. In the backward pass the gradients of the halo go back to the processes that hold its tokens.

Shapes: P processes, B batch, H heads, H_k key heads, N tokens of this process, D features, V value width.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lln.backends import choose
from lln.distributed.merge import Layout, refuse_second_order
from lln.distributed.ranks import Pending, Ranks
from lln.masks import front_order, kept_tokens
from lln.problem import Problem, Tokens


@dataclass(frozen=True)
class Halo:
    """Which tokens go where. Indices are of samples and of places in the tokens of this process, or in the halo."""

    ranks: Ranks
    send_counts: list[int]
    send_samples: Tensor  # (sent tokens,)
    send_places: Tensor
    receive_counts: list[int]
    receive_samples: Tensor  # (received tokens,)
    receive_places: Tensor
    left: int  # places of the halo before the own tokens
    right: int
    kept: Tensor  # (B, left + right) which places of the halo hold a token
    is_empty: bool  # on all processes, so that there is nothing to exchange


def find_halo(key: Tensor, keep: Tensor | None, layout: Layout, low: Tensor, high: Tensor) -> Halo:
    """The halo of processes that need the tokens from `low` to `high` (P, B) beside their own.

    The processes know each other's numbers of tokens, so they need not ask.
    """
    counts, start = layout.tokens[:, 1], layout.starts()
    stop = start + counts
    own, size = layout.ranks.rank, layout.ranks.size
    together = layout.together & ~torch.eye(size, dtype=torch.bool)[..., None]
    # [s, r, b]: from which to which token of sample b process s sends to process r.
    first = torch.maximum(low, start[:, None])
    last = torch.minimum(high, stop[:, None])
    number = (last - first).clamp(min=0) * (together & (counts > 0))
    device = key.device
    order = front_order(kept_tokens(keep, key)).cpu()
    send_samples, send_places = [], []
    for r, b in number[own].nonzero().tolist():
        begin = int(first[own, r, b] - start[own, b])
        send_places.append(order[b, begin : begin + int(number[own, r, b])])
        send_samples.append(torch.full_like(send_places[-1], b))
    is_left = torch.arange(size) < own
    before, after = number[is_left, own].sum(dim=0), number[~is_left, own].sum(dim=0)
    left, right = (int(x.max()) if x.numel() else 0 for x in (before, after))
    receive_samples, receive_places = [], []
    place = {False: torch.zeros_like(before), True: torch.full_like(before, left)}
    for s, b in number[:, own].nonzero().tolist():
        tokens, next_place = int(number[s, own, b]), place[s > own]
        begin = int(next_place[b])
        receive_places.append(torch.arange(begin, begin + tokens))
        receive_samples.append(torch.full((tokens,), b))
        next_place[b] += tokens
    slots = torch.arange(left + right)
    kept = torch.where(slots < left, slots < before[:, None], slots - left < after[:, None])
    return Halo(
        layout.ranks,
        number[own].sum(dim=1).tolist(),
        _joined(send_samples, device),
        _joined(send_places, device),
        number[:, own].sum(dim=1).tolist(),
        _joined(receive_samples, device),
        _joined(receive_places, device),
        left,
        right,
        kept.to(device),
        not bool(number.any()),
    )


def _reach(problem: Problem, layout: Layout) -> tuple[Tensor, Tensor]:
    """From which token to which each process needs keys, (P, B)."""
    start, size = layout.starts(), problem.block_size
    stop = start + layout.tokens[:, 1]
    if problem.near == "window":
        right = 0 if problem.is_causal else size // 2
        return start - (size - 1 - right), stop + right
    return start // size * size, stop if problem.is_causal else (stop + size - 1) // size * size


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)


def exchange(problem: Problem, layout: Layout) -> tuple[Halo, Pending]:
    """Send the keys and values that other processes need."""
    halo = find_halo(problem.key, problem.keys.keep, layout, *_reach(problem, layout))
    return halo, send(halo, problem.key, problem.value)


def send(halo: Halo, key: Tensor, value: Tensor) -> Pending:
    if halo.is_empty:
        nothing = key.new_empty(0, key.shape[1], key.shape[3] + value.shape[3])
        return Pending(lambda: nothing)
    tokens = [x.detach().transpose(1, 2)[halo.send_samples, halo.send_places] for x in (key, value)]
    return halo.ranks.exchange(torch.cat(tokens, dim=-1), halo.send_counts, halo.receive_counts)


class _Halo(torch.autograd.Function):
    """Keys (B, H_k, left + right, D) and values of the halo, zeros in places without a token."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, pending: Pending, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found = pending.wait()
        ctx.halo, ctx.shapes = halo, (key.shape, value.shape)
        batch, heads, _, width = key.shape
        joined = found.new_zeros(batch, halo.left + halo.right, heads, width + value.shape[3])
        joined[halo.receive_samples, halo.receive_places] = found
        k, v = torch.split(joined.transpose(1, 2), [width, value.shape[3]], dim=-1)
        return k.contiguous(), v.contiguous()

    @staticmethod
    def backward(ctx: Any, d_key: Tensor, d_value: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        halo: Halo = ctx.halo
        both = torch.cat((d_key, d_value), dim=-1).transpose(1, 2)[halo.receive_samples, halo.receive_places]
        found = halo.ranks.exchange(both, halo.receive_counts, halo.send_counts).wait()
        gradients = []
        for shape, part in zip(ctx.shapes, torch.split(found, [x[3] for x in ctx.shapes], dim=-1), strict=True):
            total = part.new_zeros(shape[0], shape[2], shape[1], shape[3])
            total.index_put_((halo.send_samples, halo.send_places), part, accumulate=True)
            gradients.append(total.transpose(1, 2))
        return None, None, *gradients


def finish(problem: Problem, halo: Halo, pending: Pending) -> Tensor:
    """Softmax attention of the tokens of this process to their neighbours, (B, H, N, V)."""
    query, tokens = problem.query, problem.query.shape[2]
    received: tuple[Tensor, ...] = ()
    if not halo.is_empty:
        received = _Halo.apply(halo, pending, problem.key, problem.value)  # type: ignore[no-untyped-call]
    if halo.left + halo.right:
        parts = [halo.left, halo.right]
        k, v = (
            torch.cat((before, x, after), dim=2)
            for x, (before, after) in zip(
                (problem.key, problem.value), (torch.split(x, parts, dim=2) for x in received), strict=True
            )
        )
        nothing = [query.new_zeros(*query.shape[:2], n, query.shape[3]) for n in parts]
        query = torch.cat((nothing[0], query, nothing[1]), dim=2)
        before, after = torch.split(halo.kept, parts, dim=1)
        keep = torch.cat((before, kept_tokens(problem.keys.keep, problem.key), after), dim=1)
        problem = replace(problem, query=query, key=k, value=v, queries=Tokens(keep), keys=Tokens(keep))
    problem = replace(problem, far=False, alpha=None, beta=None, key_weight=None, centers=None, form="paper")
    if tokens == 0:  # with the halo in the graph: its backward pass is a collective
        empty = query.new_zeros(*query.shape[:2], 0, problem.value.shape[3])
        return empty + _nothing(problem.query, problem.key, problem.value, *received)
    output: Tensor = choose(problem).near(problem)[:, :, halo.left : halo.left + tokens]
    return output + _nothing(*received) if received and not halo.left + halo.right else output


def _nothing(*tensors: Tensor) -> Tensor:
    """A zero that depends on tensors: so that their backward pass runs, in which other processes take part."""
    return torch.stack([x[..., :0].sum() for x in tensors]).sum()
