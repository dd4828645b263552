"""LLN attention: what is allocated, and which kernels run on it.

Shapes: B batch, H heads, N queries, M keys, D features, V value width. Sums that kernels hand to each other are in
float32 and padded: BLOCK_D features and VALUE_BLOCKS blocks of BLOCK_V values.
"""

from typing import NamedTuple

from torch import Tensor

from lln.backends.base import empty_rows
from lln.backends.triton import configs
from lln.backends.triton.arguments import (
    ALL,
    Arguments,
    FarInputs,
    Launcher,
    center_arguments,
    keep_arguments,
    new_floats,
    prepared,
    row_arguments,
    scale_arguments,
)
from lln.backends.triton.configs import split_of
from lln.backends.triton.statistics import match
from lln.matching.curves import Form, Matching

Far = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # output, alpha, beta, and two that the backward pass needs


class Summary(NamedTuple):
    """Largest log-weights and weights (B H splits, BLOCK_D), and sums (B H splits, BLOCK_D, values)."""

    tops: Tensor
    weights: Tensor
    sums: Tensor


def new_summary(run: Launcher, like: Tensor, number: int) -> Summary:
    block = run.sizes["BLOCK_D"]
    return Summary(
        new_floats(like, number, block),
        new_floats(like, number, block),
        new_floats(like, number, block, run.value_width),
    )


def summarize(run: Launcher, inputs: FarInputs, form: Form) -> Summary:
    """The summary of the keys of each split."""
    query, key, value = inputs[:3]
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    splits, split_tokens = split_of(key.shape[2])
    found = new_summary(run, query, query.shape[0] * heads * splits)
    run(
        "summarize_kernel",
        found.tops.shape[0],
        run.sizes["VALUE_BLOCKS"],
        needs=ALL,
        **row_arguments("key", key),
        **row_arguments("value", value),
        **keep_arguments(inputs.keep_key, key),
        **scale_arguments("scale", inputs.beta, key),
        **scale_arguments("shift", inputs.key_weight, key),
        **center_arguments("center", inputs.center_key, key),
        **center_arguments("other_center", inputs.center_query, key),
        **{"factor": key, **found._asdict(), "heads": heads, "groups": groups, "tokens": key.shape[2]},
        split_tokens=split_tokens,
        splits=splits,
        HAS_SHIFT=inputs.key_weight is not None,
        HAS_FACTOR=False,
        IS_QUERY=False,
        CENTERED=inputs.is_centered,
        NORMALIZED=form != "paper",
        PRECISION=run.precision,
    )
    return found


def running(run: Launcher, found: Summary, pairs: int, *, reverse: bool) -> Summary:
    """The summary of all splits before each, or after it."""
    starts = new_summary(run, found.sums, found.tops.shape[0])
    _combine(run, found, pairs, starts, found.tops, found.sums, reverse=reverse, is_running=True)
    return starts


def _combine(
    run: Launcher,
    found: Summary,
    pairs: int,
    starts: Summary,
    mass: Tensor,
    values: Tensor,
    *,
    reverse: bool,
    is_running: bool,
) -> None:
    block = run.sizes["BLOCK_D"]
    features = min(block, 32)
    run(
        "combine_kernel",
        pairs,
        block // features,
        run.sizes["VALUE_BLOCKS"],
        needs="BLOCK_D BLOCK_V VALUE_BLOCKS",
        **found._asdict(),
        starts_top=starts.tops,
        starts_weight=starts.weights,
        starts_sums=starts.sums,
        mass=mass,
        values=values,
        splits=found.tops.shape[0] // pairs,
        BLOCK_F=features,
        REVERSE=reverse,
        RUNNING=is_running,
    )


def far_forward(inputs: FarInputs, matching: Matching, form: Form, *, is_causal: bool) -> Far:
    """LLN attention; with it alpha and beta, and the memory of all keys or, causal, the log of each query's weights."""
    inputs = prepared(inputs)
    if inputs.alpha is None or inputs.beta is None:
        alpha, beta = match(inputs, matching, form, is_causal=is_causal)
        inputs = inputs.with_scales(
            alpha if inputs.alpha is None else inputs.alpha, beta if inputs.beta is None else inputs.beta
        )
    assert inputs.alpha is not None
    assert inputs.beta is not None
    run = Launcher(inputs.query, inputs.value, is_causal=is_causal)
    output = empty_rows(inputs.query, inputs.value.shape[3])
    found = summarize(run, inputs, form)
    if is_causal:
        logs = new_floats(inputs.query, *inputs.query.shape[:3])
        starts = running(run, found, logs.shape[0] * logs.shape[1], reverse=False)
        run(
            "causal_kernel",
            found.tops.shape[0],
            run.sizes["VALUE_BLOCKS"],
            needs=ALL,
            **causal_arguments(run, inputs, form),
            **row_arguments("output", output),
            **starts._asdict(),
            logs_of_total=logs,
        )
        return output, inputs.alpha, inputs.beta, logs, new_floats(output, 0)
    batch, heads, tokens, _ = inputs.query.shape
    mass, values = (
        new_floats(output, batch, heads, found.tops.shape[1]),
        new_floats(output, batch, heads, *found.sums.shape[1:]),
    )
    _combine(run, found, batch * heads, found, mass, values, reverse=False, is_running=False)
    splits = -(-tokens // configs.RECALL_TOKENS)
    run(
        "recall_kernel",
        batch * heads * splits,
        needs=ALL,
        **row_arguments("query", inputs.query),
        **row_arguments("output", output),
        **keep_arguments(inputs.keep_query, output),
        **scale_arguments("alpha", inputs.alpha, output),
        **center_arguments("center", inputs.center_query, output),
        mass=mass,
        values=values,
        heads=heads,
        tokens=tokens,
        splits=splits,
        split_tokens=configs.RECALL_TOKENS,
        CENTERED=inputs.is_centered,
        PRECISION=run.precision,
    )
    return output, inputs.alpha, inputs.beta, mass, values


def causal_arguments(run: Launcher, inputs: FarInputs, form: Form) -> Arguments:
    query, key = inputs.query, inputs.key
    splits, split_tokens = split_of(query.shape[2])
    return {
        **row_arguments("query", query),
        **row_arguments("key", key),
        **row_arguments("value", inputs.value),
        **keep_arguments(inputs.keep_key, key),
        **scale_arguments("alpha", inputs.alpha, query),
        **scale_arguments("beta", inputs.beta, query),
        **scale_arguments("weight", inputs.key_weight, query),
        **center_arguments("center_query", inputs.center_query, query),
        **center_arguments("center_key", inputs.center_key, query),
        "heads": query.shape[1],
        "groups": query.shape[1] // key.shape[1],
        "tokens": query.shape[2],
        "split_tokens": split_tokens,
        "splits": splits,
        "HAS_WEIGHT": inputs.key_weight is not None,
        "CENTERED": inputs.is_centered,
        "NORMALIZED": form != "paper",
        "PRECISION": run.precision,
    }
