"""The same functions on explicit matrices, one formula a line and no tricks: what all tests compare with.

Everything is written as the paper writes it, or as its words say it, sample by sample and head by head where that is
plainer: slow, O(N M D) memory, any float dtype (float64 for a yardstick). Where `lln.functional` has a mask, this has
indexing; where it has a recurrence, this has a loop over prefixes; packed sequences are computed one by one.

Shapes: B batch, H query heads, H_k key heads, N queries, M keys, D features of a head.
"""

import math
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lln.checks import check_block_size, check_choice, check_inputs
from lln.functional import KINDS, Kind
from lln.masks import kept_tokens, read_paddings
from lln.matching.curves import FORMS, Form, Matching, matched_spread
from lln.matching.moments import SCOPES, Scope, check_causal_options
from lln.precision import accumulator
from lln.problem import NEARS, Centers, Near, read_centers, read_key_weight, read_scale

Attention = TypeVar("Attention", bound=Callable[..., Tensor])
PER_TOKEN = ("alpha", "beta", "key_weight")


def _packed(attention: Attention) -> Attention:
    """With `cu_seqlens`, run an attention on each of the sequences that (1, H, total, D) inputs hold."""

    @wraps(attention)
    def wrapped(
        query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor | None = None, **options: Any
    ) -> Tensor:
        if cu_seqlens is None:
            return attention(query, key, value, **options)
        check_inputs(query, key, value, same_length="cu_seqlens")
        total = query.shape[2]
        outputs = [query.new_zeros(*query.shape[:2], 0, value.shape[3])]
        for start, end in pairwise(_read_cu_seqlens(cu_seqlens, query, options)):
            if start < end:
                own = {name: _part(options[name], start, end, total) for name in PER_TOKEN if name in options}
                tokens = (x[:, :, start:end] for x in (query, key, value))
                outputs.append(attention(*tokens, **options | own))
        return torch.cat(outputs, dim=2)

    return cast(Attention, wrapped)


@_packed
def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """softmax(q . k / sqrt(D)) v (eq. 1), with a matrix and without a trick."""
    return _weights(query, key, key_padding_mask, is_causal).to(value.dtype) @ _heads(value, query)


@_packed
def lln_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: Matching = "variance",
    scope: Scope = "sample",
    form: Form = "paper",
    centers: Centers | None = None,
    key_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """LLN attention (eq. 8) in one of three forms: the weight of key j for query i is proportional to

        exp(a_i) . exp(b_j)

    with a and b of `features`. Alpha and beta are constants to autograd, centres are not: means of the sample are part
    of the function.

    Args:
        form: "paper", "unbiased" or "decomposed".
        centers: m_q and m_k of the decomposed form, (H, D) or (B, H, D) and (H_k, D) or (B, H_k, D); by default the
            means of each sample over its kept queries and its kept keys, which causal attention cannot use.
        key_weight: log-weights of the keys, (B, H, M) or 1 in place of B or H: added to all features of b.
        cu_seqlens: for inputs of batch 1 that hold several sequences one after the other, where each starts and the
            last ends: int32 (sequences + 1,), as in flash-attention. Statistics and centres are those of a sequence.

    Raises:
        ValueError: an unknown form, centres for another form than "decomposed", or none for a causal one.
    """
    check_inputs(query, key, value, same_length="is_causal=True" if is_causal else None)
    paddings: dict[str, Any] = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
    matched = match_moments(
        query, key, matching=matching, scope=scope, is_causal=is_causal, form=form, centers=centers, **paddings
    )
    means = centers_of(query, key, form=form, centers=centers, is_causal=is_causal, **paddings)
    scale_q = _broadcast_scale("alpha", alpha, matched[0], query, heads=query.shape[1]).to(query.dtype)
    scale_k = _broadcast_scale("beta", beta, matched[1], key, heads=query.shape[1]).to(key.dtype)
    a, b = features(query, key, scale_q, scale_k, form, means)
    if key_weight is not None:
        b = b + read_key_weight(key_weight, query, key)[..., None].to(b.dtype)
    log_kernel = torch.logsumexp(a[:, :, :, None] + b[:, :, None], dim=-1)  # ln of exp(a_i) . exp(b_j), (B, H, N, M)
    allowed = _allowed(query, key, key_padding_mask, is_causal)
    return (_normalise(log_kernel, allowed) @ _heads(value, query)).to(query.dtype)


@_packed
def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    near: Near = "blocks",
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Softmax attention among near tokens, where only kept tokens count; i and j are their numbers, from 0 on.

    - `near="blocks"`: i sees j where i // block_size = j // block_size;
    - `near="window"`: i sees j from i - (block_size - 1) // 2 to i + block_size // 2: block_size tokens, fewer at the
      ends; with `is_causal=True` from i - block_size + 1 to i.

    Raises:
        ValueError: near is neither.
    """
    check_block_size(block_size)
    check_choice("near", near, NEARS)
    check_inputs(query, key, value, same_length="block-diagonal attention")
    weights = _weights(query, key, key_padding_mask, is_causal, block_size=block_size, near=near)
    return (weights @ _heads(value, query)).to(query.dtype)


@_packed
def lln_diag_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    near: Near = "blocks",
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: Matching = "variance",
    scope: Scope = "sample",
    form: Form = "paper",
    centers: Centers | None = None,
    key_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The average of LLN and block-diagonal attention (figure 3)."""
    masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
    close = block_diagonal_attention(query, key, value, block_size=block_size, near=near, **masks)
    far = lln_attention(
        query,
        key,
        value,
        alpha=alpha,
        beta=beta,
        matching=matching,
        scope=scope,
        form=form,
        centers=centers,
        key_weight=key_weight,
        **masks,
    )
    return (far + close) / 2


def attention_matrix(query: Tensor, key: Tensor, *, kind: Kind = "lln", **options: Any) -> Tensor:
    """The attention matrix, as what the attention makes of the identity."""
    check_choice("kind", kind, KINDS)
    attention: Callable[..., Tensor] = {
        "softmax": softmax_attention,
        "lln": lln_attention,
        "block_diagonal": block_diagonal_attention,
        "lln_diag": lln_diag_attention,
    }[kind]
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], key.shape[2])
    return attention(query, key, identity, **options)


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
    key = _heads(key, query)
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
            deviation = scores - scores.mean(dim=2, keepdim=True)  # softmax does not see the mean of a row
            variance = deviation.square().mean(dim=(1, 2)) if scores.numel() else scores.new_zeros(heads)
            rows.append(scales(sigma(q), sigma(k), variance, k.shape[1]))
    alpha, beta = (torch.stack(list(x)) for x in zip(*rows, strict=True))
    return alpha, beta


def features(
    query: Tensor, key: Tensor, alpha: Tensor, beta: Tensor, form: Form, centers: Centers | None
) -> tuple[Tensor, Tensor]:
    """a (B, H, N, D) and b (B, H, M, D) of the kernel exp(a_i) . exp(b_j); centres as `centers_of` returns them:

        paper       a_il = alpha q_il     b_jl = beta k_jl
        unbiased    a_il = alpha q_il     b_jl = beta k_jl - logsumexp_l(beta k_jl)
        decomposed  a_il = alpha dq_il    b_jl = beta dk_jl - logsumexp_l(beta dk_jl) + m_q . k_j / sqrt(D)

    with dq = q - m_q and dk = k - m_k. The second form divides out that a key with large entries has a large weight for
    every query; the third puts the weight in its place that softmax attention gives it.
    """
    check_choice("form", form, FORMS)
    key = _heads(key, query)
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
    """m_q and m_k of the decomposed form for each query head, (B or 1, H, 1, D); None for the other forms.

    Raises:
        TypeError: centers are not two floating point tensors.
        ValueError: they have another shape, belong to another form, or are missing for causal attention.
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
    return m_q, _heads(m_k, query)


def _mean(x: Tensor, keep: Tensor | None) -> Tensor:
    """Mean (B, heads, 1, D) of the kept tokens of each sample; 0 where there is none."""
    kept = [x[s] if keep is None else x[s][:, keep[s]] for s in range(x.shape[0])]
    return torch.stack([tokens.sum(dim=1, keepdim=True) / max(tokens.shape[1], 1) for tokens in kept])


def _weights(
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    block_size: int | None = None,
    near: Near = "blocks",
) -> Tensor:
    """The matrix of softmax attention, with `block_size` that of near tokens."""
    scores = query @ _heads(key, query).mT / math.sqrt(query.shape[-1])
    allowed = _allowed(query, key, key_padding_mask, is_causal)
    if block_size is not None:
        _, keep = read_paddings(query, key, key_padding_mask, None)
        kept = kept_tokens(keep, query)
        number = kept.cumsum(dim=1) - 1  # of kept tokens
        i, j = number[:, None, :, None], number[:, None, None, :]
        if near == "blocks":
            is_near = i // block_size == j // block_size
        elif is_causal:
            is_near = (i - block_size < j) & (j <= i)
        else:
            is_near = (i - (block_size - 1) // 2 <= j) & (j <= i + block_size // 2)
        allowed = allowed & is_near & kept[:, None, :, None]  # a token that is not kept lies in no block or window
    return _normalise(scores, allowed)


def _read_cu_seqlens(cu_seqlens: Tensor, query: Tensor, options: dict[str, Any]) -> list[int]:
    """Where the sequences start, and where the last one ends."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype is not torch.int32:
        what = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 tensor, got {what}; convert with .int()")
    for name in ("key_padding_mask", "query_padding_mask"):
        if options.get(name) is not None:
            raise ValueError(f"packed sequences hold no padding; give cu_seqlens or {name}, not both")
    if options.get("scope", "sample") != "sample":
        raise ValueError('with cu_seqlens each sequence has its own statistics; use scope="sample"')
    batch, total = query.shape[0], query.shape[2]
    if batch != 1:
        raise ValueError(f"with cu_seqlens all sequences are in one sample, (1, heads, tokens, D); got batch {batch}")
    ends: list[int] = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total or any(end < start for start, end in pairwise(ends)):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {total}, in a tensor (sequences + 1,); "
            f"got {cu_seqlens.tolist()}"
        )
    return ends


def _part(scale: float | Tensor | None, start: int, end: int, total: int) -> float | Tensor | None:
    """The tokens of one sequence of a (1, H, total) alpha, beta or key_weight."""
    if isinstance(scale, Tensor) and scale.dim() == 3 and scale.shape[2] == total:
        return scale[:, :, start:end]
    return scale


def _allowed(query: Tensor, key: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Which key each query may see, (B, 1, N, M)."""
    _, keep = read_paddings(query, key, key_padding_mask, None)
    allowed = torch.ones(query.shape[0], 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    return allowed if keep is None else allowed & keep[:, None, None, :]


def _normalise(log_weights: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; zeros where none is."""
    masked = log_weights.masked_fill(~allowed, -math.inf)
    return torch.softmax(masked, dim=-1).masked_fill(~allowed, 0.0)


def _heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _broadcast_scale(name: str, given: float | Tensor | None, matched: Tensor, tokens: Tensor, *, heads: int) -> Tensor:
    """The alpha or beta that was given, or else the matched one, as a tensor that broadcasts to (B, H, tokens, 1)."""
    if given is not None:
        return read_scale(name, given, tokens, heads=heads)[..., None]
    return matched[..., None] if matched.dim() == 3 else matched[..., None, None]
