"""alpha, beta, centres and features of LLN attention, from explicitly chosen tokens and their explicit scores."""

import math

import torch
from torch import Tensor

from lln.checks import check_choice, check_inputs
from lln.masks import read_paddings
from lln.matching.curves import FORMS, Form, Matching, matched_spread
from lln.matching.moments import SCOPES, Scope, check_causal_options
from lln.precision import accumulator
from lln.problem import Centers, read_centers
from lln.reference.inputs import repeat_heads


def match_moments(
    query: Tensor,
    key: Tensor,
    *,
    matching: Matching = "variance",
    scope: Scope = "sample",
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    form: Form = "paper",
    centers: Centers | None = None,
) -> tuple[Tensor, Tensor]:
    """alpha and beta (eq. 10) from the statistics of explicitly chosen tokens and their explicit scores.

    With `form="decomposed"` they are the statistics of the content: of q - m_q and k - m_k and of their scores.

    Args:
        query, key, matching, scope, key_padding_mask, query_padding_mask, is_causal, form, centers: as in
            `lln.match_moments`.

    Returns:
        Two (B, H) tensors, or (B, H, N) with `is_causal=True`.

    Raises:
        TypeError, ValueError: as `lln.match_moments`.

    Example:
        >>> query, key = torch.randn(2, 1, 2, 9, 8)
        >>> exact, found = lln.reference.match_moments(query, key), lln.match_moments(query, key)
        >>> all(x.allclose(y, rtol=1e-4) for x, y in zip(found, exact))
        True
    """
    check_choice("scope", scope, SCOPES)
    check_inputs(query, key, same_length="is_causal=True" if is_causal else None)
    check_causal_options(is_causal, scope, query_padding_mask)
    keep_query, keep_key = read_paddings(query, key, key_padding_mask, query_padding_mask)
    query, key = (x.detach().to(accumulator(x.dtype)) for x in (query, key))
    means = centers_of(
        query,
        key,
        form=form,
        centers=centers,
        is_causal=is_causal,
        key_padding_mask=key_padding_mask,
        query_padding_mask=query_padding_mask,
    )
    key = repeat_heads(key, query)
    if means is not None:
        query, key = query - means[0].detach(), key - means[1].detach()
    batch, heads, tokens, head_dim = query.shape

    def kept(x: Tensor, keep: Tensor | None, sample: int, end: int | None = None) -> Tensor:
        return x[sample][:, :end] if keep is None else x[sample][:, :end][:, keep[sample][:end]]

    def scales(sigma_q: Tensor, sigma_k: Tensor, variance: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        count = torch.full_like(variance, num_keys)
        share = (matched_spread(variance, count, head_dim=head_dim, matching=matching, form=form) / 2).sqrt()
        return tuple(torch.where(sigma > 0, share / sigma, 0.0) for sigma in (sigma_q, sigma_k))  # type: ignore[return-value]

    def sigma(x: Tensor) -> Tensor:  # of all entries of each head
        return x.flatten(1).std(dim=1, correction=0) if x.numel() else x.new_zeros(x.shape[0])

    if scope == "batch":
        sigma_q = torch.cat([kept(query, keep_query, s).flatten() for s in range(batch)]).std()
        sigma_k = torch.cat([kept(key, keep_key, s).flatten() for s in range(batch)]).std()
        pairs = [
            scales(sigma_q, sigma_k, (sigma_q * sigma_k).square(), kept(key, keep_key, s).shape[1])
            for s in range(batch)
        ]
        alpha, beta = (torch.stack(list(x))[:, None].expand(batch, heads) for x in zip(*pairs, strict=True))
        return alpha, beta
    rows = []
    for s in range(batch):
        if is_causal:
            prefixes = [(kept(query, keep_key, s, t), kept(key, keep_key, s, t)) for t in range(1, tokens + 1)]
            steps = [scales(sigma(q), sigma(k), (sigma(q) * sigma(k)).square(), k.shape[1]) for q, k in prefixes]
            rows.append(tuple(torch.stack(list(x), dim=-1) for x in zip(*steps, strict=True)))
        else:
            q, k = kept(query, keep_query, s), kept(key, keep_key, s)
            scores = q @ k.mT / math.sqrt(head_dim)
            deviation = scores - scores.mean(dim=2, keepdim=True)  # softmax cancels the mean of a row
            variance = deviation.square().mean(dim=(1, 2)) if scores.numel() else scores.new_zeros(heads)
            rows.append(scales(sigma(q), sigma(k), variance, k.shape[1]))
    alpha, beta = (torch.stack(list(x)) for x in zip(*rows, strict=True))
    return alpha, beta


def features(
    query: Tensor, key: Tensor, alpha: Tensor, beta: Tensor, form: Form, centers: Centers | None
) -> tuple[Tensor, Tensor]:
    """a and b of the kernel exp(a_i) . exp(b_j):

        paper       a_il = alpha q_il     b_jl = beta k_jl
        unbiased    a_il = alpha q_il     b_jl = beta k_jl - logsumexp_l(beta k_jl)
        decomposed  a_il = alpha dq_il    b_jl = beta dk_jl - logsumexp_l(beta dk_jl) + m_q . k_j / sqrt(D)

    with dq = q - m_q and dk = k - m_k. The second form divides out that a key with large entries has a large weight for
    every query; the third puts the weight in its place that softmax attention gives it.

    Args:
        query: (B, H, N, D).
        key: (B, H_k, M, D).
        alpha, beta: what broadcasts to (B, H, tokens, 1).
        form: "paper", "unbiased" or "decomposed".
        centers: of the decomposed form, as `centers_of` returns them.

    Returns:
        a (B, H, N, D) and b (B, H, M, D).

    Raises:
        ValueError: an unknown form.

    Example:
        >>> query, key = torch.randn(2, 1, 2, 9, 8)
        >>> one = torch.tensor(1.0)
        >>> a, b = lln.reference.features(query, key, one, one, "unbiased", None)
        >>> b.exp().sum(dim=-1).allclose(torch.ones(1, 2, 9))
        True
    """
    check_choice("form", form, FORMS)
    key = repeat_heads(key, query)
    if form == "paper":
        return query * alpha, key * beta
    if form == "unbiased":
        return query * alpha, torch.log_softmax(key * beta, dim=-1)
    assert centers is not None
    m_q, m_k = centers
    column = (m_q * key).sum(dim=-1, keepdim=True) / math.sqrt(query.shape[-1])
    return (query - m_q) * alpha, torch.log_softmax((key - m_k) * beta, dim=-1) + column


def centers_of(
    query: Tensor,
    key: Tensor,
    *,
    form: Form,
    centers: Centers | None = None,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Centers | None:
    """m_q and m_k of the decomposed form.

    Args:
        query, key, form, centers, is_causal, key_padding_mask, query_padding_mask: as in `lln.lln_attention`.

    Returns:
        The given centres or means of the sample for each query head, (B or 1, H, 1, D); None for the other forms.

    Raises:
        TypeError: centers are not two floating point tensors.
        ValueError: they have another shape, belong to another form, or are missing for causal attention.

    Example:
        >>> query, key = torch.randn(2, 1, 2, 9, 8)
        >>> m_q, m_k = lln.reference.centers_of(query, key, form="decomposed")
        >>> m_q.allclose(query.mean(dim=2, keepdim=True), atol=1e-6)
        True
    """
    check_choice("form", form, FORMS)
    given = read_centers(centers, query, key, form=form, is_causal=is_causal)
    if form != "decomposed":
        return None
    if given is not None:
        m_q, m_k = (x[:, :, None].to(query.dtype) for x in given)
    else:
        keep_query, keep_key = read_paddings(query, key, key_padding_mask, query_padding_mask)
        m_q, m_k = _mean(query, keep_query), _mean(key, keep_key)
    return m_q, repeat_heads(m_k, query)


def _mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """Mean (B, heads, 1, D) of the kept tokens of each sample; 0 where there is none."""
    kept = [x[s] if keep is None else x[s][:, keep[s]] for s in range(x.shape[0])]
    return torch.stack([tokens.sum(dim=1, keepdim=True) / max(tokens.shape[1], 1) for tokens in kept])
