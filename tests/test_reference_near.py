"""The reference: softmax attention among neighbours, packed sequences, and what it refuses."""

import functools
import itertools

import pytest
import torch

from lln import reference
from lln.matching.curves import FORMS

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 100])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("near", ["blocks", "window"])
def test_near_tokens_are_those_of_an_explicit_mask(tokens, near, is_causal, block_size):
    q, k, v = tokens(H=2, N=23, D=8, Dv=3)
    keep = torch.rand(2, 23) > 0.3
    options = {"near": near, "is_causal": is_causal, "block_size": block_size, "key_padding_mask": keep}
    got = reference.block_diagonal_attention(q, k, v, **options)
    for s in range(2):
        kept = keep[s].nonzero()[:, 0].tolist()
        mask = torch.zeros(len(kept), len(kept), dtype=torch.bool)
        for i in range(len(kept)):
            if near == "blocks":
                seen = range(i // block_size * block_size, (i // block_size + 1) * block_size)
            elif is_causal:
                seen = range(i - block_size + 1, i + 1)
            else:
                seen = range(i - (block_size - 1) // 2, i + block_size // 2 + 1)
            for j in seen:
                if 0 <= j < len(kept) and not (is_causal and j > i):
                    mask[i, j] = True
        if near == "window":
            assert (mask.sum(1) <= block_size).all()
            assert mask.diagonal().all()
        inputs = (x[s : s + 1, :, kept] for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        torch.testing.assert_close(got[s : s + 1, :, kept], expected, **EXACT)
        assert (got[s][:, ~keep[s]] == 0).all()


def test_a_window_of_everything_is_softmax_attention(tokens):
    q, k, v = tokens(N=20, D=8)
    for is_causal in (False, True):
        got = reference.block_diagonal_attention(q, k, v, near="window", block_size=40, is_causal=is_causal)
        torch.testing.assert_close(got, reference.softmax_attention(q, k, v, is_causal=is_causal), **EXACT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("near", ["blocks", "window"])
def test_lln_diag_is_the_mean_of_both_branches(tokens, near, form):
    q, k, v = tokens(N=20, D=8)
    far = reference.lln_attention(q, k, v, form=form)
    close = reference.block_diagonal_attention(q, k, v, near=near, block_size=6)
    both = reference.lln_diag_attention(q, k, v, near=near, block_size=6, form=form)
    torch.testing.assert_close(both, (far + close) / 2, **EXACT)
    matrix = reference.attention_matrix(q, k, kind="lln_diag", near=near, block_size=6, form=form)
    torch.testing.assert_close(matrix @ v, both, **EXACT)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["softmax", "block_diagonal", "lln", "lln_diag"])
def test_packed_sequences_are_separate_calls(tokens, name, is_causal):
    q, k, v = tokens(B=1, H=4, Hk=2, N=24, D=8, Dv=3)
    alpha = 0.5 + torch.rand(1, 4, 24)
    ends = [0, 7, 7, 8, 24]
    attention = functools.partial(getattr(reference, f"{name}_attention"), is_causal=is_causal)
    variants = [{}]
    if name in ("block_diagonal", "lln_diag"):
        variants = [{"near": "window", "block_size": 5}]
    if name in ("lln", "lln_diag"):
        centers = tuple(torch.randn(1, h, 8, dtype=torch.float64) for h in (4, 2))
        variants += [variants[0] | {"form": "unbiased", "beta": 0.7}, {"form": "decomposed", "centers": centers}]
        variants += [] if is_causal else [{"form": "decomposed"}]
    for options in variants:
        got = attention(q, k, v, cu_seqlens=torch.tensor(ends, dtype=torch.int32), **options)
        parts = [slice(start, end) for start, end in itertools.pairwise(ends) if start < end]
        expected = [attention(*(x[:, :, part] for x in (q, k, v)), **options) for part in parts]
        torch.testing.assert_close(got, torch.cat(expected, dim=2), rtol=0, atol=0)
        matrix = reference.attention_matrix(
            q, k, kind=name, is_causal=is_causal, cu_seqlens=torch.tensor(ends, dtype=torch.int32), **options
        )
        torch.testing.assert_close(matrix @ v.repeat_interleave(2, 1), got, **EXACT)
    if name == "lln":
        got = attention(q, k, v, alpha=alpha, cu_seqlens=torch.tensor([0, 10, 24], dtype=torch.int32))
        expected = attention(q[:, :, 10:], k[:, :, 10:], v[:, :, 10:], alpha=alpha[:, :, 10:])
        torch.testing.assert_close(got[:, :, 10:], expected, rtol=0, atol=0)


# What is refused


def refused(call, message, error=ValueError):
    with pytest.raises(error, match=message):
        call()


def test_what_is_refused(tokens):
    q, k, v = tokens(B=2, H=4, Hk=2, N=6, D=8)
    m_q, m_k = torch.zeros(4, 8), torch.zeros(2, 8)
    attention = functools.partial(reference.lln_attention, q, k, v)
    for call in (attention, functools.partial(reference.match_moments, q, k)):
        refused(lambda call=call: call(form="exact"), "form must be one of 'paper', 'unbiased', 'decomposed'")
        refused(lambda call=call: call(matching="best"), "matching must be one of")
        refused(lambda call=call: call(scope="everything"), "scope must be one of")
        refused(lambda call=call: call(form="unbiased", centers=(m_q, m_k)), 'centers belong to form="decomposed"')
        refused(lambda call=call: call(form="decomposed", is_causal=True), 'give centers=, or statistics="running"')
        refused(lambda call=call: call(is_causal=True, scope="batch"), 'use scope="sample"')
        wrong = functools.partial(call, form="decomposed")
        refused(
            lambda wrong=wrong: wrong(centers=(m_k, m_k)), r"m_q of centers must have shape \(4, 8\) or \(2, 4, 8\)"
        )
        refused(
            lambda wrong=wrong: wrong(centers=(m_q, m_q)), r"m_k of centers must have shape \(2, 8\) or \(2, 2, 8\)"
        )
        refused(lambda wrong=wrong: wrong(centers=(m_q, m_k[:, :1])), "m_k of centers")
        refused(lambda wrong=wrong: wrong(centers=(m_q,)), "two tensors", TypeError)
        refused(lambda wrong=wrong: wrong(centers=(m_q, 0.0)), "got float", TypeError)
        refused(lambda wrong=wrong: wrong(centers=(m_q.int(), m_k)), "got torch.int32", TypeError)
    for name in ("block_diagonal_attention", "lln_diag_attention"):
        refused(
            lambda name=name: getattr(reference, name)(q, k, v, near="far"), "near must be one of 'blocks', 'window'"
        )


def test_what_is_refused_of_packed_sequences(tokens):
    q, k, v = tokens(B=1, H=2, N=6, D=8)

    def call(ends, dtype=torch.int32, inputs=(q, k, v), **options):
        reference.lln_attention(*inputs, cu_seqlens=torch.tensor(ends, dtype=dtype), **options)

    for ends in ([0, 5], [1, 6], [0, 4, 2, 6], [6], [[0, 6]], []):
        refused(lambda ends=ends: call(ends), "cu_seqlens must rise from 0 to the number of tokens, 6")
    refused(lambda: call([0, 6], dtype=torch.int64), "int32 tensor, got torch.int64; convert with .int()", TypeError)
    refused(lambda: reference.lln_attention(q, k, v, cu_seqlens=[0, 6]), "got list", TypeError)
    refused(lambda: call([0, 6], key_padding_mask=torch.tensor([3])), "cu_seqlens or key_padding_mask, not both")
    refused(lambda: call([0, 6], query_padding_mask=torch.tensor([3])), "cu_seqlens or query_padding_mask, not both")
    refused(lambda: call([0, 6], scope="batch"), 'use scope="sample"')
    refused(lambda: call([0, 6], inputs=(q[:, :, :5], k, v)), "cu_seqlens needs as many queries as keys")
    refused(lambda: call([0, 6], inputs=[x.expand(2, 2, 6, 8) for x in (q, k, v)]), "got batch 2")
    refused(lambda: call([0, 6], form="exact"), "form must be one of")
