"""Moment matching (A.7): how concentrated softmax attention would be, and the alpha and beta that make LLN the same.

    alpha = s / (sqrt(2) sigma_q)     beta = s / (sqrt(2) sigma_k)                                          (eq. 10)

sigma_q and sigma_k are the standard deviations of all entries of the queries and keys, and the spread s² follows from
the variance of the softmax scores q_i . k_j / sqrt(D) by a matching curve (`lln.matching.curves`).

Whose statistics: per sample and head over the kept tokens (`scope="sample"`), so that no result depends on the rest of
the batch or on padding; or pooled over the whole batch (`scope="batch"`), as the paper's code has it. With a causal
mask only the past may count: token t has the alpha and beta of the tokens up to t, and each key keeps the beta that it
got when it came, so that an attention over a million tokens is still a recurrence of constant size.

Shapes: B batch, H heads, N queries, M keys, D features of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lln.checks import check_choice, check_inputs
from lln.masks import fill_padding, kept_tokens, read_paddings
from lln.matching.curves import Form, Matching, linear_constants, matched_spread
from lln.precision import accumulator, in_full_precision, sum_dtype

Scope = Literal["sample", "batch"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# Long sequences pass through in pieces of at most this many tokens, so that what is computed on the way stays small.
CHUNK_TOKENS = 2048
# What is computed for one piece has about this many entries: a processor keeps them in its cache, and an accelerator
# needs many more at once to be busy. (Tokens of a piece: see `piece_tokens`.)
PIECE_ENTRIES, ACCELERATOR_FACTOR = 2**20, 16

# Statistics replace larger entries by this, so that no square or sum of squares overflows float32.
LARGEST_ENTRY = 1e15
# Entries that vary less than this count as constant: alpha and beta are 0, which is as good as any value for them.
SMALLEST_SIGMA = 1e-30


@dataclass(frozen=True)
class Moments:
    """Statistics of queries and keys: (B, H) tensors, or (B, H, N) with those of each prefix if they are causal."""

    sigma_q: Tensor
    sigma_k: Tensor
    score_variance: Tensor  # of q_i . k_j / sqrt(D) over all pairs of kept tokens: that of eq. 5
    row_variance: Tensor  # of the same around the mean of each row: what is left of it after softmax
    num_keys: Tensor

    def scales(self, *, head_dim: int, matching: Matching, form: Form = "paper") -> tuple[Tensor, Tensor]:
        """alpha and beta of eq. 10.

        Softmax cancels what all scores of a row have in common, which keys with a mean far from zero make large;
        so what is matched is the variance within rows. With keys around zero, as the paper assumes, both are the same.
        """
        spread = matched_spread(self.row_variance, self.num_keys, head_dim=head_dim, matching=matching, form=form)
        share = (spread / 2).sqrt()
        return _divide(share, self.sigma_q), _divide(share, self.sigma_k)


class PrefixSums(NamedTuple):
    """What the statistics of a growing sequence keep of its past."""

    tokens: Tensor  # (B,) kept so far
    query: Tensor  # (B, H, 3) sums over tokens of the mean of its entries, the mean's square, and their variance
    key: Tensor  # (B, H, 3)


def measure_moments(
    query: Tensor,
    key: Tensor,
    *,
    scope: Scope = "sample",
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Moments:
    """sigma_q, sigma_k and the score variance of query (B, H, N, D) and key (B, H_k, M, D) in O(N D²).

    - `scope="sample"`: per sample and head, the exact variance of all scores, with the paper's C_cross in it;
    - `scope="batch"`: one sigma_q and sigma_k for everything and the product sigma_q² sigma_k² for the variance, with
      the unbiased estimate of the sigmas: the paper's code;
    - `is_causal=True`: the statistics of each prefix, with the product form, because the scores of a few tokens tell
      little about their variance while sigma_q and sigma_k are right to 20 % from the first token on (D = 64).
    """
    check_choice("scope", scope, SCOPES)
    check_inputs(query, key, same_length="is_causal=True" if is_causal else None)
    check_causal_options(is_causal, scope, query_padding_mask)
    keep_query, keep_key = read_paddings(query, key, key_padding_mask, query_padding_mask)
    return moments_of(query, key, keep_query, keep_key, scope=scope, is_causal=is_causal)


@in_full_precision
def moments_of(
    query: Tensor, key: Tensor, keep_query: Tensor | None, keep_key: Tensor | None, *, scope: Scope, is_causal: bool
) -> Moments:
    """As `measure_moments`, for input that was checked."""
    query, key = query.detach(), key.detach()  # torch.no_grad() would make a graph that torch.export cannot load
    if is_causal:
        moments, _ = prefix_moments(query, key, keep_key, empty_sums(query))
        return moments
    if scope == "batch":
        return _batch_moments(query, key, keep_query, keep_key)
    groups = query.shape[1] // key.shape[1]
    mean_q, covariance_q, _ = feature_moments(query, keep_query)
    mean_k, covariance_k, num_keys = feature_moments(key, keep_key)
    if groups > 1:
        mean_k, covariance_k = (x.repeat_interleave(groups, dim=1) for x in (mean_k, covariance_k))
    sigma_q, sigma_k = _entry_sigma(mean_q, covariance_q), _entry_sigma(mean_k, covariance_k)
    # With q = m_q + dq and k = m_k + dk, the variance of q . k is that of dq . dk, dq . m_k and m_q . dk: three terms
    # that are not negative, where E[x²] - E[x]² would cancel. In units of the root mean square so that all stay finite.
    unit_q, mean_q, covariance_q = _in_units(mean_q, covariance_q)
    unit_k, mean_k, covariance_k = _in_units(mean_k, covariance_k)
    within_rows = (covariance_q * covariance_k).sum(dim=(-2, -1)) + _quadratic(covariance_k, mean_q)
    between_rows = _quadratic(covariance_q, mean_k)
    scale = _square_of_product(unit_q, unit_k) / query.shape[-1]
    return Moments(sigma_q, sigma_k, (within_rows + between_rows) * scale, within_rows * scale, num_keys)


def check_causal_options(is_causal: bool, scope: Scope, query_padding_mask: Tensor | None) -> None:
    if is_causal and scope == "batch":
        raise ValueError('scope="batch" takes whole sequences; with is_causal=True use scope="sample"')
    if is_causal and query_padding_mask is not None:
        raise ValueError("with is_causal=True the queries are the keys' tokens; leave query_padding_mask out")


def softmax_temperature(score_variance: Tensor) -> Tensor:
    """The temperature of softmax attention, 1 / sigma_sm (eq. 5); infinite for scores that are all the same."""
    return score_variance.rsqrt()


def lln_temperature(alpha: Tensor, beta: Tensor, sigma_q: Tensor, sigma_k: Tensor, *, head_dim: int) -> Tensor:
    """The temperature of LLN attention, 1 / sqrt(a (alpha² sigma_q² + beta² sigma_k²) + b) (eq. 11).

    The line a s² + b is a fit for broad spreads; where it is not positive the temperature is given as infinite.
    """
    a, b = linear_constants(head_dim)
    return (a * ((alpha * sigma_q).square() + (beta * sigma_k).square()) + b).clamp(min=0.0).rsqrt()


def empty_sums(query: Tensor) -> PrefixSums:
    """The statistics of no tokens, for query (B, H, N, D)."""
    batch, heads = query.shape[:2]
    zeros = torch.zeros(batch, heads, 3, dtype=sum_dtype(query.device), device=query.device)
    return PrefixSums(torch.zeros(batch, dtype=torch.int64, device=query.device), zeros, zeros)


@in_full_precision
def prefix_moments(query: Tensor, key: Tensor, keep: Tensor | None, past: PrefixSums) -> tuple[Moments, PrefixSums]:
    """Moments (B, H, N) of the past and the tokens up to each one, and what is kept after the last."""
    query, key = query.detach(), key.detach()
    groups = query.shape[1] // key.shape[1]
    count = past.tokens[:, None] + kept_tokens(keep, query).cumsum(dim=1)
    tokens = count.clamp(min=1)[:, None, :, None]
    sigma_q, sums_q = _prefix_sigmas(query, keep, past.query, tokens, 1)
    sigma_k, sums_k = _prefix_sigmas(key, keep, past.key, tokens, groups)
    product = _square_of_product(sigma_q, sigma_k)
    moments = Moments(sigma_q, sigma_k, product, product, count[:, None].expand_as(sigma_q))
    return moments, PrefixSums(count[:, -1], sums_q, sums_k)


def chunks(tokens: int, size: int | None = None) -> Iterator[slice]:
    """Slices of at most `size` tokens; one slice while compiling, where the length may be symbolic."""
    size = size or CHUNK_TOKENS
    if torch.compiler.is_compiling() or tokens <= size:
        yield slice(0, tokens)
    else:
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))


def piece_tokens(*shape: int, device: torch.device) -> int:
    """Tokens of a piece that has `shape` entries for each token."""
    if torch.compiler.is_compiling():
        return CHUNK_TOKENS  # not used then, see `chunks`
    factor = 1 if device.type == "cpu" else ACCELERATOR_FACTOR
    wanted = max(64, factor * PIECE_ENTRIES // max(1, math.prod(shape)) // 64 * 64)
    return min(wanted, factor * CHUNK_TOKENS)


def pieces(x: Tensor, keep: Tensor | None, size: int | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """`x` (B, heads, tokens, features) chunk by chunk in the accumulator's dtype, padding blanked, and what is kept."""
    for part, piece in zip(chunks(x.shape[2], size), cut(x, size), strict=True):
        kept = None if keep is None else keep[:, part]
        yield fill_padding(piece.to(accumulator(x.dtype)), kept), kept


def cut(x: Tensor, size: int | None = None) -> tuple[Tensor, ...]:
    """The pieces of `x` at `chunks`; unlike slices, whose gradients are each as large as `x`, they split it at once."""
    size = size or CHUNK_TOKENS
    if torch.compiler.is_compiling() or x.shape[2] <= size:
        return (x,)
    parts: tuple[Tensor, ...] = torch.split(x, size, dim=2)
    return parts


def not_finite(x: Tensor, *dims: int) -> Tensor:
    """NaN where an entry along `dims` is not finite, else 0, without overflow.

    An exponential would hide -inf, and a bound on the entries any infinity: this is added to what must show them.
    """
    x = x.detach()
    return x.amin(dim=dims, keepdim=True) * 0 + x.amax(dim=dims, keepdim=True) * 0


def feature_moments(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (B, H, D) and covariance (B, H, D, D) of the kept tokens, and their number (B, 1).

    One pass: each piece is centred around its own mean, and what the means of two pieces differ by is added when they
    are put together (Chan, Golub and LeVeque), so nothing cancels.
    """
    found: tuple[Tensor, Tensor, Tensor] | None = None
    for part, kept in pieces(x, keep, piece_tokens(*x.shape[:2], x.shape[3], device=x.device)):
        new = count_tokens(part, kept)[..., None]
        entries = bounded(part)
        new_mean = (entries.sum(dim=2) + not_finite(part, 2, 3)[..., 0]) / new.clamp(min=1.0)
        centred = fill_padding(entries.sub_(new_mean[:, :, None]), kept)
        new_squares = centred.mT @ centred
        if found is None:
            found = new, new_mean, new_squares
            continue
        count, mean, squares = found
        share = new / (count + new).clamp(min=1.0)
        step = new_mean - mean
        squares = torch.addcmul(squares + new_squares, step[..., None], (step * (count * share))[..., None, :])
        found = count + new, mean + step * share, squares
    assert found is not None
    count, mean, squares = found
    return mean, squares / count.clamp(min=1.0)[..., None], count[..., 0]


def _entry_sigma(mean: Tensor, covariance: Tensor) -> Tensor:
    """Standard deviation (B, H) of all entries: within the features, and between their means."""
    within = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    return (within + mean.var(dim=-1, correction=0)).sqrt()


def _quadratic(matrix: Tensor, vector: Tensor) -> Tensor:
    return (vector[..., None, :] @ matrix @ vector[..., None])[..., 0, 0]


def _in_units(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The root mean square of all entries, and mean and covariance measured in it."""
    square = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1) + mean.square().mean(dim=-1)
    unit = square.sqrt().clamp(min=SMALLEST_SIGMA)
    return unit, mean / unit[..., None], covariance / unit[..., None, None] / unit[..., None, None]


def _batch_moments(query: Tensor, key: Tensor, keep_query: Tensor | None, keep_key: Tensor | None) -> Moments:
    shape = query.shape[:2]
    sigma_q, sigma_k = (_unbiased_sigma(x, keep).expand(shape) for x, keep in ((query, keep_query), (key, keep_key)))
    product = _square_of_product(sigma_q, sigma_k)
    return Moments(sigma_q, sigma_k, product, product, count_tokens(key, keep_key).expand(shape))


def _unbiased_sigma(x: Tensor, keep: Tensor | None) -> Tensor:
    """Standard deviation () of every entry of every kept token."""
    entries = count_tokens(x, keep).sum() * x.shape[1] * x.shape[3]
    size = piece_tokens(*x.shape[:2], x.shape[3], device=x.device)
    total = sum(bounded(part).sum() + not_finite(part, 0, 1, 2, 3).sum() for part, _ in pieces(x, keep, size))
    mean = total / entries.clamp(min=1.0)
    squares = sum(fill_padding(bounded(part) - mean, kept).square().sum() for part, kept in pieces(x, keep, size))
    return (squares / (entries - 1).clamp(min=1.0)).sqrt()


def entry_sums(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean of the entries of each token, its square, and their variance, (B, H, tokens, 3); 0 for a blank one."""
    entries = bounded(part)
    origin = entries[
        ..., :1
    ]  # equal entries must have a variance of exactly 0, which their rounded mean would not give
    apart = entries - origin
    mean = apart.mean(dim=-1, keepdim=True)
    within = (apart - mean).square().mean(dim=-1).to(dtype)  # torch.var takes ten times as long
    mean = (origin.to(dtype) + mean.to(dtype) + not_finite(part, -1))[..., 0]
    return torch.stack((mean, mean.square(), within), dim=-1)


def _prefix_sigmas(x: Tensor, keep: Tensor | None, sums: Tensor, tokens: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Standard deviation (B, H, N) of all entries up to each token, and the sums (B, H, 3) after the last one."""
    size = piece_tokens(*x.shape[:2], x.shape[3], device=x.device)
    sigmas = []
    for (part, _), number in zip(pieces(x, keep, size), cut(tokens, size), strict=True):
        steps = entry_sums(part, sums.dtype).cumsum(dim=2)
        running = sums[:, :, None] + (steps if groups == 1 else steps.repeat_interleave(groups, dim=1))
        mean, square, within = (running / number).unbind(dim=-1)
        sigmas.append((within + (square - mean.square()).clamp(min=0.0)).sqrt().to(accumulator(x.dtype)))
        sums = running[:, :, -1]
    return torch.cat(sigmas, dim=2), sums


def count_tokens(x: Tensor, keep: Tensor | None) -> Tensor:
    """Kept tokens of each sample, (B, 1)."""
    if keep is None:
        return torch.full((x.shape[0], 1), x.shape[2], dtype=accumulator(x.dtype), device=x.device)
    return keep.sum(dim=1, keepdim=True).to(accumulator(x.dtype))


def bounded(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_ENTRY, LARGEST_ENTRY)


def _divide(share: Tensor, sigma: Tensor) -> Tensor:
    return torch.where(sigma <= SMALLEST_SIGMA, torch.zeros_like(share), share / sigma.clamp(min=SMALLEST_SIGMA))


def _square_of_product(sigma_q: Tensor, sigma_k: Tensor) -> Tensor:
    return (sigma_q * sigma_k).clamp(max=LARGEST_ENTRY).square()
