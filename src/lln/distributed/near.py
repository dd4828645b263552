"""Softmax attention among neighbours of which some belong to other processes: a halo of keys and values.

Blocks and windows count kept tokens, so a process needs the kept tokens from `low` to `high` of each sequence, where
those that it holds itself go from `start` to `stop`:

    blocks   low = the beginning of the block of `start`      high = the end of the block of `stop` (causal: `stop`)
    window   low = start - left                               high = stop + right

What is missing comes from the processes before and after, as many as it takes, and is at most block_size - 1 tokens on
each side. In the backward pass the gradients of the halo go back to the processes that hold its tokens.

Query, key and value pass through `_Tap` on their way to LLN attention. So its backward pass is given the gradients of
that branch, and adds those of the neighbours to them, some tokens at a time: the gradients of both branches side by
side would be more than all else that a process holds.

Shapes: P processes, B batch, H heads, H_k key heads, N tokens of this process, D features, V value width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.backends import choose, near_with_lse
from lln.distributed.merge import Layout, refuse_second_order
from lln.distributed.ranks import Pending, Ranks
from lln.masks import front_order, kept_tokens
from lln.matching.moments import piece_tokens
from lln.precision import accumulator
from lln.problem import Problem, Tokens

LEAST_BLOCKS = 16  # of a piece, or windows side by side: with few, most keys would belong to the pieces around it


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

    def send(self, *tensors: Tensor) -> Pending:
        """Send what others need of tensors (B, heads, N, features), as one (tokens, heads, all features)."""
        rows = [x.detach().transpose(1, 2)[self.send_samples, self.send_places] for x in tensors]
        return self._exchange(torch.cat(rows, dim=-1), self.send_counts, self.receive_counts)

    def receive(self, pending: Pending, *like: Tensor) -> list[Tensor]:
        """What has come, (B, heads, left + right, features) of each tensor, zeros in places without a token."""
        found = pending.wait()
        x = found.new_zeros(*self.kept.shape, *found.shape[1:])
        x[self.receive_samples, self.receive_places] = found
        return list(torch.split(x.transpose(1, 2), [x.shape[3] for x in like], dim=-1))

    def send_back(self, gradients: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
        """Add the gradients of the halos of all processes to those of the tokens."""
        x = torch.cat(list(gradients), dim=-1).transpose(1, 2)[self.receive_samples, self.receive_places]
        found = self._exchange(x, self.receive_counts, self.send_counts).wait()
        for total, part in zip(totals, torch.split(found, [x.shape[3] for x in gradients], dim=-1), strict=True):
            total.transpose(1, 2).index_put_((self.send_samples, self.send_places), part, accumulate=True)

    def _exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Pending:
        return Pending(lambda: x) if self.is_empty else self.ranks.exchange(x, send, receive, sparse=True)


def find_halo(key: Tensor, keep: Tensor | None, layout: Layout, low: Tensor, high: Tensor) -> Halo:
    """The halo of processes that need the tokens from `low` to `high` (P, B) beside their own.

    The processes have each other's numbers of tokens, so nothing is exchanged for that.
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


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)


class Piece(NamedTuple):
    """Some queries and the tokens that they may need, by their places in the halo and the own tokens together."""

    queries: slice
    span: slice
    keep: Tensor | None  # (B, tokens of the span)


class Neighbors:
    """Softmax attention of the tokens of this process to their neighbours. It keeps no tensor of tokens itself."""

    def __init__(self, problem: Problem, layout: Layout, *, share: float = 1.0, with_lse: bool = False) -> None:
        """Send the keys and values that other processes need.

        Args:
            share: a factor of the output.
            with_lse: the output has a feature more, the log-sum-exp of the scores.
        """
        assert problem.near is not None
        self.near, self.block_size, self.is_causal = problem.near, problem.block_size, problem.is_causal
        self.share, self.with_lse = share, with_lse
        start, counts, keep = layout.starts(), layout.tokens[:, 1], problem.keys.keep
        self.low, self.high = (x.where(counts > 0, 0) for x in self._reach(start, start + counts))  # (P, B)
        self.halo = find_halo(problem.key, keep, layout, self.low, self.high)
        self.keep = None  # of the halo and the own tokens together; None: all
        if keep is not None or not bool(self.halo.kept.all()):
            before, after = torch.split(self.halo.kept, [self.halo.left, self.halo.right], dim=1)
            self.keep = torch.cat((before, kept_tokens(keep, problem.key), after), dim=1)
        self.pending = self.halo.send(problem.key, problem.value)
        self.handed: tuple[Tensor, ...] = ()  # from the backward pass of the output to that of the inputs

    def tap(self, problem: Problem) -> tuple[Problem, Tensor]:
        """The problem with inputs whose gradients those of the neighbours will be added to, and what `finish` takes."""
        query, key, value, link = _Tap.apply(  # type: ignore[no-untyped-call]
            self, problem.query, problem.key, problem.value
        )
        return replace(problem, query=query, key=key, value=value), link

    def finish(self, problem: Problem, link: Tensor) -> Tensor:
        """The output (B, H, N, V) in the dtype of the input, for the queries of this process.

        With the log-sum-exp (B, H, N, V + 1) in the accumulator's dtype.
        """
        tokens = (x.detach() for x in (problem.query, problem.key, problem.value))
        output: Tensor = _Near.apply(self, link, *tokens)  # type: ignore[no-untyped-call]
        return output

    def forward(self, tokens: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """The output in a dtype, and the halo of keys and values that the backward pass needs."""
        query, key, value = tokens
        received = self.halo.receive(self.pending, key, value)
        output = query.new_zeros(*query.shape[:3], value.shape[3] + self.with_lse, dtype=dtype)
        rows, left = self.rows(tokens, received), self.halo.left
        for queries, span, keep in self.pieces(query):
            mixed = self.attend([row.read(span) for row in rows], keep)[:, :, _overlap(queries, span, span.start)]
            output[:, :, _overlap(queries, span, left)] = mixed * self.share
        return output, received

    def hand(self, gradient: Tensor, halo: Sequence[Tensor]) -> None:
        """Give the gradient of the output, `share` times which is that of `forward`, to the backward pass of `tap`."""
        self.handed = (gradient, *halo)

    def _reach(self, start: Any, stop: Any) -> tuple[Any, Any]:
        """From which token to which those from `start` to `stop` need keys."""
        size = self.block_size
        if self.near == "window":
            right = 0 if self.is_causal else size // 2
            return start - (size - 1 - right), stop + right
        return start // size * size, stop if self.is_causal else (stop + size - 1) // size * size

    def pieces(self, query: Tensor) -> list[Piece]:
        left, size = self.halo.left, self.block_size
        end = left + query.shape[2]
        tokens = max(LEAST_BLOCKS, piece_tokens(*query.shape[:2], query.shape[3], device=query.device) // size) * size
        starts = range(left // tokens * tokens, end, tokens)
        found = [self._piece(slice(max(x, left), min(x + tokens, end)), end + self.halo.right) for x in starts]
        if sum(x.span.stop - x.span.start for x in found) > 2 * (end + self.halo.right):
            return [self._piece(slice(left, end), end + self.halo.right)]  # few tokens are kept: all need the same ones
        return [x for x in found if x.span.start < x.span.stop]

    def _piece(self, queries: slice, total: int) -> Piece:
        if self.keep is None:
            low, high = self._reach(queries.start, queries.stop)
            return Piece(queries, slice(max(low, 0), min(high, total)), None)
        before = self._kept_before
        first, last = before[:, queries.start], before[:, queries.stop]
        low, high = self._reach(first, last)
        low, high = low.clamp(min=0), torch.minimum(high, before[:, -1]).where(first < last, 0)
        start = (torch.searchsorted(before, low[:, None] + 1)[:, 0] - 1)[low < high]
        stop = torch.searchsorted(before, high[:, None])[:, 0][low < high]
        span = slice(int(start.min()), int(stop.max())) if start.numel() else slice(0, 0)
        number = before[:, span]
        return Piece(queries, span, self.keep[:, span] & (number >= low[:, None]) & (number < high[:, None]))

    @cached_property
    def _kept_before(self) -> Tensor:
        """(B, places + 1) how many tokens are kept before each place."""
        assert self.keep is not None
        return pad(self.keep.cumsum(dim=1), (1, 0))

    def attend(self, tokens: Sequence[Tensor], keep: Tensor | None) -> Tensor:
        query, key, value = tokens
        rest: Any = (self.is_causal, False, self.near, self.block_size, None, None, "variance", "sample")
        problem = Problem(query, key, value, Tokens(keep), Tokens(keep), *rest)
        if not self.with_lse:
            return choose(problem).near(problem)
        output, lse = near_with_lse(problem)
        return torch.cat((output, lse[..., None]), dim=-1)

    def rows(self, tokens: Sequence[Tensor], halo: Sequence[Tensor]) -> list["_Row"]:
        """Queries, keys and values with those of the halo; its queries are zeros."""
        query, sizes = tokens[0], [self.halo.left, self.halo.right]
        nothing = query.new_zeros(1).expand(*query.shape[:2], sum(sizes), query.shape[3])
        return [
            _Row(before, x, after)
            for x, (before, after) in zip(tokens, (torch.split(x, sizes, dim=2) for x in (nothing, *halo)), strict=True)
        ]


class _Row(NamedTuple):
    """Tensors (B, heads, tokens, features) of the halo before the own tokens, of these, and of the halo after them."""

    before: Tensor
    own: Tensor
    after: Tensor

    def read(self, span: slice) -> Tensor:
        """The tokens at some places, copied only if some are of the halo."""
        parts = [x[:, :, place] for x, place in self._parts(span)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def add(self, span: slice, found: Tensor) -> None:
        """Add to the tokens at some places."""
        parts = list(self._parts(span))
        sizes = [place.stop - place.start for _, place in parts]
        for (x, place), part in zip(parts, torch.split(found, sizes, dim=2), strict=True):
            x[:, :, place] += part

    def _parts(self, span: slice) -> Iterator[tuple[Tensor, slice]]:
        first = 0
        for x in self:
            place = slice(max(span.start - first, 0), min(span.stop - first, x.shape[2]))
            if place.start < place.stop:
                yield x, place
            first += x.shape[2]


def _overlap(queries: slice, span: slice, first: int) -> slice:
    """The queries of a piece that are in its span, counted from the place `first`."""
    return slice(max(queries.start, span.start) - first, min(queries.stop, span.stop) - first)


class _Near(torch.autograd.Function):
    """The output, whose gradient is passed to `_Tap` beside the halo."""

    @staticmethod
    def forward(ctx: Any, near: Neighbors, link: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dtype = accumulator(query.dtype) if near.with_lse else query.dtype
        output, received = near.forward((query, key, value), dtype)
        ctx.near = near
        ctx.save_for_backward(*received)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        ctx.near.hand(gradient, ctx.saved_tensors)
        return None, gradient.new_zeros(()), None, None, None


class _Tap(torch.autograd.Function):
    """Query, key and value as they are, and a number on which the output of `_Near` depends.

    Gradients that arrive were made for these three alone, by LLN attention, so they are added to in place.
    """

    @staticmethod
    def forward(ctx: Any, near: Neighbors, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.near = near
        ctx.save_for_backward(*tokens)
        wanted = zip(tokens, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(x for x, is_wanted in wanted if not is_wanted))
        return *tokens, tokens[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        near: Neighbors = ctx.near
        (gradient, *received), near.handed = near.handed, ()
        tokens, halo = ctx.saved_tensors, near.halo
        totals = [_writable(x, found) for x, found in zip(tokens, gradients[:3], strict=True)]
        rows = near.rows(tokens, received)
        of_halo = [torch.zeros_like(x) for x in received]
        of_keys = near.rows(totals, of_halo)[1:]
        for queries, span, keep in near.pieces(tokens[0]):
            with torch.enable_grad():
                inputs = [row.read(span).detach().requires_grad_() for row in rows]
                output = near.attend(inputs, keep)
            own, inside = _overlap(queries, span, halo.left), _overlap(queries, span, span.start)
            slope = torch.zeros_like(output)
            slope[:, :, inside] = gradient[:, :, own]
            d_query, *found = torch.autograd.grad(output, inputs, slope.mul_(near.share))
            totals[0][:, :, own] += d_query[:, :, inside]
            for row, x in zip(of_keys, found, strict=True):
                row.add(span, x)
        halo.send_back(of_halo, totals[1:])
        return None, *(x if is_wanted else None for x, is_wanted in zip(totals, ctx.needs_input_grad[1:], strict=True))


def _writable(x: Tensor, gradient: Tensor | None) -> Tensor:
    """A gradient of x that can be added to, where autograd may have expanded a smaller one."""
    if gradient is None:
        return torch.zeros_like(x)
    return gradient.contiguous() if 0 in gradient.stride() else gradient
