"""The unbiased and the decomposed form in the fused CPU code, and `key_weight`, against the reference in float64."""

import functools
import math

import pytest
import torch

import lln
from lln import reference
from lln.backends import explain
from lln.backends.cpu import build_problem

needs_compiler = pytest.mark.skipif(build_problem() is not None, reason="no C compiler")
causal_or_full = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
new_forms = pytest.mark.parametrize("form", ["unbiased", "decomposed"])


def options_of(form, is_causal, *, heads, key_heads, width, frozen=False):
    options = {"form": form, "is_causal": is_causal}
    if form == "decomposed" and (is_causal or frozen):
        options["centers"] = (torch.randn(heads, width) / 2, torch.randn(key_heads, width) / 2)
    return options


def in_double(options):
    def convert(x):
        if isinstance(x, tuple):
            return tuple(y.double() for y in x)
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return {name: convert(x) for name, x in options.items()}


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
    theirs = run(reference, name, [x.double() for x in inputs], gradient, in_double(options), leaves)
    unit = max(float(x.abs().max()) for x in theirs[1:4])
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if i == 0 and keep is not None:
            x, y = x * keep[:, None, :, None], y * keep[:, None, :, None]
        error = float((x.double() - y).abs().max() / (y.abs().max() if i in (0, 4, 5) else unit))
        assert error < limit, (i, error)
    return ours


@pytest.fixture
def four_threads():
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@causal_or_full
@new_forms
@pytest.mark.parametrize("near", [None, "blocks", "window"])
def test_equals_the_reference(tokens, near, form, is_causal):
    q, k, v = tokens(B=2, H=4, Hk=2, N=90, D=24, Dv=40, dtype=torch.float32)
    q, k = q + torch.randn(4, 1, 24), k + torch.randn(2, 1, 24)
    keep = torch.rand(2, 90) > 0.3
    options = options_of(form, is_causal, heads=4, key_heads=2, width=24)
    options |= {"key_padding_mask": keep, "key_weight": 2 * torch.randn(2, 1, 90)}
    name = "lln_attention" if near is None else "lln_diag_attention"
    options |= {} if near is None else {"near": near, "block_size": 16}
    assert explain(q, k, v, **options) == "cpu: yes; torch: yes" or build_problem() is not None
    output, *_ = compare((q, k, v), options, name=name, leaves=("key_weight",), keep=keep)
    dirty = [x.masked_fill(~keep[:, None, :, None], torch.nan) for x in (q, k, v)]
    options["key_weight"] = options["key_weight"].masked_fill(~keep[:, None], torch.nan)
    found = getattr(lln, name)(*dirty, **options)
    torch.testing.assert_close(found * keep[:, None, :, None], output * keep[:, None, :, None])


@causal_or_full
@new_forms
@pytest.mark.parametrize("N", [1, 2, 65])
def test_lengths_and_given_scales(tokens, N, form, is_causal):
    q, k, v = tokens(B=2, H=2, N=N, D=16, dtype=torch.float32)
    options = options_of(form, is_causal, heads=2, key_heads=2, width=16, frozen=N == 2)
    compare((q, k, v), options)
    options |= {"alpha": torch.tensor([0.8, 1.3]), "beta": torch.tensor([1.1, 0.6])}
    compare((q, k, v), options, leaves=("alpha", "beta") if N > 1 else ())


@causal_or_full
@new_forms
def test_chunks(tokens, four_threads, form, is_causal):
    q, k, v = tokens(B=1, H=2, Hk=1, N=600, D=8, dtype=torch.float32)
    k[:, :, 500] += 3  # the largest weight is not in the first chunk
    compare((q + 1, k, v), options_of(form, is_causal, heads=2, key_heads=1, width=8), limit=2e-5)


@causal_or_full
@new_forms
@pytest.mark.parametrize("threads", [1, 4])
def test_features_that_are_small_in_all_keys(tokens, form, is_causal, threads):
    """exp(b) of half of the features underflows, and queries so large that these count nevertheless."""
    q, k, v = tokens(B=1, H=1, N=300, D=16, dtype=torch.float32)
    sign = torch.tensor([1.0, -1.0]).repeat(8)
    q, k = q - 60 * sign, k + 60 * sign
    options = options_of(form, is_causal, heads=1, key_heads=1, width=16, frozen=True)
    torch.set_num_threads(threads)
    compare((q, k, v), options | {"alpha": 1.0, "beta": 1.0}, limit=3e-5)
    torch.set_num_threads(1)


@causal_or_full
@new_forms
@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_matched_scales_follow_the_curves_of_the_form(tokens, scale, matching, form, is_causal):
    q, k, v = tokens(B=1, H=2, N=70, D=64, dtype=torch.float32, scale=scale)
    options = options_of(form, is_causal, heads=2, key_heads=2, width=64) | {"matching": matching}
    options |= {"centers": tuple(x * scale for x in options["centers"])} if "centers" in options else {}
    expected = reference.lln_attention(*(x.double() for x in (q, k, v)), **in_double(options))
    torch.testing.assert_close(lln.lln_attention(q, k, v, **options).double(), expected, rtol=1e-4, atol=1e-5 * scale)


@causal_or_full
@new_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(tokens, form, is_causal, dtype):
    """The error is at most twice that of the plain formula in the same precision, three times for gradients."""
    q, k, v = tokens(B=1, H=2, N=100, D=32, dtype=torch.float32)
    q, k, v = (x.to(dtype) for x in (q + torch.randn(2, 1, 32), k + torch.randn(2, 1, 32), v))
    options = options_of(form, is_causal, heads=2, key_heads=2, width=32)
    gradient = torch.randn(1, 2, 100, 32).to(dtype)
    exact = run(reference, "lln_attention", [x.double() for x in (q, k, v)], gradient, in_double(options))
    plain = run(reference, "lln_attention", (q, k, v), gradient, options)
    ours = run(lln, "lln_attention", (q, k, v), gradient, options)
    for x, y, z, times in zip(ours, plain, exact, (2, 3, 3, 3), strict=True):
        assert x.dtype is dtype
        assert (x.double() - z).abs().max() <= times * (y.double() - z).abs().max()


@causal_or_full
def test_the_decomposed_form_is_the_unbiased_one_of_centred_tokens_with_column_weights(tokens, is_causal):
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


@pytest.mark.parametrize("form", ["paper", "unbiased", "decomposed"])
def test_weights_of_packed_sequences(tokens, form):
    q, k, v = tokens(B=1, H=2, N=24, D=8, dtype=torch.float32)
    weight = torch.randn(1, 1, 24)
    for ends in ([0, 7, 7, 8, 24], [0, 12, 24], [0, 24]):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        got, expected = (
            module.lln_attention(q, k, v, form=form, cu_seqlens=cu_seqlens, key_weight=weight)
            for module in (lln, reference)
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_weights_that_are_not_finite_show(tokens):
    q, k, v = tokens(B=1, H=2, N=70, D=8, dtype=torch.float32)
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight = torch.randn(1, 2, 70)
        weight[0, 1, 66] = bad
        dirty = lln.lln_attention(q, k, v, form="unbiased", key_weight=weight)
        assert dirty[0, 0].isfinite().all()
        assert dirty[0, 1].isnan().all()


@causal_or_full
@new_forms
def test_gradients_of_gradients(tokens, form, is_causal, monkeypatch):
    q, k, v = tokens(B=1, H=2, N=12, D=8, dtype=torch.float32, grad=True)
    options = options_of(form, is_causal, heads=2, key_heads=2, width=8)
    weight = torch.randn_like(q)

    def second():
        output = lln.lln_diag_attention(q, k, v, block_size=4, **options)
        first = torch.autograd.grad((output * weight).sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))

    ours = second()
    monkeypatch.setenv("LLN_BACKEND", "torch")
    for x, y in zip(ours, second(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("form", "is_causal"), [("decomposed", False), ("unbiased", True)])
def test_compiled(tokens, form, is_causal):
    q, k, v = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32)
    options = options_of(form, is_causal, heads=2, key_heads=2, width=8)
    options |= {"near": "window", "block_size": 8, "key_weight": torch.randn(1, 2, 40)}
    gradient = torch.randn_like(q)
    eager = run(lln, "lln_diag_attention", (q, k, v), gradient, options, ("key_weight",))
    torch._dynamo.reset()

    class Compiled:
        attention = staticmethod(torch.compile(lln.lln_diag_attention, fullgraph=True, backend="aot_eager"))

    compiled = run(Compiled, "attention", (q, k, v), gradient, options, ("key_weight",))
    for x, y in zip(compiled, eager, strict=True):
        torch.testing.assert_close(x, y)


@needs_compiler
def test_centers_with_gradients_run_in_plain_torch(tokens):
    q, k, v = tokens(B=1, H=2, N=20, D=8, dtype=torch.float32)
    centers = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    assert explain(q, k, v, form="decomposed", centers=centers).startswith("cpu: no, gradients flow to centers")
    output = lln.lln_attention(q, k, v, form="decomposed", centers=centers)
    exact = tuple(x.detach().double().requires_grad_() for x in centers)
    expected = reference.lln_attention(*(x.double() for x in (q, k, v)), form="decomposed", centers=exact)
    weight = torch.randn_like(v)
    found = torch.autograd.grad((output * weight).sum(), centers[0])[0]
    wanted = torch.autograd.grad((expected * weight).sum(), exact[0])[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("module", [lln, reference], ids=["lln", "reference"])
def test_what_is_refused(tokens, module):
    q, k, v = tokens(B=2, H=4, Hk=2, N=6, D=8, dtype=torch.float32)
    for shape in ((2, 4, 5), (2, 2, 6), (3, 4, 6), (4, 6), (2, 4, 6, 1)):
        with pytest.raises(ValueError, match=r"key_weight must have shape \(2, 4, 6\)"):
            module.lln_attention(q, k, v, key_weight=torch.zeros(shape))
    for bad in (torch.zeros(2, 4, 6, dtype=torch.int64), 1.0):
        with pytest.raises(TypeError, match="key_weight must be a floating point tensor"):
            module.lln_diag_attention(q, k, v, key_weight=bad)


def test_near_attention_has_no_weights(tokens):
    q, k, v = tokens(B=1, H=2, N=6, D=8, dtype=torch.float32)
    with pytest.raises(TypeError, match="block_diagonal_attention has no option key_weight"):
        lln.block_diagonal_attention(q, k, v, key_weight=torch.zeros(1, 2, 6))
