"""The temperature of attention: the inverse of the spread of its scores (eq. 5 and 11)."""

from typing import Unpack

import torch
from torch import Tensor

from lln.instruments.lognormality import statistics
from lln.instruments.reading import Options, measure, read, scaled_inputs
from lln.instruments.rows import Rows, SoftmaxRows
from lln.matching.moments import lln_temperature, measure_moments, softmax_temperature


@torch.no_grad()
def temperature(attention: Tensor, key: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """How soft attention is; infinite if all scores are the same.

        softmax, block_diagonal   tau = 1 / sigma_sm, sigma_sm² the variance of the scores q . k / sqrt(D)   (eq. 5)
        lln                       tau = 1 / sqrt(a (alpha² sigma_q² + beta² sigma_k²) + b)                    (eq. 11)
        lln with `features`       tau = 1 / sqrt(Var ln P): eq. 11 is for matched alpha and beta
        lln_diag                  that of its LLN branch
        an explicit matrix        tau = 1 / sqrt(Var ln P), which is sigma_sm where proposition 3.1 holds

    Only scores that the masks let count are measured: of kept tokens, of the past with a causal mask, of the same block
    for `block_diagonal`. For LLN the variances are those of alpha q and beta k over the kept tokens, so that an alpha
    for each token is included.

    Args:
        attention, key, options: as in `lln.instruments.entropy`.

    Returns:
        A tensor with the leading dimensions of the input, (B, H) for query and key.

    Raises:
        ValueError: the input is no stochastic matrix, or query, key and options do not fit.

    Example:
        >>> query, key = torch.randn(2, 1, 4, 100, 16)
        >>> colder = temperature(4 * query, key, kind="softmax")
        >>> bool((colder < temperature(query, key, kind="softmax")).all())
        True
    """
    if key is None:
        return measure(_of_matrix, attention, key, options)
    read(attention, key, options)  # refuses what is wrong with the input
    kind, keep = options.get("kind", "lln"), options.get("key_padding_mask")
    if options.get("features") is not None:
        return measure(_of_matrix, attention, key, options | {"kind": "lln"})
    if kind in ("lln", "lln_diag"):
        a, b = scaled_inputs(attention, key, options)
        spread = measure_moments(a, b, key_padding_mask=keep)
        one = torch.ones_like(spread.sigma_q)
        return lln_temperature(one, one, spread.sigma_q, spread.sigma_k, head_dim=attention.shape[-1])
    if kind == "softmax" and not options.get("is_causal", False):
        return softmax_temperature(measure_moments(attention, key, key_padding_mask=keep).score_variance)
    return measure(of_scores, attention, key, options)


def _of_matrix(rows: Rows) -> Tensor:
    return statistics(rows)[:, 1].rsqrt()


def of_scores(rows: Rows) -> Tensor:
    """From the scores that the softmax is taken of, in two passes."""
    assert isinstance(rows, SoftmaxRows)
    zero = torch.zeros(rows.heads, 1, 1, dtype=torch.float64, device=rows.index.device)
    mean, variance = zero, zero
    count = sum(int(rows.weighted(index).expand(len(index), -1).sum()) for index in rows.parts())
    for index in rows.parts():
        scores = rows.scores(index).masked_fill(~rows.weighted(index), 0.0)
        mean = mean + scores.sum(dim=(1, 2), keepdim=True, dtype=torch.float64) / count
    for index in rows.parts():
        deviation = (rows.scores(index) - mean).masked_fill(~rows.weighted(index), 0.0)
        variance = variance + deviation.square().sum(dim=(1, 2), keepdim=True, dtype=torch.float64) / count
    return softmax_temperature(variance[:, 0, 0])
