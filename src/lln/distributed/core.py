"""What every call on parts of a sequence goes through: its own checks, those of the group, then both branches.

Shapes: P processes, B batch, H heads, H_k key heads, N queries and M keys of this process, D features, V value width.
"""

from collections.abc import Set
from dataclasses import replace
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.distributed import far as far_attention
from lln.distributed import statistics
from lln.distributed.beyond import beyond_neighbors
from lln.distributed.mass import log_far_mass
from lln.distributed.merge import Layout
from lln.distributed.near import Neighbors
from lln.distributed.packed import attend_packed, check_packed
from lln.distributed.ranks import Ranks
from lln.masks import INTEGERS
from lln.precision import accumulator
from lln.problem import Near, Problem, Tokens, read_key_weight

Kind = Literal["attention", "mass ratio", "beyond neighbors"]


def attend(
    name: str,
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    far: bool,
    near: Near | None,
    names: Set[str],
    kind: Kind = "attention",
    **options: Any,
) -> Tensor:
    """The attention of the queries of this process to the keys of all of them, in the dtype of the input.

    The other kinds are in the accumulator's dtype and have one feature more, ln(far / near) of each query: softmax
    attention among neighbours, with the ratio from the weights `key_weight`, or attention to what is not near with the
    features `query` and `key`, see `lln.neighbors`.
    """
    given = {option: x for option, x in options.items() if x is not None}
    weight = given.pop("key_weight", None) if kind == "mass ratio" else None
    lengths, starts = _lengths(given, key), given.pop("cu_seqlens", None)
    masks = tuple(option in given for option in ("key_padding_mask", "query_padding_mask"))
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    try:
        if not options.keys() <= names:
            unknown = ", ".join(sorted(options.keys() - names))
            raise TypeError(f"{name} has no option {unknown}; its options are: {', '.join(names)}")
        problem = Problem.make(query, key, value, far=far, near=near, **given)
        if weight is not None:
            problem = replace(problem, key_weight=read_key_weight(weight, query, key))
        if starts is not None:
            check_packed(problem, starts, lengths, given)
        description, sizes = _describe(problem, given, lengths, starts), (*query.shape[2:3], key.shape[2], *masks)
    except (TypeError, ValueError) as error:
        problem, description, sizes = None, {"error": f"{type(error).__name__}: {error}"}, (0, 0, False, False)
    found = ranks.check(name, description, sizes, device)
    assert problem is not None
    problem = _with_padding(name, problem, found, lengths, ranks.rank)
    (batch, _, _, _), width = query.shape, value.shape[3]
    if batch == 0 or width == 0 or not bool(found[:, :2].sum(dim=0).all()):
        return pad(problem.output_of_nothing(), (0, int(kind != "attention")))
    if starts is not None:
        return attend_packed(attend_parts, problem, ranks, found[:, 0].tolist(), starts.tolist(), given, kind=kind)
    return attend_parts(problem, ranks, kind=kind)


def attend_parts(problem: Problem, ranks: Ranks, segments: Tensor | None = None, *, kind: Kind = "attention") -> Tensor:
    """What the problem describes, for the queries of this process; see `Layout` for `segments`."""
    layout = Layout(ranks, _count(problem, ranks), segments)
    if kind == "beyond neighbors":
        return beyond_neighbors(problem, layout)
    near = None
    if problem.near:
        near = Neighbors(problem, layout, share=0.5 if problem.far else 1.0, with_lse=kind == "mass ratio")
        problem, link = near.tap(problem)
        if kind == "mass ratio":
            return _with_ratio(near.finish(problem, link), problem, near, layout)
        if not problem.far:
            return near.finish(problem, link)
    means = layout if problem.form == "decomposed" and problem.centers is None else None
    problem = _with_scales(problem, layout)
    merge = far_attention.start(problem, layout)
    return far_attention.finish(problem, merge, near, means=means)


def _with_ratio(output: Tensor, problem: Problem, near: Neighbors, layout: Layout) -> Tensor:
    """ln(far / near) in place of ln(near), the last feature."""
    weight = output.new_zeros(output.shape[:3]) if problem.key_weight is None else problem.key_weight
    far = log_far_mass(weight, problem.keys.keep, near, layout)
    return torch.cat((output[..., :-1], far[..., None] - output[..., -1:]), dim=-1)


@torch.no_grad()
def _with_scales(problem: Problem, layout: Layout) -> Problem:
    """The problem with alpha, beta and the centres of its form, from the statistics of whole sequences."""
    if problem.form == "decomposed" and problem.centers is None:
        problem = replace(problem, centers=statistics.sample_centers(problem, layout))
    if problem.alpha is None or problem.beta is None:
        query, key = problem.query, problem.key
        if problem.centers is not None:  # in place: in low precision `without_centers` would hold a tensor more
            dtype = accumulator(query.dtype)
            query, key = (
                x.to(dtype, copy=True).sub_(center[:, :, None])
                for x, center in zip((query, key), problem.centers, strict=True)
            )
        alpha, beta = statistics.scales(replace(problem, query=query, key=key), layout)
        problem = replace(problem, alpha=alpha, beta=beta)
    return problem


def _count(problem: Problem, ranks: Ranks) -> Tensor:
    """(P, 2, B) kept queries and keys of every process, on the CPU."""
    batch = problem.query.shape[0]
    own = [
        torch.full((batch,), x.shape[2], device=x.device) if tokens.keep is None else tokens.keep.sum(dim=1)
        for x, tokens in ((problem.query, problem.queries), (problem.key, problem.keys))
    ]
    return ranks.gather(torch.stack(own).to(ranks.header_device(problem.query.device))).cpu()


def _lengths(given: dict[str, Any], key: Tensor) -> Tensor | None:
    """Lengths of whole sequences, taken out of the options: what they mean for this part depends on the other parts."""
    mask = given.get("key_padding_mask")
    if isinstance(mask, Tensor) and mask.dim() == 1 and mask.dtype in INTEGERS:
        return given.pop("key_padding_mask")  # type: ignore[no-any-return]
    return None


def _with_padding(name: str, problem: Problem, found: Tensor, lengths: Tensor | None, rank: int) -> Problem:
    """The problem with the padding of both sides, which depends on whether this is self-attention.

    In one process it is if there are as many queries as keys.
    """
    keep_query, keep_key = problem.queries.keep, problem.keys.keep
    is_self = bool((found[:, 0] == found[:, 1]).all())
    queries, keys = found[:, :2].sum(dim=0).tolist()
    if lengths is not None:
        if lengths.shape != problem.key.shape[:1] or bool(((lengths < 0) | (lengths > keys)).any()):
            raise ValueError(
                f"key_padding_mask must hold a length between 0 and {keys} for each of the {problem.key.shape[0]} "
                f"sequences, those of all processes together; got {lengths.tolist()}"
            )
        first = int(found[:rank, 1].sum())
        places = torch.arange(first, first + problem.key.shape[2], device=problem.key.device)
        keep_key = places < lengths.to(problem.key.device)[:, None]
        keep_query = keep_key if is_self and not bool(found[rank, 3]) else keep_query
    if not is_self and not bool(found[:, 3].any()):
        keep_query = None  # not the keys', also where a process happens to have as many
        if queries == keys and (lengths is not None or bool(found[:, 2].any())):
            raise ValueError(
                f"{name} has {queries} queries and as many keys, in parts of {found[:, 0].tolist()} and "
                f"{found[:, 1].tolist()}; give query_padding_mask, because key_padding_mask is for other parts"
            )
    return replace(problem, queries=Tokens(keep_query), keys=Tokens(keep_key))


def _describe(problem: Problem, given: dict[str, Any], lengths: Tensor | None, starts: Tensor | None) -> dict[str, Any]:
    """What must be the same on all processes."""
    query, key, value = problem.query, problem.key, problem.value
    tensors = {"query": query, "key": key, "value": value, "alpha": problem.alpha, "beta": problem.beta}
    tensors["key_weight"] = problem.key_weight
    differentiated = [name for name, x in tensors.items() if x is not None and x.requires_grad]
    return {
        "batch": query.shape[0],
        "heads": query.shape[1],
        "key heads": key.shape[1],
        "head_dim": query.shape[3],
        "value features": value.shape[3],
        "dtype": str(query.dtype).removeprefix("torch."),
        "device": query.device.type,
        "is_causal": problem.is_causal,
        "near": problem.near,
        "block_size": problem.block_size,
        "matching": problem.matching,
        "scope": problem.scope,
        "form": problem.form,
        **{name: _brief(given.get(name)) for name in ("alpha", "beta", "centers")},
        "key_weight": "given" if problem.key_weight is not None else "none",
        "lengths": None if lengths is None else lengths.tolist(),
        "cu_seqlens": None if starts is None else starts.tolist(),
        "gradients of": ", ".join(differentiated) if torch.is_grad_enabled() and differentiated else "nothing",
    }


def _brief(x: Any) -> str:
    """A given scale or centre in few words: equal on two processes that have the same."""
    if isinstance(x, tuple):
        return "; ".join(map(_brief, x))
    if not isinstance(x, Tensor):
        return str(x)
    if x.device.type != "cpu" or x.dim() == 3:  # not worth waiting for; of tokens, or of samples
        return f"tensor with {x.dim()} dimensions"
    values = x.detach().double().contiguous()
    return f"tensor {tuple(x.shape)} with the sum {float(values.sum()):.6g}, {crc32(values.numpy().tobytes()):08x}"
