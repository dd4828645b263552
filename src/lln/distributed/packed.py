"""Packed sequences in a row of which every process holds a part.

Sequences that one process holds entirely are computed by it alone. Of the others, those that lie across borders, a
process holds parts of at most two: one that began before it and one that goes on after it. In the order of the row,
sequences across borders take turns in two samples of a batch, so that no process has two parts in one sample; each
sample holds a chain of sequences, identified by the processes that hold them (`Layout.segments`).

Shapes: P processes, H heads, L tokens of the longest part, D features, V value width.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.distributed.ranks import Ranks
from lln.functional import attend as attend_here
from lln.neighbors import beyond_neighbors, near_with_mass_ratio
from lln.packed import INTEGERS
from lln.problem import Problem, Tokens


def check_packed(problem: Problem, cu_seqlens: Any, lengths: Tensor | None, given: dict[str, Any]) -> None:
    """Refuse what does not go with packed sequences; whether they fit the tokens needs those of all processes."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in INTEGERS or cu_seqlens.dim() != 1:
        what = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens)
        raise TypeError(f"cu_seqlens must be an int32 tensor (sequences + 1,), got {what}")
    for name in ("key_padding_mask", "query_padding_mask"):
        if given.get(name) is not None or (name == "key_padding_mask" and lengths is not None):
            raise ValueError(f"cu_seqlens gives the ends of sequences, so there is no padding; leave {name} out")
    if given.get("scope") == "batch":
        raise ValueError('scope="batch" takes statistics over all sequences; with cu_seqlens use scope="sample"')
    batch, _, tokens, _ = problem.query.shape
    if batch != 1:
        raise ValueError(f"cu_seqlens is for a batch of 1 that holds all sequences, got a batch of {batch}")
    if tokens != problem.key.shape[2]:
        raise ValueError("cu_seqlens needs as many queries as keys; for cross attention pad the sequences")


class Part(NamedTuple):
    """A part of a sequence that lies across a border."""

    sequence: int  # its number among those
    start: int  # its tokens in the row of this process
    stop: int


def attend_packed(
    attend: Callable[..., Tensor],
    problem: Problem,
    ranks: Ranks,
    tokens: list[int],
    starts: list[int],
    given: dict[str, Any],
    *,
    kind: str = "attention",
) -> Tensor:
    """The attention of each sequence to itself, (1, H, N, V) for the tokens of this process.

    Args:
        attend: attention of the parts of a batch, with `segments`.
        problem: the row of this process.
        tokens: the number of tokens of every process.
        starts: where sequences start in the whole row, and where the last ends.
        given: the options of the call.
        kind: of attention, see `lln.distributed.core.attend`.
    """
    total = sum(tokens)
    if not starts or starts[0] != 0 or starts[-1] != total or any(x > y for x, y in pairwise(starts)):
        raise ValueError(f"cu_seqlens must rise from 0 to the {total} tokens of all processes, got {starts}")
    parts = find_parts(tokens, starts)
    own, number = parts[ranks.rank], tokens[ranks.rank]
    begin = own[0].stop if own and own[0].start == 0 else 0
    end = own[-1].start if own and own[-1].stop == number and own[-1].start >= begin else number
    if len(own) == 1 and own[0] == (own[0].sequence, 0, number):
        end = begin
    outputs = []
    if any(parts):
        samples = 2 if max(map(len, parts)) > 1 else 1
        across = _stacked(problem, own, samples)
        segments = torch.full((ranks.size, samples), -1)
        for rank, found in enumerate(parts):
            for part in found:
                segments[rank, part.sequence % samples] = part.sequence
        joint = attend(across, ranks, segments, kind=kind)
        outputs = [joint[x.sequence % samples, :, : x.stop - x.start].unsqueeze(0) for x in own]
        if not own:  # its backward pass is one of all processes
            outputs = [joint[:1, :, :0]]
    if begin < end:
        first = sum(tokens[: ranks.rank])
        inside = [x - first - begin for x in starts if first + begin <= x <= first + end]
        outputs.insert(1 if own and own[0].start == 0 else 0, _inside(problem, given, begin, end, inside, kind))
    return torch.cat(outputs, dim=2) if outputs else pad(problem.output_of_nothing(), (0, int(kind != "attention")))


def find_parts(tokens: list[int], starts: list[int]) -> list[list[Part]]:
    """For every process the parts that it holds of sequences that lie across borders, in order."""
    edges = [0, *accumulate(tokens)]
    parts: list[list[Part]] = [[] for _ in tokens]
    number = 0
    for start, stop in pairwise(starts):
        holders = [
            (rank, max(start, low) - low, min(stop, high) - low)
            for rank, (low, high) in enumerate(pairwise(edges))
            if max(start, low) < min(stop, high)
        ]
        if len(holders) > 1:
            for rank, low, high in holders:
                parts[rank].append(Part(number, low, high))
            number += 1
    return parts


def _stacked(problem: Problem, own: list[Part], samples: int) -> Problem:
    """The parts of this process as samples of a batch, padded; a sample without a part is all padding."""
    tokens, longest = problem.query.shape[2], max((x.stop - x.start for x in own), default=0)
    places = {x.sequence % samples: x for x in own}
    chosen = [places.get(sample, Part(-1, 0, 0)) for sample in range(samples)]

    def stack(x: Tensor, fill: float = 0.0) -> Tensor:
        """The parts of x (1, heads, tokens, ...), (samples, heads, L, ...)."""
        rows = []
        for part in chosen:
            more = x.new_full((1, x.shape[1], longest - (part.stop - part.start), *x.shape[3:]), fill)
            rows.append(torch.cat((x[:, :, part.start : part.stop], more), dim=2))
        return torch.cat(rows)

    def scale(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[2] != tokens else stack(x.expand(1, *x.shape[1:]), 1.0)

    lengths = torch.tensor([x.stop - x.start for x in chosen], device=problem.query.device)
    keep = Tokens(torch.arange(longest, device=lengths.device) < lengths[:, None])
    return replace(
        problem,
        query=stack(problem.query),
        key=stack(problem.key),
        value=stack(problem.value),
        queries=keep,
        keys=keep,
        alpha=scale(problem.alpha),
        beta=scale(problem.beta),
        key_weight=None if problem.key_weight is None else stack(problem.key_weight),
    )


def _inside(problem: Problem, given: dict[str, Any], begin: int, end: int, starts: list[int], kind: str) -> Tensor:
    """The sequences that this process holds entirely, from token `begin` to `end`."""
    options = dict(given)
    for name in ("alpha", "beta", "key_weight"):
        x = options.get(name)
        if isinstance(x, Tensor) and x.dim() == 3 and x.shape[2] == problem.query.shape[2]:
            options[name] = x[:, :, begin:end]
    query, key, value = (x[:, :, begin:end] for x in (problem.query, problem.key, problem.value))
    options |= {"near": problem.near, "cu_seqlens": torch.tensor(starts, dtype=torch.int32)}
    if kind == "attention":
        return attend_here(query, key, value, far=problem.far, **options)
    options["block_size"] = problem.block_size
    if kind == "mass ratio":
        weight = None if problem.key_weight is None else problem.key_weight[:, :, begin:end]
        output, ratio = near_with_mass_ratio(query, key, value, weight, **options)
    else:
        output, ratio = beyond_neighbors(query, key, value, **options)
    return torch.cat((output, ratio[..., None]), dim=-1)
