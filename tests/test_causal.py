"""Causal attention on every backend: nothing later counts."""

import functools

import pytest
import torch

import lln
from helpers import MATCHINGS, all_functions


@pytest.mark.parametrize("t", [0, 1, 30, 63, 64, 99])
@all_functions
def test_no_gradient_reaches_later_tokens(tokens, backend, name, t):
    inputs = tokens(N=100, D=8, dtype=torch.float32, grad=True)
    getattr(lln, name)(*inputs, is_causal=True)[:, :, t].square().sum().backward()
    for x in inputs:
        assert (x.grad[:, :, t + 1 :] == 0).all()
    assert (inputs[2].grad[:, :, t] != 0).any()


@pytest.mark.parametrize("growth", [1e3, 1e6, -1e3])
@pytest.mark.parametrize("t", [1, 31, 64, 90])
@pytest.mark.parametrize(
    ("name", "options"),
    [("block_diagonal_attention", {})]
    + [(name, {"matching": matching}) for name in ("lln_attention", "lln_diag_attention") for matching in MATCHINGS],
    ids=str,
)
def test_later_tokens_may_grow_without_being_felt(tokens, backend, name, options, t, growth):
    attention = functools.partial(getattr(lln, name), is_causal=True, **options)
    inputs = tokens(N=100, D=8, dtype=torch.float32)
    grown = [torch.cat((x[:, :, :t], growth * x[:, :, t:]), 2) for x in inputs]
    torch.testing.assert_close(attention(*grown)[:, :, :t], attention(*inputs)[:, :, :t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@all_functions
def test_what_is_not_finite_reaches_no_earlier_token(tokens, backend, name, wide, which, bad):
    attention = functools.partial(getattr(lln, name), is_causal=True)
    clean = tokens(N=150, dtype=wide)
    inputs = [x.clone() for x in clean]
    inputs[which][0, :, 90] = bad
    output = attention(*inputs)
    torch.testing.assert_close(output[:, :, :90], attention(*clean)[:, :, :90], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output[1], attention(*clean)[1], rtol=0, atol=0)
    assert not output[0, :, 90].isfinite().any()


@pytest.mark.parametrize("where", [1, 2], ids=["key", "value"])
def test_what_is_not_finite_shows_in_all_later_rows(tokens, backend, where):
    inputs = tokens(B=1, H=1, N=40, D=8, dtype=torch.float32)
    clean = lln.lln_attention(*inputs, is_causal=True)
    inputs[where][0, 0, 20, 3] = -torch.inf
    dirty = lln.lln_attention(*inputs, is_causal=True)
    torch.testing.assert_close(dirty[:, :, :20], clean[:, :, :20])
    assert not dirty[:, :, 20:].isfinite().all(dim=-1).any()
