"""LLN attention to keys that several processes hold.

Full attention: each process makes the summary (L, S) of its own keys, the summaries are merged, and queries are
answered by the merged one. In the backward pass the gradients of the summary are added up and reach each key.

Causal attention: a process starts from the merged summary of those before it, an exclusive scan. In the backward pass
what later processes have for that summary comes back to the keys in it. With U = S exp(L) and T = exp(L) the summaries
of keys add up, and so do the gradients of U and T; they are sent in units of exp(-L), with which no factor exceeds 1.

Shapes: B batch, H heads, N queries, M keys, D features of a head, V value width.
"""

from typing import Any

import torch
from torch import Tensor

from lln.backends.torch.causal import CAUSAL
from lln.backends.torch.full import key_gradients, query_gradients
from lln.backends.torch.summary import KeySummary, attend_summary, empty_summary, size_of_pieces, summarize
from lln.distributed.merge import Layout, Merge, refuse_second_order
from lln.masks import zero_nonfinite_padding
from lln.matching.moments import chunks
from lln.problem import Problem


def start(problem: Problem, layout: Layout) -> Merge:
    """Summarise the keys of this process, of a problem in the paper's form with alpha and beta, and send it on."""
    assert problem.beta is not None
    with torch.no_grad():
        beta = problem.beta[..., None]
        own = summary_of(problem.query, problem.key, problem.value, beta, problem.keys.keep, problem.key_weight)
        return Merge(layout, own, is_causal=problem.is_causal)


def summary_of(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, keep: Tensor | None, weight: Tensor | None
) -> KeySummary:
    batch, heads, _, head_dim = query.shape
    if key.shape[2] == 0:
        return empty_summary(batch, heads, head_dim, value.shape[3], like=query)
    return summarize(key, value, beta, keep, weight, heads=heads)


def finish(problem: Problem, merge: Merge, *, share: float) -> Tensor:
    """The output (B, H, N, V) of the queries of this process, in the accumulator's dtype, times `share`."""
    assert problem.alpha is not None
    assert problem.beta is not None
    query = zero_nonfinite_padding(problem.query, problem.queries.keep) if problem.query.numel() else problem.query
    attention: Any = _Causal if problem.is_causal else _Full
    scales = (problem.alpha[..., None], problem.beta[..., None])
    tokens = (query, problem.key, problem.value, *scales, problem.keys.keep, problem.key_weight)
    output: Tensor = attention.apply(merge, share, *tokens)
    return output


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        merge: Merge,
        share: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor,
        beta: Tensor,
        keep: Tensor | None,
        weight: Tensor | None,
    ) -> Tensor:
        memory = merge.finish()
        ctx.merge, ctx.share = merge, share
        ctx.save_for_backward(query, key, value, alpha, beta, keep, weight, *memory)
        return attend_summary(query, alpha, memory).mul_(share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        query, key, value, alpha, beta, keep, weight, *rest = ctx.saved_tensors
        memory, wanted = KeySummary(*rest), ctx.needs_input_grad[2:]
        d_query, d_alpha, found = query_gradients(gradient, query, alpha, memory, wants_alpha=wanted[3])
        _scale(ctx.share, d_query, d_alpha, *found)  # not the gradient: that would be one tensor more
        d_values, shift = ctx.merge.gradients(memory, *found)
        d_key, d_value, d_beta, d_weight = key_gradients(
            key,
            value,
            beta,
            keep,
            weight,
            mass=memory.mass,
            d_values=d_values,
            shift=shift,
            wants_beta=wanted[4],
        )
        found_all = (d_query, d_key, d_value, d_alpha, d_beta, None, d_weight)
        return None, None, *(x if is_wanted else None for x, is_wanted in zip(found_all, wanted, strict=True))


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        merge: Merge,
        share: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor,
        beta: Tensor,
        keep: Tensor | None,
        weight: Tensor | None,
    ) -> Tensor:
        before = merge.finish()
        ctx.merge, ctx.share, ctx.is_empty = merge, share, query.shape[2] == 0
        inputs = (query, key, value, alpha, beta, keep, weight, *before)
        if ctx.is_empty:
            ctx.save_for_backward(*inputs)
            return query.new_zeros(*query.shape[:3], value.shape[3], dtype=before.mass.dtype)
        (output, mass, _), starts = CAUSAL.forward(*inputs)
        ctx.save_for_backward(*inputs, mass, *starts)
        return output.mul_(share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]  # once: a checkpoint unpacks a tensor only once
        inputs = saved[:9]
        _, key, value, _, beta, keep, weight, *before = inputs
        memory = KeySummary(*before)
        zeros = KeySummary(torch.zeros_like(memory.mass), torch.zeros_like(memory.values))
        if ctx.is_empty:
            ctx.merge.gradients(memory, *zeros)
            found = [None if x is None else torch.zeros_like(x) for x in inputs[:7]]
            found[5] = None
            return None, None, *(x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True))
        mass, *starts = saved[9:]
        gradients = (gradient, *zeros)  # nothing after the own tokens is known yet
        d_query, d_key, d_value, d_alpha, d_beta, _, d_weight, *d_before = CAUSAL.backward(
            inputs, tuple(starts), gradients, (*wanted, True, True)
        )
        _scale(ctx.share, d_query, d_key, d_value, d_alpha, d_beta, d_weight, *d_before)
        d_values, shift = ctx.merge.gradients(memory, *d_before)
        options: Any = {"mass": mass, "d_values": d_values, "shift": shift, "wants_beta": wanted[4]}
        tokens = key.shape[2]
        for part in chunks(tokens, size_of_pieces(key, value, mass.shape[1])):
            kept = None if keep is None else keep[:, part]
            own, of_value, scale, log_weight = (_part(x, part, tokens) for x in (key, value, beta, weight))
            later = key_gradients(own, of_value, scale, kept, log_weight, **options)
            for x, more in zip((d_key, d_value, d_beta, d_weight), later, strict=True):
                if x is not None and more is not None:
                    _part(x, part, tokens).add_(more)
        found_all = (d_query, d_key, d_value, d_alpha, d_beta, None, d_weight)
        return None, None, *(x if is_wanted else None for x, is_wanted in zip(found_all, wanted, strict=True))


def _scale(share: float, *gradients: Tensor | None) -> None:
    for x in gradients:
        if x is not None and share != 1.0:
            x.mul_(share)


def _part(x: Any, part: slice, tokens: int) -> Any:
    """Some tokens of x (B, H, tokens, ...); the whole of a scale that all tokens share."""
    return x if x is None or x.shape[2] != tokens else x[:, :, part]
