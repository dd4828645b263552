"""Gradients: what is allocated, and which kernels run on it. Shapes as in `launch`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.backends.base import empty_rows
from lln.backends.triton.arguments import (
    ALL,
    Arguments,
    FarInputs,
    Launcher,
    center_arguments,
    contiguous_features,
    keep_arguments,
    new_floats,
    prepared,
    row_arguments,
    scale_arguments,
)
from lln.backends.triton.configs import split_of
from lln.backends.triton.forward import causal_arguments, new_summary, running, summarize
from lln.matching.curves import Form


class Wanted(NamedTuple):
    """Which gradients are asked for beside those of query, key and value."""

    scales: bool
    key_weight: bool
    centers: bool


Gradients = tuple[Tensor, ...]  # of query, key, value, alpha, beta, key_weight, center_query, center_key


class _Results:
    """Where gradients go: those of scales and log-weights are (B, H, tokens), those that are not wanted are empty."""

    def __init__(self, inputs: FarInputs, wanted: Wanted, block_d: int, query_parts: int, key_tiles: int) -> None:
        (batch, heads, tokens, _), (_, key_heads, keys, _) = inputs.query.shape, inputs.key.shape
        like = inputs.query
        self.query, self.key, self.value = (empty_rows(x, x.shape[3]) for x in inputs[:3])
        self.alpha = new_floats(like, batch, heads, tokens if wanted.scales else 0)
        self.beta = new_floats(like, batch, heads, keys if wanted.scales else 0)
        self.key_weight = new_floats(like, batch, heads, keys if wanted.key_weight else 0)
        # Centres: a part of each program, for their own tokens and for the column weight of keys.
        parts = (heads, query_parts), (heads, key_tiles), (key_heads, key_tiles)
        width = block_d if wanted.centers else 0
        self.center_parts = [new_floats(like, batch, number, part, width) for number, part in parts]

    def all(self, width: int, wanted: Wanted) -> Gradients:
        of_query, of_column, of_key = self.center_parts
        centers = (of_query.sum(dim=2) + of_column.sum(dim=2), of_key.sum(dim=2))
        if wanted.centers:
            centers = centers[0][..., :width].contiguous(), centers[1][..., :width].contiguous()
        return self.query, self.key, self.value, self.alpha, self.beta, self.key_weight, *centers


def far_backward(
    gradient: Tensor,
    inputs: FarInputs,
    output: Tensor,
    first: Tensor,
    second: Tensor,
    form: Form,
    wanted: Wanted,
    *,
    is_causal: bool,
) -> Gradients:
    """Gradients of LLN attention, from what `far_forward` returned."""
    inputs = prepared(inputs)
    gradient = contiguous_features(gradient)
    run = Launcher(inputs.query, inputs.value, is_causal=is_causal)
    if is_causal:
        return _causal_backward(run, gradient, inputs, output, first, form, wanted)
    return _full_backward(run, gradient, inputs, first, second, form, wanted)


def _key_arguments(inputs: FarInputs, form: Form, wanted: Wanted, into: _Results, tiles: int) -> Arguments:
    key_heads = inputs.key.shape[1]
    return {
        **row_arguments("key", inputs.key),
        **row_arguments("d_key", into.key),
        **row_arguments("d_value", into.value),
        **keep_arguments(inputs.keep_key, inputs.key),
        **scale_arguments("beta", inputs.beta, inputs.key),
        **center_arguments("center", inputs.center_key, inputs.key),
        **center_arguments("other_center", inputs.center_query, inputs.key),
        "d_beta": into.beta,
        "d_weight": into.key_weight,
        "d_center": into.center_parts[2],
        "d_other_center": into.center_parts[1],
        "key_heads": key_heads,
        "groups": inputs.query.shape[1] // key_heads,
        "tokens": inputs.key.shape[2],
        "tiles": tiles,
        "CENTERED": inputs.is_centered,
        "NORMALIZED": form != "paper",
        "SCALE_GRADIENT": wanted.scales,
        "WEIGHT_GRADIENT": wanted.key_weight,
        "CENTER_GRADIENT": wanted.centers,
    }


def _full_backward(
    run: Launcher, gradient: Tensor, inputs: FarInputs, mass: Tensor, values: Tensor, form: Form, wanted: Wanted
) -> Gradients:
    query, key = inputs.query, inputs.key
    (batch, heads, tokens, width), keys = query.shape, key.shape[2]
    splits, split_tokens = split_of(tokens)
    tiles = run.tiles("keys_backward_kernel", keys)
    into = _Results(inputs, wanted, run.sizes["BLOCK_D"], splits, tiles)
    d_mass, _, d_sums = new_summary(run, query, batch * heads * splits)
    run(
        "queries_backward_kernel",
        batch * heads * splits,
        run.sizes["VALUE_BLOCKS"],
        needs=ALL,
        **row_arguments("query", query),
        **row_arguments("gradient", gradient),
        **row_arguments("d_query", into.query),
        **keep_arguments(inputs.keep_query, query),
        **scale_arguments("alpha", inputs.alpha, query),
        **center_arguments("center", inputs.center_query, query),
        mass=mass,
        values=values,
        d_alpha=into.alpha,
        d_masses=d_mass,
        d_sums=d_sums,
        d_center=into.center_parts[0],
        heads=heads,
        tokens=tokens,
        splits=splits,
        split_tokens=split_tokens,
        CENTERED=inputs.is_centered,
        SCALE_GRADIENT=wanted.scales,
        CENTER_GRADIENT=wanted.centers,
        PRECISION=run.precision,
    )
    shift, sums = torch.empty_like(mass), torch.empty_like(values)
    features = min(run.sizes["BLOCK_D"], 32)
    run(
        "combine_gradients_kernel",
        batch * heads,
        run.sizes["BLOCK_D"] // features,
        needs="BLOCK_D BLOCK_V VALUE_BLOCKS",
        d_masses=d_mass,
        d_sums=d_sums,
        values=values,
        shift=shift,
        total_sums=sums,
        splits=splits,
        BLOCK_F=features,
    )
    run(
        "keys_backward_kernel",
        batch * key.shape[1] * tiles,
        needs=ALL,
        **_key_arguments(inputs, form, wanted, into, tiles),
        **row_arguments("value", inputs.value),
        **scale_arguments("weight", inputs.key_weight, key),
        mass=mass,
        shift=shift,
        sums=sums,
        HAS_WEIGHT=inputs.key_weight is not None,
        PRECISION=run.precision,
    )
    return into.all(width, wanted)


def row_dots(run: Launcher, gradient: Tensor, output: Tensor) -> Tensor:
    """g . out of each query, (B, H, N)."""
    batch, heads, tokens, width = output.shape
    dots = new_floats(output, batch, heads, tokens)
    tiles = run.tiles("row_dots_kernel", tokens)
    run(
        "row_dots_kernel",
        batch * heads * tiles,
        **row_arguments("x", gradient),
        **row_arguments("y", output),
        dots=dots,
        heads=heads,
        tokens=tokens,
        tiles=tiles,
        V=width,
        BLOCK_V=run.value_power,
    )
    return dots


def _causal_backward(
    run: Launcher, gradient: Tensor, inputs: FarInputs, output: Tensor, logs: Tensor, form: Form, wanted: Wanted
) -> Gradients:
    query, key = inputs.query, inputs.key
    batch, heads, tokens, width = query.shape
    pairs, blocks = batch * heads, run.sizes["VALUE_BLOCKS"]
    splits, split_tokens = split_of(tokens)
    dots = row_dots(run, gradient, output)
    arguments: dict[str, Any] = {
        **causal_arguments(run, inputs, form),
        **row_arguments("gradient", gradient),
        "logs_of_total": logs,
        "dots": dots,
    }
    d_query_logs = new_floats(query, batch, heads, tokens, width)
    starts = running(run, summarize(run, inputs, form), pairs, reverse=False)
    for block in range(blocks):
        sums: dict[str, Any] = {**arguments, **starts._asdict(), "d_logs": d_query_logs, "block": block}
        run("causal_queries_backward_kernel", pairs * splits, needs=ALL, **sums)
    after = new_summary(run, query, pairs * splits)
    run(
        "summarize_kernel",
        pairs * splits,
        blocks,
        needs=ALL,
        **row_arguments("key", query),
        **row_arguments("value", gradient),
        **keep_arguments(inputs.keep_query, query),
        **scale_arguments("scale", inputs.alpha, query),
        **scale_arguments("shift", logs, query),
        **center_arguments("center", inputs.center_query, query),
        **center_arguments("other_center", None, query),
        **{"factor": dots, **after._asdict(), "heads": heads, "groups": 1, "tokens": tokens},
        split_tokens=split_tokens,
        splits=splits,
        HAS_SHIFT=True,
        HAS_FACTOR=True,
        IS_QUERY=True,
        CENTERED=inputs.is_centered,
        NORMALIZED=False,
        PRECISION=run.precision,
    )
    d_key_logs = new_floats(query, batch, heads, tokens, width)
    d_values = new_floats(query, batch, heads, tokens, inputs.value.shape[3])
    sums = {**arguments, **running(run, after, pairs, reverse=True)._asdict(), "d_logs": d_key_logs}
    for block in range(blocks):
        for of_values in (False, True):
            run(
                "causal_keys_backward_kernel",
                pairs * splits,
                needs=ALL,
                **sums,
                d_values=d_values,
                block=block,
                OF_VALUES=of_values,
            )
    query_tiles = run.tiles("finish_queries_kernel", tokens)
    tiles = run.tiles("finish_keys_kernel", tokens)
    into = _Results(inputs, wanted, run.sizes["BLOCK_D"], query_tiles, tiles)
    run(
        "finish_queries_kernel",
        pairs * query_tiles,
        needs="D BLOCK_D",
        **row_arguments("query", query),
        **row_arguments("d_query", into.query),
        **keep_arguments(inputs.keep_query, query),
        **scale_arguments("alpha", inputs.alpha, query),
        **center_arguments("center", inputs.center_query, query),
        d_logs=d_query_logs,
        d_alpha=into.alpha,
        d_center=into.center_parts[0],
        heads=heads,
        tokens=tokens,
        tiles=query_tiles,
        CENTERED=inputs.is_centered,
        SCALE_GRADIENT=wanted.scales,
        CENTER_GRADIENT=wanted.centers,
    )
    run(
        "finish_keys_kernel",
        batch * key.shape[1] * tiles,
        needs=ALL,
        **_key_arguments(inputs, form, wanted, into, tiles),
        d_logs=d_key_logs,
        d_values=d_values,
    )
    return into.all(width, wanted)
