"""Gradients: what is allocated, and which kernels run on it. Shapes as in `launch`."""

from typing import NamedTuple

import torch
from torch import Tensor

from lln.backends.base import empty_rows
from lln.backends.triton import configs
from lln.backends.triton.arguments import (
    ALL,
    Arguments,
    FarInputs,
    Launcher,
    contiguous_features,
    keys_of,
    new_floats,
    prepared,
    queries_of,
    rows_of,
    scale_of,
    without_offset,
)
from lln.backends.triton.forward import causal_arguments, new_summary, running, summarize
from lln.backends.triton.kernels.common import ABSENT, Keys
from lln.backends.triton.kernels.gradients import KeyGradients
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

    def of_keys(self, wanted: Wanted) -> KeyGradients:
        return KeyGradients(
            rows_of(self.key),
            rows_of(self.value),
            self.beta if wanted.scales else None,
            self.key_weight if wanted.key_weight else None,
            self.center_parts[2] if wanted.centers else None,
            self.center_parts[1] if wanted.centers else None,
        )

    def of_queries(self, wanted: Wanted) -> Arguments:
        return {
            "d_query": rows_of(self.query),
            "d_alpha": self.alpha if wanted.scales else None,
            "d_center": self.center_parts[0] if wanted.centers else None,
        }

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
    inputs = without_offset(prepared(inputs), form)
    gradient = contiguous_features(gradient)
    run = Launcher(inputs.query, inputs.value, is_causal=is_causal)
    if is_causal:
        return _causal_backward(run, gradient, inputs, output, first, form, wanted)
    return _full_backward(run, gradient, inputs, first, second, form, wanted)


def _key_arguments(inputs: FarInputs, form: Form, tiles: int) -> Arguments:
    key_heads = inputs.key.shape[1]
    return {
        "keys": keys_of(inputs),
        "key_heads": key_heads,
        "groups": inputs.query.shape[1] // key_heads,
        "tokens": inputs.key.shape[2],
        "tiles": tiles,
        "NORMALIZED": form != "paper",
    }


def _full_backward(
    run: Launcher, gradient: Tensor, inputs: FarInputs, mass: Tensor, values: Tensor, form: Form, wanted: Wanted
) -> Gradients:
    query, key = inputs.query, inputs.key
    (batch, heads, tokens, width), keys = query.shape, key.shape[2]
    splits, split_tokens = run.split(tokens)
    tiles = run.tiles("keys_backward_kernel", keys)
    into = _Results(inputs, wanted, run.sizes["BLOCK_D"], splits, tiles)
    d_mass, _, d_sums = new_summary(run, query, batch * heads * splits)
    of_queries = into.of_queries(wanted) | {"d_masses": d_mass, "d_sums": d_sums}
    parts = [of_queries]
    if max(run.widths) > configs.WIDEST_QUERIES_BACKWARD:
        none = dict.fromkeys(into.of_queries(wanted))
        parts = [of_queries | {"d_sums": None}, of_queries | none | {"d_masses": None}]
    for part in parts:
        run(
            "queries_backward_kernel",
            batch * heads * splits,
            1 if part["d_sums"] is None else run.sizes["VALUE_BLOCKS"],
            needs=ALL,
            queries=queries_of(inputs, inputs.keep_query),
            gradient=rows_of(gradient),
            **part,
            mass=mass,
            values=values,
            heads=heads,
            tokens=tokens,
            splits=splits,
            split_tokens=split_tokens,
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
    both = into.of_keys(wanted)
    key_parts, block_v = [both], run.sizes["BLOCK_V"]
    is_float32 = query.dtype == torch.float32
    if run.sizes["BLOCK_D"] > configs.WIDEST_KEYS_BACKWARD[configs.kind_of(is_float32=is_float32)]:
        key_parts = [both._replace(value=None), KeyGradients(None, both.value, None, None, None, None)]
    if is_float32:
        narrow = configs.value_block(run.sizes["BLOCK_D"], run.value_width, configs.FLOAT32_KEYS_BACKWARD_ENTRIES)
        block_v = min(block_v, narrow)
    for key_part in key_parts:
        run(
            "keys_backward_kernel",
            batch * key.shape[1] * tiles,
            needs=ALL,
            BLOCK_V=block_v,
            VALUE_BLOCKS=run.value_width // block_v,
            **_key_arguments(inputs, form, tiles),
            value=rows_of(inputs.value),
            into=key_part,
            mass=mass,
            shift=shift,
            sums=sums,
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
        x=rows_of(gradient),
        y=rows_of(output),
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
    splits, _ = run.split(tokens)
    # Queries without a gradient count for nothing: 0 times what is not finite of them would be NaN for all keys before.
    logs = logs.masked_fill(~gradient.any(dim=3), ABSENT.value)
    arguments: Arguments = {
        **causal_arguments(run, inputs, form),
        "logs_of_total": scale_of(logs),
    }
    found = summarize(run, keys_of(inputs), inputs.value, heads, is_normalized=form != "paper")
    starts = running(run, found, pairs, reverse=False)
    d_query_logs, d_key_logs = (new_floats(query, batch, heads, tokens, width) for _ in range(2))
    # Products of half precision would round it.
    scaled = empty_rows(gradient, gradient.shape[3]) if query.dtype == torch.float32 else None
    for block in range(blocks):
        run(
            "causal_queries_backward_kernel",
            pairs * splits,
            needs=ALL,
            **arguments,
            gradient=rows_of(gradient),
            output=rows_of(output),
            starts=starts,
            d_logs=rows_of(d_query_logs),
            scaled=None if scaled is None else rows_of(scaled),
            block=block,
        )
    gradient = gradient if scaled is None else scaled
    dots = row_dots(run, gradient, output)
    past = queries_of(inputs, inputs.keep_query)
    logs_of_queries = Keys(*past[:3], scale_of(logs), past.center, None)
    after = summarize(run, logs_of_queries, gradient, heads, factor=scale_of(dots))
    d_values = new_floats(query, batch, heads, tokens, inputs.value.shape[3])
    after_each = running(run, after, pairs, reverse=True)
    for block in range(blocks):
        for of_values in (False, True):
            run(
                "causal_keys_backward_kernel",
                pairs * splits,
                needs=ALL,
                **arguments,
                gradient=rows_of(gradient),
                dots=scale_of(dots),
                starts=after_each,
                d_logs=rows_of(d_key_logs),
                d_values=rows_of(d_values),
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
        queries=past,
        **into.of_queries(wanted),
        d_logs=rows_of(d_query_logs),
        heads=heads,
        tokens=tokens,
        tiles=query_tiles,
    )
    run(
        "finish_keys_kernel",
        batch * key.shape[1] * tiles,
        needs=ALL,
        **_key_arguments(inputs, form, tiles),
        into=into.of_keys(wanted),
        d_logs=rows_of(d_key_logs),
        d_values=rows_of(d_values),
    )
    return into.all(width, wanted)
