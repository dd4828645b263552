"""Statistics of sequences whose parts several processes hold: those of the whole sequence, on every process.

Means are merged first. Each process then has its squares around the common mean, of which the entries of the two
covariances go to owners: all that is needed of them is the sum of their products, a number for each head. In causal
attention a process needs the sums of the tokens before it.

Shapes: P processes, B batch, H heads, H_k key heads, D features of a head.
"""

import torch
from torch import Tensor

from lln.distributed.merge import Layout, rows_of
from lln.masks import fill_padding
from lln.matching.moments import (
    LARGEST_ENTRY,
    SMALLEST_SIGMA,
    Moments,
    PrefixSums,
    bounded,
    empty_sums,
    entry_sums,
    feature_moments,
    not_finite,
    piece_tokens,
    pieces,
    prefix_moments,
)
from lln.precision import accumulator, sum_dtype
from lln.problem import Centers, Problem

FEW = 16  # processes up to which sums of a few numbers are sent to all at once: with more, in one exchange more


def sample_centers(problem: Problem, layout: Layout) -> Centers:
    """The means (B, H, D) and (B, H_k, D) of the kept queries and keys of each sequence."""
    # In float64, so that the mean of equal tokens is that token: what rounding leaves of it would be scaled to one.
    sums = [
        fill_padding(x, keep).sum(dim=2, dtype=sum_dtype(x.device))
        for x, keep in ((problem.query, problem.queries.keep), (problem.key, problem.keys.keep))
    ]
    counts = torch.stack([layout.total(side) for side in (0, 1)]).clamp(min=1).to(sums[0])
    total = layout.sum(rows_of(sums), layout.together)
    means = torch.split(total, [sums[0][0].numel(), sums[1][0].numel()], dim=1)
    dtype = accumulator(problem.query.dtype)
    center_q, center_k = (
        (mean / count[:, None]).view(x.shape).to(dtype) for mean, count, x in zip(means, counts, sums, strict=True)
    )
    return center_q, center_k


def scales(problem: Problem, layout: Layout) -> tuple[Tensor, Tensor]:
    """As `Problem.scales`, from the statistics of whole sequences; (B, H, 1), or (B, H, tokens) if causal."""
    if problem.alpha is not None and problem.beta is not None:
        return problem.alpha, problem.beta
    query, key = problem.query.detach(), problem.key.detach()
    if problem.is_causal:
        keep = problem.keys.keep
        moments = moments_after(query, key, keep, sums_before(query, key, keep, layout))
    elif problem.scope == "batch":
        moments = _batch_moments(problem, query, key, layout)
    else:
        moments = _sample_moments(problem, query, key, layout)
    alpha, beta = moments.scales(head_dim=query.shape[3], matching=problem.matching, form=problem.form)
    if not problem.is_causal:
        alpha, beta = alpha[..., None], beta[..., None]
    return (alpha if problem.alpha is None else problem.alpha), (beta if problem.beta is None else problem.beta)


def _sample_moments(problem: Problem, query: Tensor, key: Tensor, layout: Layout) -> Moments:
    found = [_own_moments(query, problem.queries.keep), _own_moments(key, problem.keys.keep)]
    heads, key_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    dtype = found[0][0].dtype
    own = [layout.tokens[layout.ranks.rank, side].to(query.device, dtype)[:, None, None] for side in (0, 1)]
    total = [layout.total(side).to(query.device, dtype)[:, None, None] for side in (0, 1)]
    sums = layout.sum(rows_of([mean * count for (mean, _), count in zip(found, own, strict=True)]), layout.together)
    parts = torch.split(sums, [heads * dim, key_heads * dim], dim=1)
    means = [
        x.view(-1, n, dim) / count.clamp(min=1) for x, n, count in zip(parts, (heads, key_heads), total, strict=True)
    ]
    # Squares around the common mean: those around the own mean, and what the means differ by.
    squares = []
    for (own_mean, own_squares), mean, count in zip(found, means, own, strict=True):
        step = own_mean - mean
        squares.append(torch.addcmul(own_squares, step[..., None], (step * count)[..., None, :]))
    groups = heads // key_heads
    wide = sum_dtype(query.device)
    mean_q, mean_k = means[0].to(wide), means[1].to(wide)
    quadratic = (mean_q[..., None, :] @ _repeat(squares[1], groups).to(wide) @ mean_q[..., None])[..., 0, 0]
    traces = [x.diagonal(dim1=-2, dim2=-1).to(wide).sum(dim=-1) for x in squares]
    numbers = torch.stack((quadratic, traces[0], _repeat(traces[1], groups)), dim=-1)  # (B, H, 3)
    product, numbers = _product_of_squares(squares[0], squares[1], numbers, layout)
    quadratic, trace_q, trace_k = numbers.unbind(dim=-1)
    count_q, count_k = (x[..., 0].to(wide).clamp(min=1) for x in total)
    within_rows = product / (count_q * count_k) + quadratic / count_k
    mean_k = _repeat(mean_k, groups)
    variance_q, variance_k = trace_q / (count_q * dim), trace_k / (count_k * dim)
    sigma_q = (variance_q + mean_q.var(dim=-1, correction=0)).sqrt()
    sigma_k = (variance_k + mean_k.var(dim=-1, correction=0)).sqrt()
    unit_q, unit_k = (
        (variance + mean.square().mean(dim=-1)).sqrt().clamp(min=SMALLEST_SIGMA)
        for variance, mean in ((variance_q, mean_q), (variance_k, mean_k))
    )
    unit = unit_q * unit_k
    row_variance = within_rows / unit.square() * unit.clamp(max=LARGEST_ENTRY).square() / dim
    sigma_q, sigma_k, row_variance = (x.to(dtype) for x in (sigma_q, sigma_k, row_variance))
    return Moments(sigma_q, sigma_k, row_variance, row_variance, total[1][..., 0])


def _own_moments(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean (B, heads, D) of the kept tokens of this process and their squares (B, heads, D, D) around it."""
    batch, heads, tokens, dim = x.shape
    if tokens == 0:
        zeros = torch.zeros(batch, heads, dim, dim, dtype=accumulator(x.dtype), device=x.device)
        return zeros[..., 0], zeros
    mean, covariance, count = feature_moments(x, keep)
    return mean, covariance * count[..., None, None]


def _product_of_squares(square_q: Tensor, square_k: Tensor, numbers: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The sum over features of the products of both total squares (B, H), and the total of `numbers` (B, H, ...).

    Squares are symmetric, so only a triangle of them is sent, and each owner multiplies the entries it has.
    """
    batch, heads, dim, _ = square_q.shape
    row, column = torch.triu_indices(dim, dim, device=square_q.device)
    entries = torch.cat((square_q[:, :, row, column], square_k[:, :, row, column]), dim=1).mT.flatten(0, 1)
    found = layout.to_owners(entries).wait().sum(dim=0).to(numbers.dtype)  # (own entries, H + H_k)
    own = layout.rows(len(entries))
    q, k = torch.split(found, [heads, found.shape[1] - heads], dim=1)
    double = torch.where(row == column, 1.0, 2.0).to(q)[own.places.to(row.device) % len(row), None]
    products = q.new_zeros(batch, heads)
    products.index_add_(0, own.samples.to(q.device), q * _repeat(k, heads // k.shape[1]) * double)
    out = torch.cat((products[..., None], numbers), dim=-1)
    size = layout.ranks.size
    if size > FEW:
        total = layout.sum(out, layout.together)
    else:  # to all that hold the same sequences
        together = layout.together[:, layout.ranks.rank, :, None, None].to(out.device)
        shared = out.expand(size, *out.shape).where(together, 0.0)
        total = layout.ranks.exchange(shared.contiguous(), [1] * size, [1] * size).wait().sum(dim=0)
    return total[..., 0], total[..., 1:]


def _batch_moments(problem: Problem, query: Tensor, key: Tensor, layout: Layout) -> Moments:
    """One sigma for all queries and one for all keys, as `lln.matching.moments` has it for scope="batch"."""
    shape, wide = query.shape[:2], sum_dtype(query.device)
    sides = ((query, problem.queries.keep), (key, problem.keys.keep))
    entries = [
        (layout.tokens[:, side].sum() * x.shape[1] * x.shape[3]).to(query.device, wide)
        for side, (x, _) in enumerate(sides)
    ]

    def reduce(numbers: list[Tensor]) -> Tensor:
        return layout.ranks.gather(torch.stack(numbers)).sum(dim=0)

    totals = [
        sum((bounded(part).sum() + not_finite(part, 0, 1, 2, 3).sum()).to(wide) for part in _nonempty(x, keep))
        + torch.zeros((), dtype=wide, device=x.device)
        for x, keep in sides
    ]
    means = reduce(totals) / torch.stack(entries).clamp(min=1)
    squares = []
    for (x, keep), mean in zip(sides, means, strict=True):
        square = torch.zeros((), dtype=wide, device=x.device)
        if x.numel():
            size = piece_tokens(*x.shape[:2], x.shape[3], device=x.device)
            for part, kept in pieces(x, keep, size):
                square = square + fill_padding(bounded(part) - mean.to(part.dtype), kept).square().sum().to(wide)
        squares.append(square)
    variance = reduce(squares) / (torch.stack(entries) - 1).clamp(min=1)
    sigma_q, sigma_k = (x.sqrt().to(accumulator(query.dtype)).expand(shape) for x in variance)
    product = (sigma_q * sigma_k).clamp(max=LARGEST_ENTRY).square()
    keys = layout.total(1).to(query.device, sigma_q.dtype)[:, None].expand(shape)
    return Moments(sigma_q, sigma_k, product, product, keys)


def _nonempty(x: Tensor, keep: Tensor | None) -> list[Tensor]:
    if x.numel() == 0:
        return []
    return [part for part, _ in pieces(x, keep, piece_tokens(*x.shape[:2], x.shape[3], device=x.device))]


def sums_before(query: Tensor, key: Tensor, keep: Tensor | None, layout: Layout) -> PrefixSums:
    """What causal statistics need of the tokens of the processes before this one."""
    query, key = query.detach(), key.detach()
    past = empty_sums(query)
    sums = [_token_sums(x, keep, past.query.dtype) for x in (query, key)]
    found = layout.sum(rows_of(sums), layout.before)
    parts = torch.split(found, [3 * query.shape[1], 3 * key.shape[1]], dim=1)
    groups = query.shape[1] // key.shape[1]
    return PrefixSums(
        layout.start(1).to(past.tokens),
        parts[0].reshape(-1, query.shape[1], 3),
        _repeat(parts[1].reshape(-1, key.shape[1], 3), groups),
    )


def moments_after(query: Tensor, key: Tensor, keep: Tensor | None, before: PrefixSums) -> Moments:
    """The moments (B, H, N) of the tokens up to each one, those of processes before this one included."""
    if query.shape[2] == 0:
        nothing = query.new_zeros(*query.shape[:3], dtype=accumulator(query.dtype))
        return Moments(nothing, nothing, nothing, nothing, nothing)
    return prefix_moments(query, key, keep, before)[0]


def _token_sums(x: Tensor, keep: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(B, heads, 3) what `lln.matching.moments.PrefixSums` keeps of the tokens of this process."""
    total = torch.zeros(*x.shape[:2], 3, dtype=dtype, device=x.device)
    for part in _nonempty(x, keep):
        total = total + entry_sums(part, dtype).sum(dim=2)
    return total


def _repeat(x: Tensor, groups: int, dim: int = 1) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=dim)
