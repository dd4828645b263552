"""alpha and beta from the statistics of tokens: what is allocated, and which kernels run on it."""

import functools
import math

import torch
from torch import Tensor

from lln.backends.triton import configs
from lln.backends.triton.arguments import (
    Arguments,
    FarInputs,
    Launcher,
    center_arguments,
    keep_arguments,
    new_floats,
    row_arguments,
)
from lln.backends.triton.configs import split_of
from lln.matching import curves
from lln.matching.curves import Form, Matching


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
    scales: Arguments = {"alpha": alpha, "beta": beta, "heads": heads, "key_heads": key_heads, "D": width}
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
                means=means,
                variances=variances,
                heads=x.shape[1],
                tokens=tokens,
                tiles=tiles,
            )
            found += [means, variances]
        names = ("query_means", "query_variances", "key_means", "key_variances")
        sums: Arguments = dict(zip(names, found, strict=True)) | scales | curve
        run("prefix_match_kernel", batch * heads, tokens=tokens, **keep_arguments(inputs.keep_key, key), **sums)
        return alpha, beta
    block = run.sizes["BLOCK_D"]
    arguments: Arguments = {}
    for name, (x, keep, _) in zip(("query", "key"), sides, strict=True):
        splits, split_tokens = split_of(x.shape[2])
        pairs = batch * x.shape[1]
        means, squares = new_floats(x, pairs * splits, block), new_floats(x, pairs * splits, block, block)
        counts = new_floats(x, pairs * splits)
        columns = min(block, (configs.SUM_ENTRIES if block <= 128 else configs.FLOAT32_SUM_ENTRIES) // block)
        run(
            "moments_kernel",
            pairs * splits,
            block // columns,
            needs="D BLOCK_D",
            **row_arguments("x", x),
            **keep_arguments(keep, x),
            means=means,
            squares=squares,
            counts=counts,
            heads=x.shape[1],
            tokens=x.shape[2],
            split_tokens=split_tokens,
            splits=splits,
            BLOCK_C=columns,
            PRECISION=run.precision,
        )
        arguments |= {f"{name}_means": means, f"{name}_squares": squares, f"{name}_counts": counts}
        arguments[f"{name}_splits"] = splits
    centers = center_arguments("center_query", inputs.center_query, alpha) | center_arguments(
        "center_key", inputs.center_key, beta
    )
    run(
        "match_kernel",
        batch * heads,
        BLOCK_D=block,
        BLOCK_C=min(block, 16 if block > 64 else 32),
        CENTERED=inputs.is_centered,
        **(arguments | centers | scales | curve),
    )
    return alpha, beta
