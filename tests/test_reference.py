"""The forms of LLN attention in the reference, against a few lines of their own, and what must not change them."""

import functools
import math

import pytest
import torch
from torch.autograd import gradcheck

from lln import reference
from lln.matching.curves import FORMS, matched_spread

NEW_FORMS = ["unbiased", "decomposed"]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def kernel(q, k, alpha, beta, form, m_q=None, m_k=None):
    """The kernel (N, M) of one head, with the exponentials that logarithms avoid elsewhere."""
    if form == "paper":
        return torch.exp(alpha * q) @ torch.exp(beta * k).T
    if form == "unbiased":
        phi = torch.exp(beta * k)
        return torch.exp(alpha * q) @ (phi / phi.sum(1, keepdim=True)).T
    phi = torch.exp(beta * (k - m_k))
    weight = torch.exp(k @ m_q / math.sqrt(q.shape[1]))
    return torch.exp(alpha * (q - m_q)) @ (phi * (weight / phi.sum(1))[:, None]).T


def attend(q, k, v, alpha, beta, form, m_q=None, m_k=None):
    weights = kernel(q, k, alpha, beta, form, m_q, m_k)
    return weights / weights.sum(1, keepdim=True) @ v


def scales(q, k, form, *, matching="variance", product=False):
    """alpha and beta of one head: `product` is the variance sigma_q² sigma_k² of causal attention."""
    sigma_q, sigma_k = q.std(correction=0), k.std(correction=0)
    variance = (q @ k.T / math.sqrt(q.shape[1])).var(dim=1, correction=0).mean()
    if product:
        variance = (sigma_q * sigma_k) ** 2
    keys = torch.tensor(len(k))
    s = matched_spread(variance, keys, head_dim=q.shape[1], matching=matching, form=form).sqrt()
    return (s / (math.sqrt(2) * x) if x > 0 else 0.0 for x in (sigma_q, sigma_k))


def whole(q, k, v, form, **options):
    """One head of full attention with the means of the sample."""
    m_q, m_k = q.mean(0), k.mean(0)
    centred = (q - m_q, k - m_k) if form == "decomposed" else (q, k)
    return attend(q, k, v, *scales(*centred, form, **options), form, m_q, m_k)


@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_its_formula(tokens, form, matching):
    q, k, v = tokens(B=2, H=2, N=9, M=14, D=8, Dv=3)
    got = reference.lln_attention(q, k, v, form=form, matching=matching)
    for s in range(2):
        for h in range(2):
            expected = whole(q[s, h], k[s, h], v[s, h], form, matching=matching)
            torch.testing.assert_close(got[s, h], expected, **EXACT)


def test_the_matched_variance_of_the_content_is_that_of_the_covariances(tokens):
    q, k, _ = tokens(B=1, H=1, N=30, M=41, D=8)
    covariance_q, covariance_k = (torch.cov(x[0, 0].T, correction=0) for x in (q, k))
    variance = (covariance_q * covariance_k).sum() / 8
    s = matched_spread(variance, torch.tensor(41), head_dim=8, matching="variance", form="decomposed").sqrt()
    alpha, beta = reference.match_moments(q, k, form="decomposed")
    torch.testing.assert_close(alpha.item(), (s / (2 * covariance_q.diagonal().mean()).sqrt()).item(), **EXACT)
    torch.testing.assert_close(beta.item(), (s / (2 * covariance_k.diagonal().mean()).sqrt()).item(), **EXACT)


@pytest.mark.parametrize("form", NEW_FORMS)
def test_scales_of_the_batch_pool_all_entries(tokens, form):
    q, k, _ = tokens(B=3, H=2, N=20, D=8)
    q, k = q + torch.randn(3, 2, 1, 8), k + torch.randn(3, 2, 1, 8)
    dq, dk = (x - x.mean(2, keepdim=True) if form == "decomposed" else x for x in (q, k))
    variance = (dq.std() * dk.std()) ** 2
    s = matched_spread(variance, torch.tensor(20), head_dim=8, matching="variance", form=form).sqrt()
    alpha, beta = reference.match_moments(q, k, form=form, scope="batch")
    torch.testing.assert_close(alpha, (s / (math.sqrt(2) * dq.std())).expand(3, 2), **EXACT)
    torch.testing.assert_close(beta, (s / (math.sqrt(2) * dk.std())).expand(3, 2), **EXACT)


@pytest.mark.parametrize("shape", ["heads", "batch and heads"])
@pytest.mark.parametrize("form", FORMS)
def test_causal_attention_is_a_loop_over_prefixes(tokens, form, shape):
    q, k, v = tokens(B=2, H=2, N=11, D=8, Dv=3)
    centers = tuple(torch.randn(2, 2, 8, dtype=torch.float64) for _ in range(2))
    if shape == "heads":
        centers = tuple(x[0] for x in centers)
    given = centers if form == "decomposed" else None
    got = reference.lln_attention(q, k, v, form=form, is_causal=True, centers=given)
    for s in range(2):
        for h in range(2):
            m_q, m_k = (x[h] if shape == "heads" else x[s, h] for x in centers)
            betas = []
            for t in range(11):
                past_q, past_k = q[s, h, : t + 1], k[s, h, : t + 1]
                centred = (past_q - m_q, past_k - m_k) if form == "decomposed" else (past_q, past_k)
                alpha, beta = scales(*centred, form, product=True)
                betas.append(beta)
                row = attend(past_q[-1:], past_k, v[s, h, : t + 1], alpha, torch.stack(betas)[:, None], form, m_q, m_k)
                torch.testing.assert_close(got[s, h, t], row[0], **EXACT)


@pytest.mark.parametrize("form", NEW_FORMS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_grouped_heads_are_repeated_heads(tokens, form, is_causal):
    q, k, v = tokens(H=6, Hk=2, N=17, D=8, Dv=3)
    m_q, m_k = torch.randn(6, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    for given in (False, True):
        if form == "decomposed" and is_causal and not given:
            continue
        has_centers = form == "decomposed" and given
        attention = functools.partial(reference.lln_attention, form=form, is_causal=is_causal)
        grouped = attention(q, k, v, centers=(m_q, m_k) if has_centers else None)
        many = [x.repeat_interleave(3, 1) for x in (k, v)]
        repeated = attention(q, *many, centers=(m_q, m_k.repeat_interleave(3, 0)) if has_centers else None)
        torch.testing.assert_close(grouped, repeated, **EXACT)
        each = [
            attention(
                q[:, h : h + 1],
                k[:, h // 3 : h // 3 + 1],
                v[:, h // 3 : h // 3 + 1],
                centers=(m_q[h : h + 1], m_k[h // 3 : h // 3 + 1]) if has_centers else None,
            )
            for h in range(6)
        ]
        torch.testing.assert_close(grouped, torch.cat(each, dim=1), **EXACT)


@pytest.mark.parametrize("form", NEW_FORMS)
@pytest.mark.parametrize("name", ["lln_attention", "lln_diag_attention"])
def test_padding_does_not_count(tokens, form, name):
    q, k, v = tokens(N=20, D=8, Dv=3)
    keep = torch.rand(2, 20) > 0.4
    keep[:, 0] = True
    centers = (torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))
    for is_causal, given in ((False, None), (False, centers), (True, centers)):
        options = {"form": form, "is_causal": is_causal, "centers": given if form == "decomposed" else None}
        attention = functools.partial(getattr(reference, name), **options)
        padded = attention(q, k, v, key_padding_mask=keep)
        for s in range(2):
            alone = attention(*(x[s : s + 1, :, keep[s]] for x in (q, k, v)))
            torch.testing.assert_close(padded[s : s + 1, :, keep[s]], alone, **EXACT)
        filled = [x.masked_fill(~keep[:, None, :, None], 1e30) for x in (q, k)]
        same = attention(*filled, v, key_padding_mask=keep)
        for s in range(2):
            torch.testing.assert_close(same[s, :, keep[s]], padded[s, :, keep[s]], rtol=0, atol=0)


@pytest.mark.parametrize("form", NEW_FORMS)
def test_query_padding_does_not_count_in_cross_attention(tokens, form):
    q, k, v = tokens(N=12, M=15, D=8)
    keep = torch.arange(12) < torch.tensor([[12], [7]])
    padded = reference.lln_attention(q, k, v, query_padding_mask=keep, form=form)
    alone = reference.lln_attention(q[1:, :, :7], k[1:], v[1:], form=form)
    torch.testing.assert_close(padded[1:, :, :7], alone, **EXACT)


@pytest.mark.parametrize("form", NEW_FORMS)
def test_a_sample_without_keys_gives_zeros(tokens, form):
    q, k, v = tokens(N=6, D=8)
    got = reference.lln_attention(q, k, v, key_padding_mask=torch.tensor([6, 0]), form=form)
    assert got[0].isfinite().all()
    assert (got[1] == 0).all()


# What must not change them


@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
def test_a_shift_of_all_keys_does_not_change_the_decomposed_form(tokens, matching):
    q, k, _ = tokens(N=25, D=8)
    shift = 3 * torch.randn(8, dtype=torch.float64)
    matrix = functools.partial(reference.attention_matrix, q, matching=matching)
    torch.testing.assert_close(
        matrix(k + shift, form="decomposed"), matrix(k, form="decomposed"), rtol=1e-12, atol=1e-14
    )
    for form in ("paper", "unbiased"):
        assert (matrix(k + shift, form=form) - matrix(k, form=form)).abs().max() > 1e-3
        torch.testing.assert_close(matrix(k + 7.0, form=form), matrix(k, form=form), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_given_centers_move_with_the_keys(tokens, is_causal):
    q, k, _ = tokens(B=1, N=25, D=8)
    m_q, m_k, shift = torch.randn(3, 4, 8, dtype=torch.float64)
    matrix = functools.partial(reference.attention_matrix, q, form="decomposed", is_causal=is_causal)
    moved = matrix(k + shift[:, None], centers=(m_q, m_k + shift))
    torch.testing.assert_close(moved, matrix(k, centers=(m_q, m_k)), rtol=1e-12, atol=1e-14)


def test_a_shift_of_all_queries_changes_columns_as_it_does_in_softmax_attention(tokens):
    """ln P' - ln P is shift . k_j / sqrt(D) and a number for each row, in the decomposed form as in softmax."""
    q, k, _ = tokens(B=1, H=1, N=25, D=8)
    shift = torch.randn(8, dtype=torch.float64)
    for options in ({"kind": "softmax"}, {"form": "decomposed"}):
        before, after = (reference.attention_matrix(x, k, **options).log()[0, 0] for x in (q, q + shift))
        left = after - before - k[0, 0] @ shift / math.sqrt(8)
        torch.testing.assert_close(left, left[:, :1].expand_as(left), rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_a_large_key_draws_weight_in_the_papers_form_only(form):
    """A key whose entries are all larger by 5 has no larger scores with queries whose entries sum to 0."""
    q, k = torch.randn(2, 1, 1, 40, 16, dtype=torch.float64)
    q = q - q.mean(-1, keepdim=True)
    larger = k.clone()
    larger[:, :, 3] += 5.0
    options = {"alpha": 1.0, "beta": 1.0, "form": form}
    if form == "decomposed":
        zero = torch.zeros(1, 16, dtype=torch.float64)
        options["centers"] = (zero, zero)
    before, after = (reference.attention_matrix(q, x, **options)[..., 3].mean().item() for x in (k, larger))
    if form == "paper":
        assert after > 20 * before
    else:
        assert after == pytest.approx(before, rel=1e-10)


def test_with_zero_centers_the_decomposed_form_is_the_unbiased_one(tokens):
    q, k, v = tokens(N=21, D=8)
    zero = torch.zeros(4, 8, dtype=torch.float64)
    for is_causal in (False, True):
        unbiased = reference.lln_attention(q, k, v, form="unbiased", is_causal=is_causal)
        decomposed = reference.lln_attention(q, k, v, form="decomposed", is_causal=is_causal, centers=(zero, zero))
        torch.testing.assert_close(decomposed, unbiased, **EXACT)


def test_sample_means_given_as_centers_change_nothing(tokens):
    q, k, v = tokens(H=4, Hk=2, N=19, D=8)
    centers = (q.mean(2), k.mean(2))
    expected = reference.lln_attention(q, k, v, form="decomposed")
    torch.testing.assert_close(reference.lln_attention(q, k, v, form="decomposed", centers=centers), expected, **EXACT)


@pytest.mark.parametrize("form", NEW_FORMS)
def test_weak_scores_give_softmax_attention(tokens, form):
    """To first order in the spread they are softmax attention, but for the product of the means of q_i and of k_j."""
    q, k, _ = tokens(B=1, H=1, N=200, D=64, scale=0.02)
    P, softmax = (reference.attention_matrix(q, k, **options) for options in ({"form": form}, {"kind": "softmax"}))
    paper = reference.attention_matrix(q, k)

    def correlation(x, y):
        return torch.corrcoef(torch.stack([x.log().flatten(), y.log().flatten()]))[0, 1].item()

    assert correlation(P, softmax) > 0.98
    assert correlation(paper, softmax) < 0.5
    assert P.log().var().item() == pytest.approx(softmax.log().var().item(), rel=0.08)


# Gradients


@pytest.mark.parametrize("form", NEW_FORMS)
def test_gradients(tokens, form):
    """Alpha and beta are given, so that everything else is differentiated: also the means of the sample."""
    q, k, v = tokens(B=2, H=2, Hk=1, N=5, D=3, Dv=2, grad=True)
    keep = torch.tensor([[True] * 5, [True, False, True, True, False]])
    options = {"form": form, "alpha": 1.3, "beta": 0.7, "key_padding_mask": keep}
    assert gradcheck(lambda *x: reference.lln_attention(*x, **options), (q, k, v))
    if form == "decomposed":
        centers = [torch.randn(h, 3, dtype=torch.float64, requires_grad=True) for h in (2, 1)]
        for is_causal in (False, True):
            options["is_causal"] = is_causal
            assert gradcheck(
                lambda q, k, v, *c: reference.lln_attention(q, k, v, centers=c, **options), (q, k, v, *centers)
            )


@pytest.mark.parametrize("form", NEW_FORMS)
def test_matched_scales_are_constants_and_means_are_not(tokens, form):
    q, k, v = tokens(N=9, D=8, grad=True)
    alpha, beta = reference.match_moments(q, k, form=form)
    assert not alpha.requires_grad
    assert not beta.requires_grad
    weight = torch.randn(v.shape, dtype=torch.float64)

    def gradients(**options):
        return torch.autograd.grad((reference.lln_attention(q, k, v, form=form, **options) * weight).sum(), (q, k, v))

    found = gradients()
    for ours, expected in zip(found, gradients(alpha=alpha, beta=beta), strict=True):
        torch.testing.assert_close(ours, expected, **EXACT)
    if form == "decomposed":
        frozen = gradients(centers=(q.detach().mean(2), k.detach().mean(2)))
        assert (frozen[0] - found[0]).abs().max() > 1e-4
