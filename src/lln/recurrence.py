"""The next tokens of a state, validated: what `LLNState` hands to a backend, and what comes back.

Shapes: B batch, H heads, a multiple of H_k key heads, N new tokens, F features of LLN attention, D features of the
attention among neighbours, V value width, C block size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lln.checks import check_inputs
from lln.matching.curves import Form, Matching
from lln.precision import accumulator
from lln.problem import Centers, Near


class Memory(NamedTuple):
    """What a state keeps of its tokens; each tensor is contiguous and has its memory to itself."""

    mass: Tensor  # (B, H, F) log of the summed exp(b), for each feature
    values: Tensor  # (B, H, F, V) the mean value that each feature points to
    num_tokens: Tensor  # (B,) kept tokens so far
    query_sums: Tensor  # (B, H, 3) what alpha and beta need of all queries, see `moments.PrefixSums`
    key_sums: Tensor  # (B, H, 3)
    recent_key: Tensor | None  # (B, H_k, C, D) the last tokens, kept token t at place t % C; None without neighbours
    recent_value: Tensor | None  # (B, H_k, C, V)


class Recurrence(NamedTuple):
    """What is to be computed: the outputs of the next tokens, and the memory after them."""

    query: Tensor  # (B, H, N, F) of LLN attention, in the dtype of the tokens or of the accumulator
    key: Tensor  # (B, H_k, N, F)
    value: Tensor  # (B, H_k, N, V) in the dtype of the tokens
    keep: Tensor | None  # (B, N) bool; None: all
    memory: Memory
    alpha: Tensor | None  # (B, H); None: matched to the tokens so far
    beta: Tensor | None
    matching: Matching
    form: Form
    key_weight: Tensor | None  # (B, H, N) log-weights in the accumulator's dtype, added to all features of b
    near: Near  # where the neighbours of a token are
    near_query: Tensor | None  # (B, H, N, D) of the attention among them, in the dtype of the tokens; None: `query`
    near_key: Tensor | None  # (B, H_k, N, D); None: `key`
    apart: bool  # both branches, in the accumulator's dtype; otherwise their mean, in the dtype of the tokens
    in_place: bool  # the tensors of `memory` may be overwritten
    centers: Centers | None = None  # of the decomposed form, (B, H, F) and (B, H_k, F) in the accumulator's dtype


class Advance(NamedTuple):
    """What a backend makes of it."""

    output: Tensor  # (B, H, N, V) LLN attention, or its mean with `near`
    near: Tensor | None  # (B, H, N, V) softmax attention among neighbours, if it was asked for apart
    memory: Memory
    near_lse: Tensor | None = None  # (B, H, N) with `near`: the log-sum-exp of its scores, 0 for tokens not kept
    is_owner: bool = False  # each tensor of `memory` is known to have its memory to itself


def check_tokens(
    values: Tensor,
    recent_key: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_query: Tensor | None,
    near_key: Tensor | None,
) -> None:
    """Refuse tokens that are not for a state with these `values` and `recent_key`."""
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


def read_weight(key_weight: Tensor, query: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(key_weight, Tensor) or not key_weight.is_floating_point():
        what = key_weight.dtype if isinstance(key_weight, Tensor) else type(key_weight).__name__
        raise TypeError(f"key_weight must be a floating point tensor, got {what}")
    if key_weight.shape != query.shape[:3] or key_weight.device != query.device:
        raise ValueError(
            f"key_weight must be (batch, heads, tokens) {tuple(query.shape[:3])} on {query.device}, got "
            f"{tuple(key_weight.shape)} on {key_weight.device}"
        )
    return key_weight.to(dtype)


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
