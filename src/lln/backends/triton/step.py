"""One more token of a state."""

from typing import Any

import torch
from torch.autograd.graph import increment_version

from lln.backends.triton.arguments import contiguous_features, launch, rows_of
from lln.backends.triton.configs import power_of_two, value_block
from lln.backends.triton.statistics import curve_arguments
from lln.recurrence import Advance, Memory, Recurrence


def step(recurrence: Recurrence) -> Advance:
    """The output of the next token and the memory after it, which is overwritten or in tensors of its own."""
    query, key, value = (contiguous_features(x) for x in recurrence[:3])
    keep, memory = recurrence.keep, recurrence.memory
    if not recurrence.in_place:
        copies: list[Any] = [None if x is None else x.clone() for x in memory]
        memory = Memory(*copies)
    (batch, heads, _, features), value_width = query.shape, value.shape[3]
    recent_key, recent_value = memory.recent_key, memory.recent_value
    near_query = query if recurrence.near_query is None else contiguous_features(recurrence.near_query)
    near_key = key if recurrence.near_key is None else contiguous_features(recurrence.near_key)
    block_f = power_of_two(features)
    block_v = value_block(block_f, value_width)
    shape = (batch, heads, 1, value_width)
    output = value.new_empty(shape, dtype=torch.float32 if recurrence.apart else value.dtype)
    near = value.new_empty(shape, dtype=torch.float32) if recurrence.apart and recent_key is not None else None
    lse = None if near is None else near.new_empty(shape[:3])
    alpha, beta, weight = recurrence.alpha, recurrence.beta, recurrence.key_weight
    arguments: dict[str, Any] = {
        "query": rows_of(query),
        "key": rows_of(key),
        "value": rows_of(value),
        "near_query": rows_of(near_query),
        "near_key": rows_of(near_key),
        "keep": None if keep is None else keep.contiguous().view(torch.uint8),
        "alpha": None if alpha is None else alpha.contiguous(),
        "beta": None if beta is None else beta.contiguous(),
        "weight": None if weight is None else weight.contiguous(),
        "mass": memory.mass,
        "values": memory.values,
        "num_tokens": memory.num_tokens,
        "query_sums": memory.query_sums,
        "key_sums": memory.key_sums,
        "recent_key": recent_key,
        "recent_value": recent_value,
        "output": output,
        "near_output": near,
        "near_lse": lse,
        "heads": heads,
        "groups": heads // key.shape[1],
        "recent": 0 if recent_key is None else recent_key.shape[2],
        "near_scale": near_query.shape[3] ** -0.5,
        **curve_arguments(features, recurrence.matching, recurrence.form, query.device),
        "F": features,
        "D": near_query.shape[3],
        "V": value_width,
        "BLOCK_F": block_f,
        "BLOCK_D": power_of_two(near_query.shape[3]),
        "BLOCK_V": block_v,
        "VALUE_BLOCKS": -(-value_width // block_v),
        "IS_WINDOW": recurrence.near == "window",
        "NORMALIZED": recurrence.form != "paper",
    }
    launch("step_kernel", (batch * heads,), widths=(block_f, block_v), dtype=query.dtype, **arguments)
    if not memory.mass.is_inference():  # autograd must not use what it saved of them
        increment_version([x for x in memory if x is not None])
    memory.num_tokens.add_(1 if keep is None else keep[:, 0])  # here, because all heads read it
    return Advance(output, near, memory, lse)
