"""Softmax attention among neighbours: what is allocated, and which kernels run on it. Shapes as in `launch`."""

import torch
from torch import Tensor

from lln.backends.base import empty_rows
from lln.backends.triton.arguments import Arguments, Launcher, contiguous_features, new_floats, rows_of, scale_of
from lln.backends.triton.kernels.near import Tokens
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
    size = left = right = min(block_size, tokens)
    if is_window:
        size, right = tokens, min(block_size // 2, tokens)
        left = min(block_size - 1 - (0 if is_causal else block_size // 2), tokens)
    order = counts = None
    if keep is not None:
        order, counts = front_order(keep).to(torch.int32), keep.sum(dim=1, dtype=torch.int32)
    return {
        "x": Tokens(rows_of(query), rows_of(key), rows_of(value), order, counts),
        "groups": query.shape[1] // key.shape[1],
        "tokens": tokens,
        "left": left,
        "right": 0 if is_causal else right,
        "size": max(size, 1),
        "scale": query.shape[3] ** -0.5,
        "PRECISION": run.precision,
        "D": query.shape[3],
        "V": value.shape[3],
        "BLOCK_D": run.sizes["BLOCK_D"],
        "BLOCK_V": run.value_power,
    }


def near_forward(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, block_size: int, *, is_window: bool, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of the scores of each token, (B, H, N), 0 for those that are not kept."""
    query, key, value = (contiguous_features(x) for x in (query, key, value))
    run = Launcher(query, value)
    output, logs = empty_rows(query, value.shape[3]), new_floats(query, *query.shape[:3])
    tiles = run.tiles("near_kernel", query.shape[2])
    run(
        "near_kernel",
        query.shape[0] * query.shape[1] * tiles,
        **_arguments(run, query, key, value, keep, block_size, is_window=is_window, is_causal=is_causal),
        output=rows_of(output),
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
    logs: Tensor,
    d_logs: Tensor | None,
    block_size: int,
    *,
    is_window: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from those of the output and, if it has one, of the logsumexp."""
    query, key, value, gradient = (contiguous_features(x) for x in (query, key, value, gradient))
    run = Launcher(query, value)
    d_query, d_key, d_value = (empty_rows(x, x.shape[3]) for x in (query, key, value))
    arguments = {
        **_arguments(run, query, key, value, keep, block_size, is_window=is_window, is_causal=is_causal),
        "gradient": rows_of(gradient),
        "logs": scale_of(logs),
    }
    dots = torch.empty_like(logs)
    tiles = run.tiles("near_queries_backward_kernel", query.shape[2])
    run(
        "near_queries_backward_kernel",
        query.shape[0] * query.shape[1] * tiles,
        **arguments,
        d_logs=scale_of(d_logs),
        dots=dots,
        d_query=rows_of(d_query),
        heads=query.shape[1],
        tiles=tiles,
    )
    tiles = run.tiles("near_keys_backward_kernel", query.shape[2])
    run(
        "near_keys_backward_kernel",
        query.shape[0] * key.shape[1] * tiles,
        **arguments,
        dots=scale_of(dots),
        d_key=rows_of(d_key),
        d_value=rows_of(d_value),
        key_heads=key.shape[1],
        tiles=tiles,
    )
    return d_query, d_key, d_value
