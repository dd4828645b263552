"""The three forms of LLN attention. All are the paper's form on other inputs, with a log-weight for each key.

    paper       a_il = alpha q_il     b_jl = beta k_jl                                                      (eq. 8)
    unbiased    a_il = alpha q_il     b_jl = beta k_jl - logsumexp_l(beta k_jl)
    decomposed  a_il = alpha dq_il    b_jl = beta dk_jl - logsumexp_l(beta dk_jl) + m_q . k_j / sqrt(D)

with dq = q - m_q and dk = k - m_k for some centres. In the paper's form a key with large entries draws weight from
every query, whatever the query is; the unbiased form divides that out. In the decomposed form each key has the weight
that softmax attention gives it for all queries alike, m_q . k_j / sqrt(D), exactly, and only the content dq . dk is
approximated: see `lln.theory`.

Shapes: B batch, H heads, N queries, M keys, D features of a head.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lln.masks import fill_padding, zero_nonfinite_padding
from lln.precision import accumulator, sum_dtype
from lln.problem import Problem


def in_paper_form(problem: Problem) -> Problem:
    """The same attention as a problem in the paper's form, with alpha and beta, and with `key_weight`.

    Gradients flow through centres that are means of the sample, and not through alpha and beta that are matched.
    """
    if problem.form == "paper" or not problem.far:
        return problem
    problem, column = centered(without_padding(problem))
    alpha, beta = problem.scales()
    groups = problem.query.shape[1] // problem.key.shape[1]
    key = problem.key if groups == 1 else problem.key.repeat_interleave(groups, dim=1)
    weight = -torch.logsumexp(key.to(beta.dtype) * beta[..., None], dim=-1)
    for given in (column, problem.key_weight):
        weight = weight if given is None else weight + given
    return replace(problem, form="paper", alpha=alpha, beta=beta, key_weight=weight)


def without_padding(problem: Problem) -> Problem:
    """The problem with zeros in padding: what stands there would reach gradients as 0 times NaN."""
    query = zero_nonfinite_padding(problem.query, problem.queries.keep)
    return replace(problem, query=query, key=fill_padding(problem.key, problem.keys.keep))


def centered(problem: Problem) -> tuple[Problem, Tensor | None]:
    """The problem of dq and dk, and m_q . k / sqrt(D) (B, H, M); other forms than the decomposed one as they are."""
    if problem.form != "decomposed":
        return problem, None
    dtype = accumulator(problem.query.dtype)  # differences of low precision could overflow it
    problem = replace(problem, centers=problem.centers or sample_centers(problem))
    assert problem.centers is not None
    key = problem.key.to(dtype)
    # m_q . k of the query heads of each key head
    by_group = torch.unflatten(problem.centers[0].to(dtype), 1, (key.shape[1], -1))
    column = (key @ by_group.mT).mT.flatten(1, 2) * key.shape[3] ** -0.5
    query, key = without_centers(replace(problem, key=key))
    return replace(problem, query=query, key=key, value=problem.value.to(dtype), centers=None), column


def without_centers(problem: Problem) -> tuple[Tensor, Tensor]:
    """dq and dk of a problem with centres; query and key of any other."""
    if problem.centers is None:
        return problem.query, problem.key
    dtype = accumulator(problem.query.dtype)
    query, key = (
        x.to(dtype) - center[:, :, None].to(dtype)
        for x, center in zip((problem.query, problem.key), problem.centers, strict=True)
    )
    return query, key


def sample_centers(problem: Problem) -> tuple[Tensor, Tensor]:
    """The means (B, H, D) and (B, H_k, D) of the kept queries and keys of each sample."""
    return token_mean(problem.query, problem.queries.keep), token_mean(problem.key, problem.keys.keep)


def token_mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """The mean (B, heads, D) of the kept tokens of each sample; 0 where there is none."""
    # In float64, so that the mean of equal tokens is that token: what rounding leaves of it would be scaled to one.
    total = fill_padding(x, keep).sum(dim=2, dtype=sum_dtype(x.device))
    count = x.shape[2] if keep is None else keep.sum(dim=1).clamp(min=1)[:, None, None]
    return (total / count).to(accumulator(x.dtype))
