"""Gradients of the functions on every backend: of first and second order, of scales, of any layout, with a graph."""

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import lln
from helpers import FORMS, all_functions, causal_or_full, centers_of, only_cpu, relative
from lln import reference

KINDS = {
    "lln": ("lln_attention", {}),
    "given": ("lln_attention", {"alpha": 1.3, "beta": 0.7}),
    "diag": ("lln_diag_attention", {"block_size": 16}),
    "diag-odd": ("lln_diag_attention", {"block_size": 23}),
    "blocks": ("block_diagonal_attention", {"block_size": 70}),
    "window": ("block_diagonal_attention", {"block_size": 17, "near": "window"}),
}


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, True, False, True, True]])], ids=["all", "padded"])
@causal_or_full
@all_functions
def test_gradients_of_first_and_second_order(tokens, name, is_causal, mask):
    """In float64, which plain torch has."""
    options = {"key_padding_mask": mask, "is_causal": is_causal}
    options |= {} if name == "lln_attention" else {"block_size": 2}
    options |= {} if name == "block_diagonal_attention" else {"alpha": 1.3, "beta": 0.7}
    attention = functools.partial(getattr(lln, name), **options)
    inputs = tokens(B=1, H=1, N=5, D=2, Dv=2, grad=True)
    assert gradcheck(attention, inputs)
    assert gradgradcheck(attention, inputs)


@causal_or_full
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_gradients_are_those_of_the_plain_formula(tokens, backend, form, is_causal):
    inputs = tokens(B=1, H=2, N=12, D=8, dtype=torch.float32, grad=True)
    options = {"form": form, "is_causal": is_causal, "block_size": 4}
    options |= {"alpha": 1.3, "beta": 0.7} if form == "paper" else {}
    options |= centers_of(form, 2, 2, 8) if is_causal else {}
    weight = torch.randn_like(inputs[0])

    def second():
        output = lln.lln_diag_attention(*inputs, **options)
        first = torch.autograd.grad((output * weight).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    ours = second()
    with lln.backends.use("torch"):
        for x, y in zip(ours, second(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_scales_are_constants_unless_given_to_learn(tokens):
    q, k, v = tokens(N=5, H=2, D=3, grad=True)
    alpha, beta = lln.match_moments(q, k)
    assert not alpha.requires_grad
    assert not beta.requires_grad
    learned = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: lln.lln_attention(q.detach(), k.detach(), v.detach(), alpha=a, beta=a), learned)


@causal_or_full
@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (2, 3)], ids=str)
def test_given_scales_learn(tokens, backend, shape, is_causal):
    q, k, v = tokens(B=2, H=3, N=70, D=8, dtype=torch.float32)
    gradients = []
    for dtype, attention in ((torch.float32, lln.lln_attention), (torch.float64, reference.lln_attention)):
        scales = [torch.full(shape, x, dtype=dtype, requires_grad=True) for x in (1.2, 0.8)]
        output = attention(*(x.to(dtype) for x in (q, k, v)), alpha=scales[0], beta=scales[1], is_causal=is_causal)
        gradients.append(torch.autograd.grad((output * torch.linspace(-1, 1, 8, dtype=dtype)).sum(), scales))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@causal_or_full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", ["features outside", "expanded"])
def test_gradients_of_features_that_are_not_contiguous(backend, kind, is_causal, gradient):
    """Channels before tokens, as a convolution leaves them: what fused code writes must not follow those strides."""
    name, options = KINDS[kind]
    base = torch.randn(2, 96, 50)
    upstream = torch.randn(2, 2, 16, 50).mT if gradient == "features outside" else torch.randn(2, 2, 1, 1)

    def run(module, dtype):
        x = base.to(dtype).requires_grad_()
        q, k, v = x.view(2, 3, 2, 16, 50).transpose(3, 4).unbind(1)
        output = getattr(module, name)(q, k, v, is_causal=is_causal, **options)
        return torch.autograd.grad(output, x, upstream.to(dtype).expand_as(output))[0]

    assert relative(run(lln, torch.float32), run(reference, torch.float64)) < 1e-5


@causal_or_full
@all_functions
def test_batches_of_gradients(tokens, backend, name, is_causal):
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    inputs = tuple(tokens(B=1, H=1, N=5, D=8, dtype=torch.float32))
    jacobian = torch.autograd.functional.jacobian
    for one, many in zip(jacobian(attention, inputs), jacobian(attention, inputs, vectorize=True), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-6)
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = attention(*leaves)
    gradients = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, leaves, gradients, is_grads_batched=True, retain_graph=True)
    for i, gradient in enumerate(gradients):
        for one, many in zip(torch.autograd.grad(output, leaves, gradient, retain_graph=True), batched, strict=True):
            torch.testing.assert_close(one, many[i], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "apart"])
def test_gradients_with_a_graph_are_those_without(backend, form, is_shared):
    """Also where inputs are one tensor, or depend on each other, as the weights of keys do on keys in some forms."""
    for dtype in (torch.float32, torch.float64) if backend == "torch" else (torch.float32,):
        x, y = torch.randn(2, 1, 2, 10, 8, dtype=dtype)
        x.requires_grad_()
        inputs = (x, x, x * x) if is_shared else (y, x, y)
        loss = lln.lln_diag_attention(*inputs, form=form, key_weight=x.mean(dim=-1), block_size=4).pow(3).sum()
        (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
        (found,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        (batched,) = torch.autograd.grad(loss, x, torch.ones(1, dtype=dtype), is_grads_batched=True)
        torch.testing.assert_close(batched[0], expected, rtol=1e-4, atol=1e-5)


@causal_or_full
@pytest.mark.parametrize("name", ["lln_attention", "lln_diag_attention"])
def test_backward_allocates_in_proportion_to_the_tokens(tokens, backend, name, is_causal):
    """The gradient of each piece of a long sequence must not be as large as the sequence."""

    def allocated(N):
        inputs = tokens(B=1, H=1, N=N, D=8, dtype=torch.float32, grad=True)
        output = getattr(lln, name)(*inputs, is_causal=is_causal)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            output.sum().backward()
        return sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())

    # Plain torch works in many small pieces, of which each is an event to the profiler.
    long = 2**13 if backend == "torch" else 2**15
    assert allocated(long) < 4.4 * allocated(long // 4)


@only_cpu
def test_a_key_with_all_weight_has_no_part_in_gradients_of_centers(backend):
    """The gradient of m_q is a sum of keys, times gradients that vanish where one of them has all weight."""
    query, key, value = torch.randn(3, 1, 2, 70, 16)
    query = query[:, :, :1].repeat(1, 1, 70, 1)
    key[:, :, 0] = 1e5 * query[:, :, 0]
    query.requires_grad_()
    output = lln.lln_attention(query, key, value, form="decomposed")
    (gradient,) = torch.autograd.grad(output, query, torch.randn_like(value))
    assert gradient.abs().max() < 1e-6  # a rounding of the keys is 1e-2
