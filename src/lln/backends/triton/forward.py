"""LLN attention: what is allocated, and which kernels run on it.

Shapes: B batch, H heads, N queries, M keys, D features, V value width. Sums that kernels hand to each other are in
float32 and padded: BLOCK_D features and VALUE_BLOCKS blocks of BLOCK_V values.
"""

from typing import Any

from torch import Tensor

from lln.backends.base import empty_rows
from lln.backends.triton import configs
from lln.backends.triton.arguments import (
    ALL,
    Arguments,
    FarInputs,
    Launcher,
    keys_of,
    new_floats,
    prepared,
    queries_of,
    rows_of,
    without_offset,
)
from lln.backends.triton.kernels.common import Keys, Rows, Summary
from lln.backends.triton.statistics import match
from lln.matching.curves import Form, Matching

Far = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # output, alpha, beta, and two that the backward pass needs


def new_summary(run: Launcher, like: Tensor, number: int) -> Summary:
    block = run.sizes["BLOCK_D"]
    return Summary(
        new_floats(like, number, block),
        new_floats(like, number, block),
        new_floats(like, number, block, run.value_width),
    )


def summarize(
    run: Launcher, keys: Keys, value: Tensor, heads: int, *, factor: Rows | None = None, is_normalized: bool = False
) -> Summary:
    """The summary of the keys of each split, for each of so many query heads."""
    batch, key_heads, tokens, _ = value.shape
    splits, split_tokens = run.split(tokens)
    found = new_summary(run, value, batch * heads * splits)
    run(
        "summarize_kernel",
        batch * heads * splits,
        run.sizes["VALUE_BLOCKS"],
        needs=ALL,
        keys=keys,
        value=rows_of(value),
        factor=factor,
        found=found,
        heads=heads,
        groups=heads // key_heads,
        tokens=tokens,
        split_tokens=split_tokens,
        splits=splits,
        NORMALIZED=is_normalized,
        PRECISION=run.precision,
    )
    return found


def running(run: Launcher, found: Summary, pairs: int, *, reverse: bool) -> Summary:
    """The summary of all splits before each, or after it."""
    starts = new_summary(run, found.sums, found.tops.shape[0])
    _combine(run, found, pairs, starts=starts, mass=None, values=None, REVERSE=reverse)
    return starts


def _combine(run: Launcher, found: Summary, pairs: int, **into: Any) -> None:
    block = run.sizes["BLOCK_D"]
    features = min(block, 32)
    run(
        "combine_kernel",
        pairs,
        block // features,
        run.sizes["VALUE_BLOCKS"],
        needs="BLOCK_D BLOCK_V VALUE_BLOCKS",
        found=found,
        splits=found.tops.shape[0] // pairs,
        BLOCK_F=features,
        **into,
    )


def far_forward(inputs: FarInputs, matching: Matching, form: Form, *, is_causal: bool) -> Far:
    """LLN attention; with it alpha and beta, and the memory of all keys or, causal, the log of each query's weights."""
    inputs = prepared(inputs)
    if inputs.alpha is None or inputs.beta is None:
        alpha, beta = match(inputs, matching, form, is_causal=is_causal)
        inputs = inputs.with_scales(
            alpha if inputs.alpha is None else inputs.alpha, beta if inputs.beta is None else inputs.beta
        )
    inputs = without_offset(inputs, form)
    assert inputs.alpha is not None
    assert inputs.beta is not None
    run = Launcher(inputs.query, inputs.value, is_causal=is_causal)
    output = empty_rows(inputs.query, inputs.value.shape[3])
    (batch, heads, tokens, _), is_normalized = inputs.query.shape, form != "paper"
    found = summarize(run, keys_of(inputs), inputs.value, heads, is_normalized=is_normalized)
    if is_causal:
        logs = new_floats(inputs.query, batch, heads, tokens)
        run(
            "causal_kernel",
            found.tops.shape[0],
            run.sizes["VALUE_BLOCKS"],
            needs=ALL,
            **causal_arguments(run, inputs, form),
            starts=running(run, found, batch * heads, reverse=False),
            output=rows_of(output),
            logs_of_total=logs,
        )
        return output, inputs.alpha, inputs.beta, logs, new_floats(output, 0)
    mass, values = (
        new_floats(output, batch, heads, found.tops.shape[1]),
        new_floats(output, batch, heads, *found.sums.shape[1:]),
    )
    _combine(run, found, batch * heads, starts=None, mass=mass, values=values, REVERSE=False)
    splits = -(-tokens // configs.RECALL_TOKENS)
    run(
        "recall_kernel",
        batch * heads * splits,
        needs=ALL,
        queries=queries_of(inputs, inputs.keep_query),
        output=rows_of(output),
        mass=mass,
        values=values,
        heads=heads,
        tokens=tokens,
        splits=splits,
        split_tokens=configs.RECALL_TOKENS,
        PRECISION=run.precision,
    )
    return output, inputs.alpha, inputs.beta, mass, values


def causal_arguments(run: Launcher, inputs: FarInputs, form: Form) -> Arguments:
    query, key = inputs.query, inputs.key
    splits, split_tokens = run.split(query.shape[2])
    return {
        "queries": queries_of(inputs, inputs.keep_key),
        "keys": keys_of(inputs),
        "value": rows_of(inputs.value),
        "heads": query.shape[1],
        "groups": query.shape[1] // key.shape[1],
        "tokens": query.shape[2],
        "split_tokens": split_tokens,
        "splits": splits,
        "NORMALIZED": form != "paper",
        "PRECISION": run.precision,
    }
