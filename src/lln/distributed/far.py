"""LLN attention to keys that several processes hold.

Full attention: each process makes the summary (L, S) of its own keys, the summaries are merged, and queries are
answered by the merged one. In the backward pass the gradients of the summary are added up and reach each key.

Causal attention: a process starts from the merged summary of those before it, an exclusive scan. In the backward pass
what later processes have for that summary comes back to the keys in it. With U = S exp(L) and T = exp(L) the summaries
of keys add up, and so do the gradients of U and T; they are sent in units of exp(-L), with which no factor exceeds 1.

Tokens are put into the paper's form some at a time, forward and again backward, see `lln.distributed.pieces`.

Shapes: B batch, H heads, N queries, M keys, D features of a head, V value width.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lln.backends.torch.causal import CAUSAL
from lln.backends.torch.full import key_gradients, query_gradients
from lln.backends.torch.summary import KeySummary, attend_summary, empty_summary, merge, summarize
from lln.distributed.merge import Layout, Merge, refuse_second_order
from lln.distributed.near import Neighbors
from lln.distributed.pieces import Gradients, Inputs, Piece
from lln.masks import zero_nonfinite_padding
from lln.matching.curves import Form
from lln.precision import accumulator
from lln.problem import Problem

OF_KEYS = ("key", "value", "beta", "keep_key", "key_weight")
OF_TOKENS = ("query", "key", "value", "alpha", *OF_KEYS[2:])


def start(problem: Problem, layout: Layout) -> Merge:
    """Summarise the keys of this process, of a problem with alpha, beta and the centres of its form, and send it on."""
    inputs = Inputs.of(problem)
    with torch.no_grad():
        parts = (inputs.keys(part).read(*OF_KEYS) for part in inputs.parts(problem.key.shape[2]))
        own = reduce(merge, (summary_of(problem.query, *tensors) for tensors in parts))
        return Merge(layout, own, is_causal=problem.is_causal)


def summary_of(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, keep: Tensor | None, weight: Tensor | None
) -> KeySummary:
    batch, heads, _, head_dim = query.shape
    if key.shape[2] == 0:
        return empty_summary(batch, heads, head_dim, value.shape[3], like=query)
    return summarize(key, value, beta, keep, weight, heads=heads)


def finish(problem: Problem, merge: Merge, near: Neighbors | None, *, means: Layout | None = None) -> Tensor:
    """The output (B, H, N, V) of the queries of this process, in the dtype of the input.

    Args:
        problem: as given to `start`.
        merge: what `start` returned.
        near: the neighbours, whose output is added; both have the same share.
        means: the centres are the means of the tokens that this layout has, so that gradients flow through them.
    """
    query = zero_nonfinite_padding(problem.query, problem.queries.keep) if problem.query.numel() else problem.query
    inputs = Inputs.of(problem, query)
    attention: Any = _Causal if problem.is_causal else _Full
    output: Tensor = attention.apply(inputs.form, merge, near, means, *inputs.tensors)
    return output


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, form: Form, merge: Merge, near: Neighbors | None, means: Layout | None, *tensors: Tensor | None
    ) -> Tensor:
        ctx.form, ctx.merge, ctx.near, ctx.means = form, merge, near, means
        inputs, (share, beside, halo) = Inputs(form, tensors), _beside(near, tensors)
        memory = merge.finish()
        output = inputs.query.new_empty(*inputs.query.shape[:3], inputs.value.shape[3])
        for part in inputs.parts(inputs.query.shape[2]):
            query, alpha = inputs.queries(part).read("query", "alpha")
            output[:, :, part] = _together(attend_summary(query, alpha, memory), share, beside, part)
        ctx.save_for_backward(*tensors, *halo, *memory)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[4:]  # once: a checkpoint unpacks a tensor only once
        inputs, others = Inputs(ctx.form, saved[: len(needs)]), saved[len(needs) :]
        share, (mass, values) = _share_gradient(ctx.near, gradient, others)
        memory = KeySummary(mass, values)
        found = Gradients(inputs, needs, ctx.means)
        d_memory = KeySummary(torch.zeros_like(mass), torch.zeros_like(values))
        for part in inputs.parts(inputs.query.shape[2]):
            piece = inputs.queries(part, found.wanted)
            query, alpha = piece.read("query", "alpha")
            d_query, d_alpha, more = query_gradients(
                gradient[:, :, part], query, alpha, memory, wants_alpha="alpha" in found.wanted
            )
            _scale(share, d_query, d_alpha, *more)  # not the gradient: that would be one tensor more
            for total, x in zip(d_memory, more, strict=True):
                total += x
            found.add(part, piece.gradients(query=d_query, alpha=d_alpha[..., 0]))
        d_values, shift = ctx.merge.gradients(memory, *d_memory)
        for part in inputs.parts(inputs.key.shape[2]):
            piece = inputs.keys(part, found.wanted)
            found.add(part, piece.gradients(**_of_keys(piece, mass, d_values, shift, found)))
        return None, None, None, None, *found.finish()


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, form: Form, merge: Merge, near: Neighbors | None, means: Layout | None, *tensors: Tensor | None
    ) -> Tensor:
        ctx.form, ctx.merge, ctx.near, ctx.means = form, merge, near, means
        inputs, (share, beside, halo) = Inputs(form, tensors), _beside(near, tensors)
        memory = merge.finish()
        output = inputs.query.new_empty(*inputs.query.shape[:3], inputs.value.shape[3])
        memories: list[Tensor] = [*memory]  # before each part, and after the last
        for part in _parts(inputs):
            (found, *after), _ = CAUSAL.forward(*inputs.tokens(part).read(*OF_TOKENS), *memories[-2:])
            output[:, :, part] = _together(found, share, beside, part)
            memories.extend(after)
        ctx.save_for_backward(*tensors, *halo, *memories)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[4:]  # once: a checkpoint unpacks a tensor only once
        inputs, others = Inputs(ctx.form, saved[: len(needs)]), saved[len(needs) :]
        share, memories = _share_gradient(ctx.near, gradient, others)
        found = Gradients(inputs, needs, ctx.means)
        wanted = (True, True, True, "alpha" in found.wanted, "beta" in found.wanted, False, True, True, True)
        # Of keys in the paper's form, until what later processes have for them has come.
        d_keys = found.totals["key"] if "key" in found.totals else found.new("key")
        d_weights = memories[0].new_zeros(*inputs.query.shape[:2], inputs.key.shape[2])
        d_memory = [torch.zeros_like(x) for x in memories[:2]]  # nothing after the own tokens is known yet
        for i, part in reversed(list(enumerate(_parts(inputs)))):
            piece = inputs.tokens(part, found.wanted & {"query", "center_q"})  # keys below
            gradients = (gradient[:, :, part].to(memories[0].dtype), *d_memory)
            after = tuple(memories[2 * i : 2 * i + 2])
            new: Any = CAUSAL.backward(piece.read(*OF_TOKENS), after, gradients, wanted)
            d_query, d_key, d_value, d_alpha, d_beta, _, d_weight, *d_memory = new
            _scale(share, d_query, d_key, d_value, d_alpha, d_beta, d_weight)
            found.add(part, {"value": d_value, "beta": d_beta[..., 0]})
            found.add(part, piece.gradients(query=d_query, alpha=d_alpha[..., 0]))
            d_keys[:, :, part] = d_key
            if d_weight is not None:
                d_weights[:, :, part] = d_weight
        _scale(share, *d_memory)
        d_values, shift = ctx.merge.gradients(KeySummary(*memories[:2]), *d_memory)
        for part in _parts(inputs):
            piece = inputs.keys(part, found.wanted)
            later = _of_keys(piece, memories[-2], d_values, shift, found)
            later["key"] += d_keys[:, :, part]
            if "key_weight" in later:
                later["key_weight"] += d_weights[:, :, part]
            d_keys[:, :, part] = 0.0
            found.add(part, piece.gradients(**later))
        return None, None, None, None, *found.finish()


def _parts(inputs: Inputs) -> list[slice]:
    """Those of causal attention, of which there are none without tokens."""
    return list(inputs.parts(inputs.query.shape[2])) if inputs.query.shape[2] else []


def _of_keys(piece: Piece, mass: Tensor, d_values: Tensor, shift: Tensor, found: Gradients) -> dict[str, Tensor]:
    """The gradients of keys in the paper's form from those of a memory that they are in."""
    d_key, d_value, d_beta, d_weight = key_gradients(
        *piece.read(*OF_KEYS), mass=mass, d_values=d_values, shift=shift, wants_beta="beta" in found.wanted
    )
    gradients = {"key": d_key, "value": d_value, "beta": d_beta[..., 0]}
    return gradients if d_weight is None else gradients | {"key_weight": d_weight}


def _beside(near: Neighbors | None, tensors: Sequence[Any]) -> tuple[float, Tensor | None, list[Tensor]]:
    """The share of LLN attention, and the output of the neighbours with their halo, while summaries are under way."""
    if near is None:
        return 1.0, None, []
    return near.share, *near.forward(tensors[:3], accumulator(tensors[0].dtype))


def _together(found: Tensor, share: float, beside: Tensor | None, part: slice) -> Tensor:
    found = found.mul_(share)
    return found if beside is None else found.add_(beside[:, :, part])


def _share_gradient(
    near: Neighbors | None, gradient: Tensor, saved: Sequence[Tensor]
) -> tuple[float, Sequence[Tensor]]:
    """Hand the gradient to the neighbours; returns the share of LLN attention, and what is saved beside the halo."""
    if near is None:
        return 1.0, saved
    near.hand(gradient, saved[:2])
    return near.share, saved[2:]


def _scale(share: float, *gradients: Tensor | None) -> None:
    for x in gradients:
        if x is not None and share != 1.0:
            x.mul_(share)
