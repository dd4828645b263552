"""The unbiased and the decomposed form on every backend, against the reference in float64."""

import functools
import math

import pytest
import torch

import lln
from helpers import MATCHINGS, causal_or_full, centers_of, in_dtype, new_forms, only_cpu, threads
from lln import reference


def options_of(form, is_causal, *, heads, key_heads, width, frozen=False):
    options = {"form": form, "is_causal": is_causal}
    return options | (centers_of(form, heads, key_heads, width) if is_causal or frozen else {})


def run(module, name, inputs, gradient, options, leaves=()):
    """The output and the gradients of query, key, value and of the options named in `leaves`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    options = options | {x: options[x].detach().requires_grad_() for x in leaves}
    output = getattr(module, name)(*inputs, **options)
    wanted = [*inputs, *(options[x] for x in leaves)]
    return [output.detach(), *torch.autograd.grad(output, wanted, gradient.to(output.dtype))]


def compare(inputs, options, *, name="lln_attention", leaves=(), limit=1e-5, keep=None):
    gradient = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3])
    if keep is not None:
        gradient = gradient * keep[:, None, :, None]
    ours = run(lln, name, inputs, gradient, options, leaves)
    exact = in_dtype(options, torch.float64)
    theirs = run(reference, name, [x.double() for x in inputs], gradient, exact, leaves)
    unit = max(float(x.abs().max()) for x in theirs[1:4])
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if i == 0 and keep is not None:
            x, y = x * keep[:, None, :, None], y * keep[:, None, :, None]
        error = float((x.double() - y).abs().max() / (y.abs().max() if i in (0, 4, 5) else unit))
        assert error < limit, (i, error)
    return ours


@causal_or_full
@new_forms
@pytest.mark.parametrize("near", [None, "blocks", "window"])
def test_equals_the_reference(tokens, backend, near, form, is_causal):
    q, k, v = tokens(B=2, H=4, Hk=2, N=90, D=24, Dv=40, dtype=torch.float32)
    q, k = q + torch.randn(4, 1, 24), k + torch.randn(2, 1, 24)
    keep = torch.rand(2, 90) > 0.3
    options = options_of(form, is_causal, heads=4, key_heads=2, width=24)
    options |= {"key_padding_mask": keep, "key_weight": 2 * torch.randn(2, 1, 90)}
    name = "lln_attention" if near is None else "lln_diag_attention"
    options |= {} if near is None else {"near": near, "block_size": 16}
    output, *_ = compare((q, k, v), options, name=name, leaves=("key_weight",), keep=keep)
    dirty = [x.masked_fill(~keep[:, None, :, None], torch.nan) for x in (q, k, v)]
    options["key_weight"] = options["key_weight"].masked_fill(~keep[:, None], torch.nan)
    found = getattr(lln, name)(*dirty, **options)
    torch.testing.assert_close(found * keep[:, None, :, None], output * keep[:, None, :, None])


@causal_or_full
@new_forms
@pytest.mark.parametrize(("N", "D"), [(1, 16), (2, 16), (65, 16), (65, 24)])  # 24: not whole vectors
def test_lengths_and_given_scales(tokens, backend, N, D, form, is_causal):
    q, k, v = tokens(B=2, H=2, N=N, D=D, dtype=torch.float32)
    options = options_of(form, is_causal, heads=2, key_heads=2, width=D, frozen=N == 2)
    compare((q, k, v), options)
    options |= {"alpha": torch.tensor([0.8, 1.3]), "beta": torch.tensor([1.1, 0.6])}
    compare((q, k, v), options, leaves=("alpha", "beta") if N > 1 else ())


@causal_or_full
@new_forms
@only_cpu
def test_chunks(tokens, backend, four_threads, form, is_causal):
    q, k, v = tokens(B=1, H=2, Hk=1, N=300, D=8, dtype=torch.float32)
    k[:, :, 250] += 3  # the largest weight is not in the first chunk
    compare((q + 1, k, v), options_of(form, is_causal, heads=2, key_heads=1, width=8), limit=2e-5)


@causal_or_full
@new_forms
@pytest.mark.parametrize("count", [1, 4])
def test_features_that_are_small_in_all_keys(tokens, backend, form, is_causal, count):
    """exp(b) of half of the features underflows, and queries so large that these count nevertheless."""
    q, k, v = tokens(B=1, H=1, N=300, D=16, dtype=torch.float32)
    sign = torch.tensor([1.0, -1.0]).repeat(8)
    q, k = q - 60 * sign, k + 60 * sign
    options = options_of(form, is_causal, heads=1, key_heads=1, width=16, frozen=True)
    with threads(count):
        compare((q, k, v), options | {"alpha": 1.0, "beta": 1.0}, limit=3e-5)


@causal_or_full
@new_forms
@pytest.mark.parametrize("matching", MATCHINGS)
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_matched_scales_follow_the_curves_of_the_form(tokens, backend, scale, matching, form, is_causal):
    q, k, v = tokens(B=1, H=2, N=70, D=64, dtype=torch.float32, scale=scale)
    options = options_of(form, is_causal, heads=2, key_heads=2, width=64) | {"matching": matching}
    options |= {"centers": tuple(x * scale for x in options["centers"])} if "centers" in options else {}
    expected = reference.lln_attention(*(x.double() for x in (q, k, v)), **in_dtype(options, torch.float64))
    torch.testing.assert_close(lln.lln_attention(q, k, v, **options).double(), expected, rtol=1e-4, atol=1e-5 * scale)


@causal_or_full
@new_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_of_tokens_off_centre(tokens, backend, form, is_causal, dtype):
    """The error is at most twice that of the plain formula in the same precision, three times for gradients."""
    q, k, v = tokens(B=1, H=2, N=100, D=32, dtype=torch.float32)
    q, k, v = (x.to(dtype) for x in (q + torch.randn(2, 1, 32), k + torch.randn(2, 1, 32), v))
    options = options_of(form, is_causal, heads=2, key_heads=2, width=32)
    gradient = torch.randn(1, 2, 100, 32).to(dtype)
    double = in_dtype(options, torch.float64)
    exact = run(reference, "lln_attention", [x.double() for x in (q, k, v)], gradient, double)
    plain = run(reference, "lln_attention", (q, k, v), gradient, options)
    ours = run(lln, "lln_attention", (q, k, v), gradient, options)
    for x, y, z, times in zip(ours, plain, exact, (2, 3, 3, 3), strict=True):
        assert x.dtype is dtype
        assert (x.double() - z).abs().max() <= times * (y.double() - z).abs().max()


@causal_or_full
def test_the_decomposed_form_is_the_unbiased_one_of_centred_tokens_with_column_weights(tokens, backend, is_causal):
    q, k, v = tokens(B=2, H=4, N=40, D=16, dtype=torch.float32)
    m_q, m_k = torch.randn(4, 16), torch.randn(4, 16)
    centers = (m_q, m_k) if is_causal else (q.mean(2), k.mean(2))
    m_q, m_k = (x.reshape(-1, 4, 1, 16) for x in centers)
    column = (k * m_q).sum(-1) / math.sqrt(16)
    for module in (lln, reference):
        attention = functools.partial(module.lln_attention, is_causal=is_causal)
        decomposed = attention(q, k, v, form="decomposed", centers=centers if is_causal else None)
        unbiased = attention(q - m_q, k - m_k, v, form="unbiased", key_weight=column)
        torch.testing.assert_close(decomposed, unbiased, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("N", [5, 64, 500])
def test_equal_queries_of_the_decomposed_form(tokens, backend, N):
    """Their mean is each of them: what rounding would leave of the differences is not scaled to one."""
    q, k, v = tokens(B=1, H=2, N=N, D=16, dtype=torch.float32)
    compare((q[:, :, :1].repeat(1, 1, N, 1), k, v), {"form": "decomposed"})


@pytest.mark.parametrize(("form", "is_causal"), [("decomposed", False), ("unbiased", True)])
def test_compiled(tokens, backend, form, is_causal):
    # Few tokens: the graph of plain causal attention grows with the logarithm of their number.
    q, k, v = tokens(B=1, H=2, N=7, D=8, dtype=torch.float32)
    options = options_of(form, is_causal, heads=2, key_heads=2, width=8)
    options |= {"near": "window", "block_size": 3, "key_weight": torch.randn(1, 2, 7)}
    gradient = torch.randn_like(q)
    eager = run(lln, "lln_diag_attention", (q, k, v), gradient, options, ("key_weight",))
    torch._dynamo.reset()

    class Compiled:
        attention = staticmethod(torch.compile(lln.lln_diag_attention, fullgraph=True, backend="aot_eager"))

    compiled = run(Compiled, "attention", (q, k, v), gradient, options, ("key_weight",))
    for x, y in zip(compiled, eager, strict=True):
        torch.testing.assert_close(x, y)


def test_gradients_of_centers(tokens):
    """By whichever backend can: the fused code cannot."""
    q, k, v = tokens(B=1, H=2, N=20, D=8, dtype=torch.float32)
    centers = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    explained = lln.backends.explain(q, k, v, form="decomposed", centers=centers)
    assert "cpu: no, gradients flow to centers" in explained
    output = lln.lln_attention(q, k, v, form="decomposed", centers=centers)
    exact = tuple(x.detach().double().requires_grad_() for x in centers)
    expected = reference.lln_attention(*(x.double() for x in (q, k, v)), form="decomposed", centers=exact)
    weight = torch.randn_like(v)
    found = torch.autograd.grad((output * weight).sum(), centers[0])[0]
    wanted = torch.autograd.grad((expected * weight).sum(), exact[0])[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4)
