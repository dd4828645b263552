"""The next tokens of a state, validated: what `LLNState` hands to a backend, and what comes back.

Shapes: B batch, H heads, a multiple of H_k key heads, N new tokens, D features, V value width, C block size.
"""

from typing import NamedTuple

from torch import Tensor

from lln.curves import Matching


class Memory(NamedTuple):
    """What a state keeps of its tokens; each tensor is contiguous and has its memory to itself."""

    mass: Tensor  # (B, H, D) log of the summed exp(beta k), for each feature
    values: Tensor  # (B, H, D, V) the mean value that each feature points to
    num_tokens: Tensor  # (B,) kept tokens so far
    query_sums: Tensor  # (B, H, 3) what alpha and beta need of all queries, see `moments.PrefixSums`
    key_sums: Tensor  # (B, H, 3)
    recent_key: Tensor | None  # (B, H_k, C, D) the last tokens, kept token t at place t % C; None without blocks
    recent_value: Tensor | None  # (B, H_k, C, V)


class Recurrence(NamedTuple):
    """What is to be computed: the outputs of the next tokens, and the memory after them."""

    query: Tensor  # (B, H, N, D)
    key: Tensor  # (B, H_k, N, D)
    value: Tensor  # (B, H_k, N, V)
    keep: Tensor | None  # (B, N) bool; None: all
    memory: Memory
    alpha: Tensor | None  # (B, H); None: matched to the tokens so far
    beta: Tensor | None
    matching: Matching
    apart: bool  # both branches, in the accumulator's dtype; otherwise their mean, in the dtype of the tokens
    in_place: bool  # the tensors of `memory` may be overwritten


class Advance(NamedTuple):
    """What a backend makes of it."""

    output: Tensor  # (B, H, N, V) LLN attention, or its mean with `near`
    near: Tensor | None  # (B, H, N, V) softmax attention inside blocks, if it was asked for apart
    memory: Memory
