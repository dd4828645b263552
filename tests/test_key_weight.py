"""Log-weights of keys in the fused CPU code: b = beta k + w, with w the same for all features of a key."""

import dataclasses
import functools

import pytest
import torch

from lln import reference
from lln.backends.cpu import CpuBackend, autograd, binding, build_problem
from lln.problem import Problem

pytestmark = pytest.mark.skipif(build_problem() is not None, reason="no C compiler")
causal_or_full = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
ALPHA, BETA = 1.25, 0.75  # exact in all dtypes
# What is added to a normal weight, and what it is multiplied with.
KINDS = {"normal": (0, 1), "high": (1e4, 1), "low": (-1e4, 1), "wide": (0, 10)}


def fused(query, key, value, weight, *, near=None, block_size=16, **options):
    scales = {"alpha": ALPHA, "beta": BETA}
    problem = Problem.make(query, key, value, far=True, near=near, block_size=block_size, **scales, **options)
    problem = dataclasses.replace(problem, key_weight=weight)
    assert CpuBackend().why_not(problem) is None
    return CpuBackend().attention(problem)


def explicit(query, key, value, weight, *, near=None, block_size=16, key_padding_mask=None, is_causal=False):
    options = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
    a, b = query * ALPHA, reference._heads(key, query) * BETA + weight[..., None]
    allowed = reference._allowed(query, key, key_padding_mask, is_causal)
    scores = torch.logsumexp(a[:, :, :, None] + b[:, :, None], dim=-1)
    far = reference._normalise(scores, allowed) @ reference._heads(value, query)
    if near is None:
        return far
    return (
        far + reference.block_diagonal_attention(query, key, value, near=near, block_size=block_size, **options)
    ) / 2


def relative(got, want):
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=0.1))


def run(function, inputs, gradient, dtype=None):
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def compare(inputs, **options):
    """Output and gradients against the formula in float64; returns those of the fused code."""
    gradient = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3])
    ours = run(functools.partial(fused, **options), inputs, gradient)
    theirs = run(functools.partial(explicit, **options), inputs, gradient, torch.float64)
    for x, y, limit in zip(ours, theirs, (2e-6, 1e-5, 1e-5, 1e-5, 1e-5), strict=True):
        assert relative(x, y) < limit
    return ours


def weights_of(query, key, kind="normal"):
    offset, factor = KINDS[kind]
    return torch.randn(*query.shape[:2], key.shape[2]) * factor + offset


@pytest.fixture
def four_threads():
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@causal_or_full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [2, 64, 130], ids=lambda n: f"N{n}")
def test_equals_the_formula(tokens, N, kind, is_causal):
    q, k, v = tokens(B=1, H=2, N=N, D=24, Dv=8, dtype=torch.float32)
    compare((q, k, v, weights_of(q, k, kind)), is_causal=is_causal)


@causal_or_full
@pytest.mark.parametrize("near", [None, "blocks", "window"])
def test_padding_and_shared_keys(tokens, near, is_causal):
    q, k, v = tokens(B=2, H=4, Hk=2, N=90, D=16, Dv=40, dtype=torch.float32)
    w = weights_of(q, k)
    keep = torch.rand(2, 90) > 0.3
    keep[1] = torch.arange(90) >= 30
    options = {"near": near, "is_causal": is_causal, "key_padding_mask": keep}
    output, *gradients = compare((q, k, v, w), **options)
    assert not gradients[3].masked_select(~keep[:, None]).any()
    dirty = w.masked_fill(~keep[:, None], torch.nan)
    assert torch.equal(fused(q, k, v, dirty, **options), output)


@causal_or_full
@pytest.mark.parametrize("kind", ["normal", "high"])
def test_chunks(tokens, four_threads, kind, is_causal):
    q, k, v = tokens(B=1, H=2, Hk=1, N=600, D=8, dtype=torch.float32)
    w = weights_of(q, k, kind)
    w[:, :, 500] += 8  # the largest is not in the first chunk
    compare((q, k, v, w), is_causal=is_causal)


@causal_or_full
def test_keys_and_weights_that_cancel(tokens, is_causal):
    """What float32 loses of beta k and of w, each thousands, would be of the size of the differences between keys."""
    q, k, v = tokens(B=1, H=2, N=100, D=16, dtype=torch.float32)
    offset = 4096 * torch.randn(1, 2, 100)
    k = k + offset[..., None]
    compare((q, k, v, weights_of(q, k) - BETA * offset), is_causal=is_causal)


@causal_or_full
@pytest.mark.parametrize("size", [1e6, 1e8, 1e9, 1e12, 1e30], ids=str)
def test_finite_for_finite_input(tokens, size, is_causal):
    q, k, v = tokens(B=1, H=2, N=100, D=16, dtype=torch.float32)
    for key, weight in (
        (k * size, weights_of(q, k)),
        (k, weights_of(q, k) * size),
        (k + size, weights_of(q, k) - size),
    ):
        output, *gradients = run(functools.partial(fused, is_causal=is_causal), (q, key, v, weight), torch.ones_like(q))
        assert all(x.isfinite().all() for x in (output, *gradients))
        assert (output != 0).all()
        assert output.max() <= v.max() + 1e-4
        assert output.min() >= v.min() - 1e-4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_weights_that_are_not_finite_show(tokens, bad):
    q, k, v = tokens(B=1, H=4, Hk=2, N=100, D=24, dtype=torch.float32)
    w = weights_of(q, k)
    clean = fused(q, k, v, w)
    w[0, 1, 70] = bad
    dirty = fused(q, k, v, w)
    assert dirty[0, 1].isnan().all()
    assert torch.equal(dirty[0, [0, 2, 3]], clean[0, [0, 2, 3]])


@pytest.mark.parametrize("place", [0, 599])
def test_weights_that_are_not_finite_show_in_all_chunks(tokens, four_threads, place):
    q, k, v = tokens(B=1, H=1, N=600, D=8, dtype=torch.float32)
    w = weights_of(q, k)
    w[:, :, place] = -torch.inf
    assert fused(q, k, v, w).isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("near", [None, "window"])
def test_later_weights_that_are_not_finite_do_not_reach_earlier_rows(tokens, near, bad):
    q, k, v = tokens(B=1, H=2, N=100, D=24, dtype=torch.float32)
    w = weights_of(q, k)
    clean = fused(q, k, v, w, near=near, is_causal=True)
    w[:, :, 70] = bad
    dirty = fused(q, k, v, w, near=near, is_causal=True)
    torch.testing.assert_close(dirty[:, :, :70], clean[:, :, :70])
    assert dirty[:, :, 70:].isnan().all()


def test_weights_that_grow(tokens):
    """Each key outweighs all before it: tiles of one token."""
    q, k, v = tokens(B=1, H=2, N=80, D=16, dtype=torch.float32)
    compare((q, k, v, 40 * torch.arange(80.0).expand(1, 2, 80)), is_causal=True)


@causal_or_full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(tokens, dtype, is_causal):
    q, k, v = tokens(B=1, H=2, Hk=1, N=80, D=32, dtype=dtype)
    w = weights_of(q, k, "high")
    gradient = torch.randn(1, 2, 80, 32)
    ours = run(functools.partial(fused, is_causal=is_causal), (q, k, v, w), gradient)
    theirs = run(functools.partial(explicit, is_causal=is_causal), (q, k, v, w), gradient.to(dtype), torch.float64)
    for x, y in zip(ours, theirs, strict=True):
        assert relative(x, y) < 2 * torch.finfo(dtype).eps


@causal_or_full
@pytest.mark.parametrize("form", ["unbiased", "decomposed"])
def test_forms_are_the_form_of_the_paper_with_weights(tokens, form, is_causal):
    q, k, v = tokens(B=2, H=4, Hk=2, N=70, D=16, dtype=torch.float32)
    centers = (torch.randn(4, 16), torch.randn(2, 16)) if form == "decomposed" else None
    means = None if centers is None else tuple(x.double() for x in centers)
    exact = [x.double() for x in (q, k, v)]
    means = reference.centers_of(*exact[:2], form=form, centers=means, is_causal=is_causal)
    a, b = reference.features(*exact[:2], ALPHA, BETA, form, means)
    scores = torch.logsumexp(a[:, :, :, None] + b[:, :, None], dim=-1)
    allowed = reference._allowed(q, k, None, is_causal)
    expected = reference._normalise(scores, allowed) @ reference._heads(exact[2], q)
    m_q, m_k = (x[:, None] for x in centers) if centers else (0, 0)
    column = (m_q * k.repeat_interleave(2, dim=1)).sum(dim=-1) / 4
    weight = column - torch.logsumexp((k - m_k) * BETA, dim=-1).repeat_interleave(2, dim=1)
    assert relative(fused(q - m_q, k - m_k, v, weight, is_causal=is_causal), expected) < 5e-6


@causal_or_full
def test_the_same_weights_for_several_heads(tokens, is_causal):
    """Expanded tensors are read as they lie in memory; their gradient is the sum."""
    q, k, v = tokens(B=2, H=4, N=40, D=8, dtype=torch.float32)
    shared = torch.randn(2, 1, 40, requires_grad=True)
    gradient = torch.randn_like(q)
    found = torch.autograd.grad(fused(q, k, v, shared.expand(2, 4, 40), is_causal=is_causal), shared, gradient)[0]
    separate = shared.detach().repeat(1, 4, 1).requires_grad_()
    expected = torch.autograd.grad(fused(q, k, v, separate, is_causal=is_causal), separate, gradient)[0]
    torch.testing.assert_close(found, expected.sum(dim=1, keepdim=True))


@causal_or_full
def test_scales_are_matched_where_they_are_not_given(tokens, is_causal):
    q, k, v = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32)
    problem = Problem.make(q, k, v, far=True, near=None, is_causal=is_causal)
    with_zeros = dataclasses.replace(problem, key_weight=torch.zeros(1, 2, 40))
    torch.testing.assert_close(CpuBackend().attention(with_zeros), CpuBackend().attention(problem))


@causal_or_full
def test_compiled_ops(tokens, is_causal):
    q, k, v = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32, grad=True)
    weight = weights_of(q, k).requires_grad_()
    scales = torch.full((1, 1, 1), ALPHA), torch.full((1, 1, 1), BETA)
    settings = (None, None, *scales, True, 16, is_causal, "variance", True)
    torch.library.opcheck(autograd.forward_op, (q, k, v, *settings, weight))
    tensors = [x.detach() for x in (q, k, v)]
    output, *kept = binding.forward(*tensors, *settings, weight.detach())
    arguments = (output, *tensors, None, None, *kept, True, 16, is_causal, True, True, weight.detach(), True)
    torch.library.opcheck(autograd.backward_op, arguments)
    gradient = torch.randn(1, 2, 40, 8)
    ours = run(functools.partial(fused, near="window", is_causal=is_causal), (q, k, v, weight), gradient)
    by_op = run(lambda q, k, v, w: autograd.forward_op(q, k, v, *settings, w)[0], (q, k, v, weight), gradient)
    assert all(torch.equal(x, y) for x, y in zip(ours, by_op, strict=True))
