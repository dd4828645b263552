"""Softmax attention among neighbours: what is allocated, and which kernels run on it. Shapes as in `launch`."""

import torch
from torch import Tensor

from lln.backends.base import empty_rows
from lln.backends.triton.arguments import Arguments, Launcher, contiguous_features, new_floats, row_arguments
from lln.backends.triton.backward import row_dots
from lln.masks import front_order


def _arguments(
    run: Launcher,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    block_size: int,
    *,
    is_window: bool,
    is_causal: bool,
) -> Arguments:
    tokens = query.shape[2]
    left, right = min(block_size, tokens), 0
    if is_window:
        right = 0 if is_causal else min(block_size // 2, tokens)
        left = min(block_size - 1 - (0 if is_causal else block_size // 2), tokens)
    order = counts = query
    if keep is not None:
        order, counts = front_order(keep).to(torch.int32), keep.sum(dim=1, dtype=torch.int32)
    sizes = {"D": query.shape[3], "V": value.shape[3], "BLOCK_D": run.sizes["BLOCK_D"], "BLOCK_V": run.value_power}
    return {
        **row_arguments("query", query),
        **row_arguments("key", key),
        **row_arguments("value", value),
        "order": order,
        "counts": counts,
        "groups": query.shape[1] // key.shape[1],
        "tokens": tokens,
        "left": left,
        "right": right,
        "scale": query.shape[3] ** -0.5,
        "HAS_ORDER": keep is not None,
        "IS_WINDOW": is_window,
        "IS_CAUSAL": is_causal,
        "PRECISION": run.precision,
        **sizes,
    }


def near_forward(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, block_size: int, *, is_window: bool, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of the scores of each token, (B, H, N)."""
    query, key, value = (contiguous_features(x) for x in (query, key, value))
    run = Launcher(query, value)
    output, logs = empty_rows(query, value.shape[3]), new_floats(query, *query.shape[:3])
    tiles = run.tiles("near_kernel", query.shape[2])
    run(
        "near_kernel",
        query.shape[0] * query.shape[1] * tiles,
        **_arguments(run, query, key, value, keep, block_size, is_window=is_window, is_causal=is_causal),
        **row_arguments("output", output),
        logs=logs,
        heads=query.shape[1],
        tiles=tiles,
    )
    return output, logs


def near_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    output: Tensor,
    logs: Tensor,
    block_size: int,
    *,
    is_window: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    query, key, value, gradient = (contiguous_features(x) for x in (query, key, value, gradient))
    run = Launcher(query, value)
    d_query, d_key, d_value = (empty_rows(x, x.shape[3]) for x in (query, key, value))
    arguments = {
        **_arguments(run, query, key, value, keep, block_size, is_window=is_window, is_causal=is_causal),
        **row_arguments("gradient", gradient),
        "logs": logs,
        "dots": row_dots(run, gradient, output),
    }
    tiles = run.tiles("near_queries_backward_kernel", query.shape[2])
    run(
        "near_queries_backward_kernel",
        query.shape[0] * query.shape[1] * tiles,
        **arguments,
        **row_arguments("d_query", d_query),
        heads=query.shape[1],
        tiles=tiles,
    )
    tiles = run.tiles("near_keys_backward_kernel", query.shape[2])
    run(
        "near_keys_backward_kernel",
        query.shape[0] * key.shape[1] * tiles,
        **arguments,
        **row_arguments("d_key", d_key),
        **row_arguments("d_value", d_value),
        key_heads=key.shape[1],
        tiles=tiles,
    )
    return d_query, d_key, d_value
