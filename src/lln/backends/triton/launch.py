"""Tensors to kernels: what is allocated, and which kernels run on it.

Shapes: B batch, H heads, N queries, M keys, D features, V value width. Sums that kernels hand to each other are in
float32 and padded: BLOCK_D features and VALUE_BLOCKS blocks of BLOCK_V values.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.backends.base import new_rows
from lln.backends.triton import configs
from lln.backends.triton.configs import power_of_two, split_of, value_block
from lln.matching import curves
from lln.matching.curves import Form, Matching

Arguments = dict[str, Any]
Far = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # output, alpha, beta, and two that the backward pass needs


class FarInputs(NamedTuple):
    """Tokens of LLN attention, and what weighs them; scales are (1 or B, 1 or H, 1 or tokens)."""

    query: Tensor
    key: Tensor
    value: Tensor
    keep_query: Tensor | None
    keep_key: Tensor | None
    alpha: Tensor | None
    beta: Tensor | None
    key_weight: Tensor | None  # (B, H, M)
    center_query: Tensor | None  # (1 or B, H, D)
    center_key: Tensor | None  # (1 or B, H_k, D)

    def with_scales(self, alpha: Tensor, beta: Tensor) -> "FarInputs":
        return self._replace(alpha=alpha, beta=beta)

    @property
    def is_centered(self) -> bool:
        return self.center_query is not None


def launch(kernel: str, grid: tuple[int, ...], *, widths: tuple[int, int], dtype: torch.dtype, **arguments: Any) -> None:
    """Run a kernel with the tiles of its config. Tests and `lln bench kernels` record calls instead."""
    from lln.backends.triton.tuning import run

    run(kernel, grid, widths, dtype, arguments)


def precision_of(dtype: torch.dtype) -> str:
    """How factors of a product are rounded: as tensor cores do for half precision, else as float32."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "tf32x3"


def row_arguments(name: str, x: Tensor) -> Arguments:
    """A tensor (B, heads, tokens, features) as the arguments of a kernel."""
    batch, head, token, _ = x.stride()
    return {name: x, f"{name}_batch": batch, f"{name}_head": head, f"{name}_token": token}


def scale_arguments(name: str, x: Tensor | None, like: Tensor) -> Arguments:
    """A scale, with stride 0 along what shares it."""
    if x is None:
        return {name: like, f"{name}_batch": 0, f"{name}_head": 0, f"{name}_token": 0}
    strides = [stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True)]
    return {name: x, f"{name}_batch": strides[0], f"{name}_head": strides[1], f"{name}_token": strides[2]}


def center_arguments(name: str, x: Tensor | None, like: Tensor) -> Arguments:
    if x is None:
        return {name: like, f"{name}_batch": 0}
    return {name: x, f"{name}_batch": x.shape[1] * x.shape[2] if x.shape[0] > 1 else 0}


def keep_arguments(keep: Tensor | None, like: Tensor) -> Arguments:
    if keep is None:
        return {"keep": like, "keep_batch": 0, "HAS_KEEP": False}
    return {"keep": keep, "keep_batch": keep.shape[1], "HAS_KEEP": True}


def new_floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _widths(query: Tensor, value: Tensor) -> tuple[Arguments, int]:
    """The widths and their blocks, and the padded width of values."""
    width, value_width = query.shape[3], value.shape[3]
    block_d = power_of_two(width)
    block_v = value_block(block_d, value_width)
    blocks = -(-value_width // block_v)
    sizes = {"D": width, "V": value_width, "BLOCK_D": block_d, "BLOCK_V": block_v, "VALUE_BLOCKS": blocks}
    return sizes, blocks * block_v


def padded_values(query: Tensor, value: Tensor) -> int:
    """The padded width of values."""
    return _widths(query, value)[1]


def contiguous_features(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def prepared(inputs: FarInputs) -> FarInputs:
    """Inputs as kernels read them: features are contiguous, masks are bytes, centres are float32."""
    query, key, value, keep_query, keep_key, alpha, beta, weight, center_query, center_key = inputs
    tokens = (contiguous_features(x) for x in (query, key, value))
    masks = (None if x is None else x.contiguous().view(torch.uint8) for x in (keep_query, keep_key))
    centers = (None if x is None else x.float().contiguous() for x in (center_query, center_key))
    return FarInputs(*tokens, *masks, alpha, beta, weight, *centers)


@functools.cache
def curve_arguments(head_dim: int, matching: Matching, form: Form, device: torch.device) -> Arguments:
    """The matching curve as the arguments of a kernel."""
    table = curves.TABLE
    rows = [] if matching == "linear" else curves.curve_rows(head_dim, matching, form=form)
    a, b = curves.linear_constants(head_dim, form=form)
    counts, variances = table["num_keys"], table["score_variance"]
    return {
        "curve": torch.tensor(rows or [[0.0]], dtype=torch.float32, device=device),
        "a": a,
        "b": b,
        "log_start": math.log(variances["start"]),
        "log_ratio": math.log(variances["ratio"]),
        "log_count": math.log(counts[0]),
        "log_count_ratio": math.log(counts[1] / counts[0]),
        "ROWS": len(rows),
        "COLUMNS": len(rows[0]) if rows else 0,
        "NARROW": form != "paper",
    }


class Launcher:
    """Launches kernels for tensors of one dtype and width."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self.sizes, self.value_width = _widths(query, value)
        self.widths = self.sizes["BLOCK_D"], self.sizes["BLOCK_V"]
        self.value_power = power_of_two(value.shape[3])
        self.dtype = query.dtype
        self.precision = precision_of(query.dtype)

    def __call__(self, kernel: str, *grid: int, needs: str = "", **arguments: Any) -> None:
        """`needs` names the sizes that a kernel takes."""
        sizes = {name: self.sizes[name] for name in needs.split()}
        launch(kernel, grid, widths=self.widths, dtype=self.dtype, **sizes, **arguments)

    def tile(self, kernel: str) -> int:
        return configs.config_of(kernel, *self.widths, is_float32=self.dtype == torch.float32).tile

    def tiles(self, kernel: str, tokens: int) -> int:
        return -(-tokens // self.tile(kernel))


ALL = "D V BLOCK_D BLOCK_V VALUE_BLOCKS"


def match(inputs: FarInputs, matching: Matching, form: Form, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """alpha and beta, (B, H, 1) or, causal, (B, H, N), from the statistics of the tokens."""
    query, key, value = inputs[:3]
    run = Launcher(query, value)
    (batch, heads, tokens, width), key_heads = query.shape, key.shape[1]
    curve = curve_arguments(width, matching, form, query.device)
    sides = (
        (query, inputs.keep_query, inputs.center_query),
        (key, inputs.keep_key, inputs.center_key),
    )
    alpha, beta = (new_floats(query, batch, heads, tokens if is_causal else 1) for _ in range(2))
    scales = {"alpha": alpha, "beta": beta, "heads": heads, "key_heads": key_heads, "D": width}
    if is_causal:
        found = []
        for x, keep, center in sides:
            tiles = run.tiles("token_moments_kernel", tokens)
            means = x.new_empty((*x.shape[:3],), dtype=torch.float64)
            variances = new_floats(x, *x.shape[:3])
            run(
                "token_moments_kernel",
                batch * x.shape[1] * tiles,
                needs="D BLOCK_D",
                **row_arguments("x", x),
                **keep_arguments(keep, x),
                **center_arguments("center", center, x),
                CENTERED=inputs.is_centered,
                **{"means": means, "variances": variances, "heads": x.shape[1], "tokens": tokens, "tiles": tiles},
            )
            found += [means, variances]
        names = ("query_means", "query_variances", "key_means", "key_variances")
        arguments = dict(zip(names, found, strict=True)) | scales | curve
        run("prefix_match_kernel", batch * heads, tokens=tokens, **keep_arguments(inputs.keep_key, key), **arguments)
        return alpha, beta
    block = run.sizes["BLOCK_D"]
    arguments = {}
    for name, (x, keep, _) in zip(("query", "key"), sides, strict=True):
        splits, split_tokens = split_of(x.shape[2])
        pairs = batch * x.shape[1]
        means, squares = new_floats(x, pairs * splits, block), new_floats(x, pairs * splits, block, block)
        counts = new_floats(x, pairs * splits)
        columns = min(block, max(configs.NARROWEST, configs.SUM_ENTRIES // block))
        run(
            "moments_kernel",
            pairs * splits,
            block // columns,
            needs="D BLOCK_D",
            **row_arguments("x", x),
            **keep_arguments(keep, x),
            **{"means": means, "squares": squares, "counts": counts, "heads": x.shape[1], "tokens": x.shape[2]},
            **{"split_tokens": split_tokens, "splits": splits, "BLOCK_C": columns, "PRECISION": run.precision},
        )
        arguments |= {f"{name}_means": means, f"{name}_squares": squares, f"{name}_counts": counts}
        arguments[f"{name}_splits"] = splits
    centers = center_arguments("center_query", inputs.center_query, query) | center_arguments("center_key", inputs.center_key, key)
    run(
        "match_kernel",
        batch * heads,
        BLOCK_D=block,
        BLOCK_C=min(block, 16 if block > 64 else 32),
        CENTERED=inputs.is_centered,
        **(arguments | centers | scales | curve),
    )
    return alpha, beta


class Summary(NamedTuple):
    """Largest log-weights and weights (B H splits, BLOCK_D), and sums (B H splits, BLOCK_D, values)."""

    tops: Tensor
    weights: Tensor
    sums: Tensor


def new_summary(run: Launcher, like: Tensor, number: int) -> Summary:
    block = run.sizes["BLOCK_D"]
    return Summary(new_floats(like, number, block), new_floats(like, number, block), new_floats(like, number, block, run.value_width))


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
        **{"split_tokens": split_tokens, "splits": splits, "HAS_SHIFT": inputs.key_weight is not None},
        **{"HAS_FACTOR": False, "IS_QUERY": False, "CENTERED": inputs.is_centered, "NORMALIZED": form != "paper"},
        PRECISION=run.precision,
    )
    return found


def running(run: Launcher, found: Summary, pairs: int, *, reverse: bool) -> Summary:
    """The summary of all splits before each, or after it."""
    starts = new_summary(run, found.sums, found.tops.shape[0])
    _combine(run, found, pairs, starts, found.tops, found.sums, reverse=reverse, is_running=True)
    return starts


def _combine(
    run: Launcher, found: Summary, pairs: int, starts: Summary, mass: Tensor, values: Tensor, *, reverse: bool, is_running: bool
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
        **{"starts_top": starts.tops, "starts_weight": starts.weights, "starts_sums": starts.sums},
        **{"mass": mass, "values": values, "splits": found.tops.shape[0] // pairs, "BLOCK_F": features},
        **{"REVERSE": reverse, "RUNNING": is_running},
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
    run = Launcher(inputs.query, inputs.value)
    output = new_rows(inputs.query, inputs.value.shape[3])
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
    mass, values = new_floats(output, batch, heads, found.tops.shape[1]), new_floats(output, batch, heads, *found.sums.shape[1:])
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
        **{"mass": mass, "values": values, "heads": heads, "tokens": tokens, "splits": splits},
        **{"split_tokens": configs.RECALL_TOKENS, "CENTERED": inputs.is_centered, "PRECISION": run.precision},
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
        **{"heads": query.shape[1], "groups": query.shape[1] // key.shape[1], "tokens": query.shape[2]},
        **{"split_tokens": split_tokens, "splits": splits, "HAS_WEIGHT": inputs.key_weight is not None},
        **{"CENTERED": inputs.is_centered, "NORMALIZED": form != "paper", "PRECISION": run.precision},
    }
