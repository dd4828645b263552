"""The next tokens of a state, validated: what `LLNState` passes to a backend, and what it returns.

Shapes: B batch, H heads, a multiple of H_k key heads, N new tokens, F features of LLN attention, D features of the
attention among neighbours, V value width, C block size.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from lln.checks import check_inputs, check_scale, check_values, is_recorded
from lln.matching.curves import Form, Matching
from lln.precision import accumulator
from lln.problem import Centers, Near


class StateOptions(TypedDict, total=False):
    """Options of the next tokens of a state."""

    key_padding_mask: Tensor | None
    in_place: bool
    near_query: Tensor | None
    near_key: Tensor | None
    key_weight: Tensor | None


class Memory(NamedTuple):
    """What a state keeps of its tokens; each tensor is contiguous and has its memory to itself."""

    mass: Tensor  # (B, H, F) log of the summed exp(b), for each feature
    values: Tensor  # (B, H, F, V) the mean value that each feature points to
    num_tokens: Tensor  # (B,) kept tokens so far
    query_sums: Tensor  # (B, H, 3) what alpha and beta need of all queries, see `moments.PrefixSums`
    key_sums: Tensor  # (B, H, 3)
    # (B, H_k, C, D) the last tokens, kept token t at place t % C; None without neighbours
    recent_key: Tensor | None = None
    recent_value: Tensor | None = None  # (B, H_k, C, V)


class Recurrence(NamedTuple):
    """What is to be computed: the outputs of the next tokens, and the memory after them."""

    query: Tensor  # (B, H, N, F) of LLN attention, in the dtype of the tokens or of the accumulator
    key: Tensor  # (B, H_k, N, F)
    value: Tensor  # (B, H_k, N, V) in the dtype of the tokens
    memory: Memory
    keep: Tensor | None = None  # (B, N) bool; None: all
    alpha: Tensor | None = None  # (B, H); None: matched to the tokens so far
    beta: Tensor | None = None
    matching: Matching = "variance"
    form: Form = "paper"
    key_weight: Tensor | None = None  # (B, H, N) log-weights in the accumulator's dtype, added to all features of b
    near: Near = "blocks"  # where the neighbours of a token are
    # (B, H, N, D) of the attention among them, in the dtype of the tokens; None: `query`
    near_query: Tensor | None = None
    near_key: Tensor | None = None  # (B, H_k, N, D); None: `key`
    apart: bool = False  # both branches, in the accumulator's dtype; otherwise their mean, in the dtype of the tokens
    in_place: bool = False  # the tensors of `memory` may be overwritten
    centers: Centers | None = None  # of the decomposed form, (B, H, F) and (B, H_k, F) in the accumulator's dtype


class Advance(NamedTuple):
    """What a backend makes of it."""

    output: Tensor  # (B, H, N, V) LLN attention, or its mean with `near`
    near: Tensor | None  # (B, H, N, V) softmax attention among neighbours, of separate outputs
    memory: Memory
    near_lse: Tensor | None = None  # (B, H, N) with `near`: the log-sum-exp of its scores, 0 for tokens not kept
    is_owner: bool = False  # each tensor of `memory` is known to have its memory to itself


def check_memory(
    memory: Memory,
    alpha: Tensor | None,
    beta: Tensor | None,
    centers: tuple[Tensor | None, Tensor | None],
    *,
    form: Form,
) -> None:
    """Refuse tensors that do not belong to one state: C code reads them without a further check."""
    values, recent_key, recent_value = memory.values, memory.recent_key, memory.recent_value
    batch, heads, head_dim, value_dim = values.shape if values.dim() == 4 else (-1, -1, -1, -1)
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("mass", memory.mass, (batch, heads, head_dim)),
        ("values", values, (batch, heads, head_dim, value_dim)),
        ("count", memory.num_tokens, (batch,)),
        ("query_sums", memory.query_sums, (batch, heads, 3)),
        ("key_sums", memory.key_sums, (batch, heads, 3)),
        ("alpha", alpha, (batch, heads)),
        ("beta", beta, (batch, heads)),
        ("center_q", centers[0], (batch, heads, head_dim)),
    ]
    if recent_key is not None:
        recent = (batch, *recent_key.shape[1:3])
        expected.append(("recent_key", recent_key, (*recent, recent_key.shape[-1])))
        expected.append(("recent_value", recent_value, (*recent, value_dim)))
    if centers[1] is not None:
        expected.append(("center_k", centers[1], (batch, centers[1].shape[1], head_dim)))
    for name, x, shape in expected:
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} of a state must be {shape}, got {tuple(x.shape)}")
    if (recent_key is None) != (recent_value is None):
        raise ValueError("a state has recent keys and recent values, or neither")
    if {x is None for x in centers} != {form != "decomposed"}:
        raise ValueError(f'a state of form="decomposed" has two centres and others have none, got {form!r}')


def check_mergeable(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], same: Iterable[str]) -> None:
    """Refuse two states, as `LLNState.to_dict` has them, that differ in shapes, or in the values of `same`."""
    if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
        shapes = (", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items()) for tensors in (mine, theirs))
        raise ValueError(f"states of different shape cannot be merged: {' and '.join(shapes)}")
    for name in same:
        if name in mine:
            check_values(
                mine[name] == theirs[name], f"states with different {name} cannot be merged; give both the same"
            )


def read_scale(name: str, scale: float | Tensor | None, *, batch: int, heads: int, like: Tensor) -> Tensor | None:
    """alpha or beta of all tokens of a state, (B, H) in the accumulator's dtype; None if it is to be matched."""
    check_scale(name, scale, batch=batch, heads=heads, tokens=1)
    if scale is None:
        return None
    if isinstance(scale, Tensor) and scale.dim() > 2:
        raise ValueError(f"{name} of a state must be the same for all tokens, got {tuple(scale.shape)}")
    given = torch.as_tensor(scale, dtype=accumulator(like.dtype), device=like.device)
    return (given if given.dim() == 2 else given.reshape(1, -1)).expand(batch, heads)


def is_owner(x: Tensor, others: set[int]) -> bool:
    """Whether a tensor has all of its memory to itself; `others` are the addresses of those seen so far."""
    if torch.compiler.is_compiling() or is_recorded() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False  # there are no addresses to compare
    storage = x.untyped_storage()
    is_alone = storage.data_ptr() not in others or storage.nbytes() == 0
    others.add(storage.data_ptr())
    return is_alone and x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size()


def check_tokens(
    values: Tensor,
    recent_key: Tensor | None,
    center_key: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_query: Tensor | None,
    near_key: Tensor | None,
) -> None:
    """Refuse tokens that are not for a state with these `values`, `recent_key` and `center_key`."""
    if near_query is None and near_key is None:
        check_inputs(query, key, value, same_length="LLNState")
        near_key = key
    else:
        near_key = _check_near(values, recent_key, query, key, value, near_query, near_key)
    wanted, got = tuple(values.shape), (*query.shape[:2], query.shape[3], value.shape[3])
    if wanted != got:
        raise ValueError(f"the state is for (batch, heads, features, value features) {wanted}, got {got}")
    if query.shape[2] == 0:
        raise ValueError(f"at least one token is needed, got query {tuple(query.shape)}")
    if center_key is not None and key.shape[1] != center_key.shape[1]:
        raise ValueError(f"the centres are for {center_key.shape[1]} key heads, got {key.shape[1]}")
    if recent_key is None:
        if accumulator(value.dtype) != values.dtype:
            raise TypeError(f"the state sums in {values.dtype}, which does not fit {value.dtype} tokens; see dtype=")
        return
    if near_key.shape[3] != recent_key.shape[3]:
        raise ValueError(
            f"softmax attention in this state is for {recent_key.shape[3]} features, got {near_key.shape[3]}; see "
            "near_query= and near_key="
        )
    if key.shape[1] != recent_key.shape[1]:
        raise ValueError(f"the state has {recent_key.shape[1]} key heads, got {key.shape[1]}; see key_heads=")
    if value.dtype != recent_key.dtype:
        raise TypeError(f"the state is for {recent_key.dtype} tokens, got {value.dtype}; see dtype=")


def _check_near(
    values: Tensor,
    recent_key: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_query: Tensor | None,
    near_key: Tensor | None,
) -> Tensor:
    """Refuse inputs of two branches that do not belong together; returns the keys of softmax attention."""
    if near_query is None or near_key is None:
        raise ValueError("near_query and near_key belong together; give both or neither")
    if recent_key is None:
        raise ValueError("a state without block_size= has no neighbours; leave near_query and near_key out")
    check_inputs(near_query, near_key, value, same_length="LLNState")
    check_inputs(query, key, same_length="LLNState")
    for name, far, near in (("query", query, near_query), ("key", key, near_key)):
        if far.shape[:3] != near.shape[:3] or far.device != near.device:
            raise ValueError(
                f"near_{name} must be for the same tokens and heads as {name}, got {tuple(near.shape)} on "
                f"{near.device} and {tuple(far.shape)} on {far.device}"
            )
    if query.dtype not in (value.dtype, values.dtype):
        raise TypeError(f"query must be {value.dtype} or {values.dtype}, got {query.dtype}")
    return near_key
