"""LLN attention to keys that several processes hold.

Full attention: each process makes the summary (L, S) of its own keys, the summaries are merged, and queries are
answered by the merged one. In the backward pass the gradients of the summary are added up and reach each key.

Causal attention: a process starts from the merged summary of those before it, an exclusive scan. In the backward pass
what later processes have for that summary comes back to the keys in it. With U = S exp(L) and T = exp(L) the summaries
of keys add up, and so do the gradients of U and T; they are sent in units of exp(-L), with which no factor exceeds 1.

Tokens are put into the paper's form some at a time, forward and again backward, see `lln.distributed.pieces`.

Shapes: B batch, H heads, N queries, M keys, D features of a head, V value width.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lln.backends.torch.causal import CAUSAL
from lln.backends.torch.full import key_gradients, query_gradients
from lln.backends.torch.summary import KeySummary, attend_summary, empty_summary, merge, summarize
from lln.distributed.merge import Layout, Merge, refuse_second_order
from lln.distributed.pieces import Gradients, Inputs, Piece
from lln.masks import zero_nonfinite_padding
from lln.matching.curves import Form
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


def finish(problem: Problem, merge: Merge, *, share: float, means: Layout | None = None) -> Tensor:
    """The output (B, H, N, V) of the queries of this process, in the accumulator's dtype, times `share`.

    Args:
        problem: as given to `start`.
        merge: what `start` returned.
        share: a factor of the output.
        means: the centres are the means of the tokens that this layout has, so that gradients flow through them.
    """
    query = zero_nonfinite_padding(problem.query, problem.queries.keep) if problem.query.numel() else problem.query
    inputs = Inputs.of(problem, query)
    attention: Any = _Causal if problem.is_causal else _Full
    output: Tensor = attention.apply(inputs.form, merge, share, means, *inputs.tensors)
    return output


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, form: Form, merge: Merge, share: float, means: Layout | None, *tensors: Tensor | None
    ) -> Tensor:
        inputs, memory = Inputs(form, tensors), merge.finish()
        ctx.form, ctx.merge, ctx.share, ctx.means = form, merge, share, means
        ctx.save_for_backward(*tensors, *memory)
        output = memory.values.new_empty(*inputs.query.shape[:3], inputs.value.shape[3])
        for part in inputs.parts(inputs.query.shape[2]):
            query, alpha = inputs.queries(part).read("query", "alpha")
            output[:, :, part] = attend_summary(query, alpha, memory)
        return output.mul_(share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        *tensors, mass, values = ctx.saved_tensors
        inputs, memory = Inputs(ctx.form, tensors), KeySummary(mass, values)
        found = Gradients(inputs, ctx.needs_input_grad[4:], ctx.means)
        d_memory = KeySummary(torch.zeros_like(mass), torch.zeros_like(values))
        for part in inputs.parts(inputs.query.shape[2]):
            piece = inputs.queries(part, found.wanted)
            query, alpha = piece.read("query", "alpha")
            d_query, d_alpha, more = query_gradients(
                gradient[:, :, part], query, alpha, memory, wants_alpha="alpha" in found.wanted
            )
            _scale(ctx.share, d_query, d_alpha, *more)  # not the gradient: that would be one tensor more
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
        ctx: Any, form: Form, merge: Merge, share: float, means: Layout | None, *tensors: Tensor | None
    ) -> Tensor:
        inputs, memory = Inputs(form, tensors), merge.finish()
        ctx.form, ctx.merge, ctx.share, ctx.means = form, merge, share, means
        output = memory.values.new_empty(*inputs.query.shape[:3], inputs.value.shape[3])
        memories: list[Tensor] = [*memory]  # before each part, and after the last
        for part in _parts(inputs):
            (output[:, :, part], *after), _ = CAUSAL.forward(*inputs.tokens(part).read(*OF_TOKENS), *memories[-2:])
            memories.extend(after)
        ctx.save_for_backward(*tensors, *memories)
        return output.mul_(share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[4:]  # once: a checkpoint unpacks a tensor only once
        inputs, memories = Inputs(ctx.form, saved[: len(needs)]), saved[len(needs) :]
        found = Gradients(inputs, needs, ctx.means)
        wanted = (True, True, True, "alpha" in found.wanted, "beta" in found.wanted, False, True, True, True)
        # Of keys in the paper's form, until what later processes have for them has come.
        d_keys = found.totals["key"] if "key" in found.totals else found.new("key")
        d_weights = memories[0].new_zeros(*inputs.query.shape[:2], inputs.key.shape[2])
        d_memory = [torch.zeros_like(x) for x in memories[:2]]  # nothing after the own tokens is known yet
        for i, part in reversed(list(enumerate(_parts(inputs)))):
            piece = inputs.tokens(part, found.wanted & {"query", "center_q"})  # keys below
            gradients = (gradient[:, :, part], *d_memory)
            new: Any = CAUSAL.backward(piece.read(*OF_TOKENS), memories[2 * i : 2 * i + 2], gradients, wanted)
            d_query, d_key, d_value, d_alpha, d_beta, _, d_weight, *d_memory = new
            _scale(ctx.share, d_query, d_key, d_value, d_alpha, d_beta, d_weight)
            found.add(part, {"value": d_value, "beta": d_beta[..., 0]})
            found.add(part, piece.gradients(query=d_query, alpha=d_alpha[..., 0]))
            d_keys[:, :, part] = d_key
            if d_weight is not None:
                d_weights[:, :, part] = d_weight
        _scale(ctx.share, *d_memory)
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


def _scale(share: float, *gradients: Tensor | None) -> None:
    for x in gradients:
        if x is not None and share != 1.0:
            x.mul_(share)
