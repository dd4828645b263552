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
    center_of,
    keep_of,
    new_floats,
    rows_of,
)
from lln.backends.triton.kernels.moments import Curve, Moments
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
        "curve": Curve(
            torch.tensor(rows or [[0.0]], dtype=torch.float32, device=device),
            a,
            b,
            math.log(variances["start"]),
            math.log(variances["ratio"]),
            math.log(counts[0]),
            math.log(counts[1] / counts[0]),
        ),
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
        sums_of_sides = []
        for x, keep, center in sides:
            tiles = run.tiles("token_moments_kernel", tokens)
            means = x.new_empty((*x.shape[:3],), dtype=torch.float64)
            variances = new_floats(x, *x.shape[:3])
            run(
                "token_moments_kernel",
                batch * x.shape[1] * tiles,
                needs="D BLOCK_D",
                x=rows_of(x),
                keep=keep_of(keep),
                center=center_of(center),
                means=means,
                variances=variances,
                heads=x.shape[1],
                tokens=tokens,
                tiles=tiles,
            )
            sums_of_sides += [means, variances]
        names = ("query_means", "query_variances", "key_means", "key_variances")
        sums: Arguments = dict(zip(names, sums_of_sides, strict=True)) | scales | curve
        run("prefix_match_kernel", batch * heads, tokens=tokens, keep=keep_of(inputs.keep_key), **sums)
        return alpha, beta
    block = run.sizes["BLOCK_D"]
    splits = run.split(tokens), run.split(key.shape[2])
    sizes = [batch * x.shape[1] * number for x, (number, _) in zip((query, key), splits, strict=True)]
    found = [
        Moments(new_floats(query, n, block), new_floats(query, n, block, block), new_floats(query, n)) for n in sizes
    ]
    both: Arguments = {"queries": found[0], "keys": found[1], "query_splits": splits[0][0], "key_splits": splits[1][0]}
    columns = min(block, (configs.SUM_ENTRIES if block <= 128 else configs.FLOAT32_SUM_ENTRIES) // block)
    run(
        "moments_kernel",
        max(sizes),
        block // columns,
        2,
        needs="D BLOCK_D",
        query=rows_of(query),
        key=rows_of(key),
        keep_query=keep_of(inputs.keep_query),
        keep_key=keep_of(inputs.keep_key),
        center_query=center_of(inputs.center_query),
        center_key=center_of(inputs.center_key),
        **both,
        batches=batch,
        heads=heads,
        key_heads=key_heads,
        tokens=tokens,
        key_tokens=key.shape[2],
        query_split_tokens=splits[0][1],
        key_split_tokens=splits[1][1],
        BLOCK_C=columns,
        PRECISION=run.precision,
    )
    run(
        "match_kernel",
        batch * heads,
        BLOCK_D=block,
        BLOCK_C=min(block, 16 if block > 64 else 32),
        **(both | scales | curve),
    )
    return alpha, beta
