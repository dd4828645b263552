"""Low precision on every backend, autocast, and input that is extreme, constant or not finite."""

import functools
import math

import pytest
import torch

import lln
from helpers import (
    CALLS,
    FUNCTIONS,
    MATCHINGS,
    all_calls,
    all_functions,
    assert_low_precision,
    causal_or_full,
    centers_of,
    compare_call,
    half_dtypes,
)
from lln import reference


@causal_or_full
@all_calls
@half_dtypes
@pytest.mark.parametrize("shape", ["square", "grouped"])
def test_low_precision_is_at_most_twice_as_wrong_as_the_plain_formula(tokens, backend, call, is_causal, dtype, shape):
    name, options = CALLS[call]
    if shape == "square":
        inputs = tokens(B=1, H=2, N=96, D=32, dtype=dtype)
    else:
        inputs = tokens(B=1, H=2, Hk=1, N=80, D=32, dtype=dtype)
        options = options | {"key_padding_mask": torch.tensor([71])}
    if options.get("form", "paper") == "paper" and name != "block_diagonal_attention":
        options = options | {"alpha": 1.25, "beta": 1.25}  # statistics aside: what is compared is the attention
    if is_causal:
        options = options | centers_of(options.get("form"), 2, inputs[1].shape[1], 32)
    gradient = torch.linspace(-1, 1, 32).expand(1, 2, 96, 32) if shape == "square" else torch.randn(1, 2, 80, 32)
    ours, plain = (functools.partial(getattr(m, name), is_causal=is_causal, **options) for m in (lln, reference))
    assert_low_precision(ours, plain, inputs, gradient.to(dtype))


def test_forms_in_low_precision_do_not_overflow(backend):
    q = (torch.randn(1, 1, 64, 16) * 3e4).clamp(-6e4, 6e4).half()
    center = torch.full((1, 16), -3e4)
    options = {"form": "decomposed", "alpha": 1e-4, "beta": 1e-4, "centers": (center, center)}
    output = lln.lln_attention(q, q, torch.randn(1, 1, 64, 16).half(), **options)
    assert output.dtype is torch.float16
    assert output.isfinite().all()


@all_functions
def test_autocast_has_its_dtype_as_sdpa(tokens, backend, name):
    q, k, v = tokens(N=40, dtype=torch.float32)
    attention = getattr(lln, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attention(q.bfloat16(), k, v)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q.bfloat16(), k, v)
    assert mixed.dtype == sdpa.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()), rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16), lln.backends.use("torch"):
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


@causal_or_full
@all_functions
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 1e4, 1e8])
def test_extreme_input_is_finite_and_so_are_gradients(tokens, backend, name, scale, is_causal):
    q, k, v = (x.requires_grad_() for x in tokens(N=70, dtype=torch.float32))
    output = getattr(lln, name)(q * scale, k * scale, v, is_causal=is_causal)
    output.square().sum().backward()
    for x in (output, q.grad, k.grad, v.grad):
        assert x.isfinite().all()
    assert output.min() >= v.min() - 1e-5  # rows are convex combinations of values
    assert output.max() <= v.max() + 1e-5


@pytest.mark.parametrize("magnitude", [1e15, 1e19, 1e30, 3e38], ids=str)
@causal_or_full
@pytest.mark.parametrize("matching", MATCHINGS)
def test_lln_is_finite_for_any_finite_input(tokens, backend, magnitude, is_causal, matching):
    q, k, v = tokens(N=33, dtype=torch.float32)
    q, k = (x / x.abs().max() * magnitude for x in (q, k))
    assert lln.lln_attention(q, k, v, is_causal=is_causal, matching=matching).isfinite().all()


@causal_or_full
@all_functions
def test_constant_input_gives_uniform_attention(tokens, backend, name, is_causal):
    _, _, v = tokens(N=64, dtype=torch.float32)
    q, k = torch.full((2, 4, 64, 16), 0.1), torch.full((2, 4, 64, 16), -7.3)
    output = getattr(lln, name)(q, k, v, is_causal=is_causal)
    uniform = v.cumsum(2) / torch.arange(1, 65)[:, None] if is_causal else v.mean(2, keepdim=True).expand_as(v)
    torch.testing.assert_close(output, uniform, rtol=1e-4, atol=1e-5)


def test_keys_that_grow_and_grow(tokens, backend):
    """Causal tiles are cut where a key exceeds all before it by far; nothing overflows, nothing is lost."""
    q, k, v = tokens(B=1, H=2, N=100, D=16, dtype=torch.float32)
    k = k * torch.linspace(1, 400, 100)[:, None]
    compare_call("lln_attention", (q, k, v), alpha=1.0, beta=1.0, is_causal=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["query", "key", "value"])
@causal_or_full
def test_input_that_is_not_finite_shows(tokens, backend, where, bad, is_causal):
    """As in SDPA, the rows that attend to it are not finite (and, unlike with SDPA, causal rows before it are)."""
    inputs = tokens(N=20, dtype=torch.float32)
    inputs[where][0, 1, 7, 3] = bad
    sdpa = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    saw = ~sdpa.isfinite()
    saw[:, :, :7] &= not is_causal
    for name in FUNCTIONS:
        shown = ~getattr(lln, name)(*inputs, is_causal=is_causal).isfinite()
        assert shown[saw].all()
        assert shown[0, 1, 7].any() or name == "block_diagonal_attention"
        assert not shown[1].any()
