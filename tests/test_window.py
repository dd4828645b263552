"""A sliding window of softmax attention in the fused CPU code: each kept token sees the kept tokens around it."""

import functools

import pytest
import torch

from lln import reference
from lln.backends.cpu import CpuBackend, autograd, build_problem
from lln.problem import Problem

pytestmark = pytest.mark.skipif(build_problem() is not None, reason="no C compiler")
causal_or_full = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
alone_or_mean = pytest.mark.parametrize("far", [False, True], ids=["alone", "mean"])


def relative(got, want):
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-2))


def fused(query, key, value, **options):
    problem = Problem.make(query, key, value, near="window", **options)
    assert CpuBackend().why_not(problem) is None
    return CpuBackend().attention(problem)


def explicit(query, key, value, *, far, block_size, alpha=None, beta=None, **options):
    near = reference.block_diagonal_attention(query, key, value, near="window", block_size=block_size, **options)
    if not far:
        return near
    return (near + reference.lln_attention(query, key, value, alpha=alpha, beta=beta, **options)) / 2


def run(function, inputs, gradient, dtype=None):
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def compare(inputs, **options):
    """Output and gradients against the reference in float64; returns those of the fused code."""
    gradient = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3])
    ours = run(functools.partial(fused, **options), inputs, gradient)
    theirs = run(functools.partial(explicit, **options), inputs, gradient, torch.float64)
    for x, y, limit in zip(ours, theirs, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
        assert relative(x, y) < limit
    return ours


@pytest.fixture
def four_threads():
    """More threads than heads: the tokens of a head are cut into chunks."""
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@causal_or_full
@alone_or_mean
@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 300], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("N", [1, 2, 64, 150], ids=lambda n: f"N{n}")
def test_equals_the_reference(tokens, N, size, far, is_causal):
    # gradients of 32 features are summed where they are returned, those of 8 in scratch memory if vectors are longer
    inputs = tokens(B=1, H=2, N=N, D=32, Dv=8, dtype=torch.float32)
    compare(inputs, far=far, block_size=size, is_causal=is_causal)


@causal_or_full
def test_the_largest_window(tokens, is_causal):
    inputs = tokens(B=1, H=1, N=1200, D=8, dtype=torch.float32)
    compare(inputs, far=False, block_size=1024, is_causal=is_causal)


@causal_or_full
def test_how_far_a_token_sees(is_causal):
    """With equal scores the output is the mean of the values seen, here the numbers of the tokens."""
    size, N = 6, 40
    q, k, v = torch.zeros(1, 1, N, 8), torch.zeros(1, 1, N, 8), torch.arange(N).float()[:, None].expand(1, 1, N, 8)
    got = fused(q, k, v, far=False, block_size=size, is_causal=is_causal)[0, 0, :, 0]
    for i in range(N):
        seen = range(i - 5, i + 1) if is_causal else range(i - 2, i + 4)
        seen = [j for j in seen if 0 <= j < N]
        assert got[i] == pytest.approx(sum(seen) / len(seen), rel=1e-5)


@causal_or_full
@alone_or_mean
@pytest.mark.parametrize("size", [7, 40])
def test_padding_shared_keys_and_layouts(tokens, size, far, is_causal):
    """Only kept tokens count, however far apart they are; the others get zeros, and what they hold does not matter."""
    q, k, v = tokens(B=2, H=4, Hk=2, N=170, D=16, Dv=40, dtype=torch.float32)
    keep = torch.rand(2, 170) > 0.3
    keep[1] = torch.arange(170) >= 60
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    options = {"far": far, "block_size": size, "is_causal": is_causal, "key_padding_mask": keep}
    output, *gradients = compare((q, k, v), **options)
    padding = ~keep[:, None, :, None]
    if not far:
        assert not output.masked_select(padding).any()
        assert not any(x.masked_select(padding).any() for x in gradients)
    dirty = [x.masked_fill(padding, torch.nan) for x in (k, v)]
    assert torch.equal(fused(q, *dirty, **options), output)


@causal_or_full
@alone_or_mean
@pytest.mark.parametrize(("size", "padded"), [(64, False), (200, False), (50, True)])
def test_chunks_see_keys_of_their_neighbours(tokens, four_threads, size, padded, far, is_causal):
    inputs = tokens(B=1, H=2, Hk=1, N=700, D=16, dtype=torch.float32)
    keep = torch.rand(1, 700) > 0.2 if padded else None
    options = {"far": far, "block_size": size, "is_causal": is_causal, "key_padding_mask": keep}
    first = compare(inputs, **options)
    gradient = torch.randn_like(first[0])
    again = [run(functools.partial(fused, **options), inputs, gradient) for _ in range(5)]
    assert all(torch.equal(x, y) for other in again for x, y in zip(again[0], other, strict=True))


@causal_or_full
@alone_or_mean
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(tokens, dtype, far, is_causal):
    """Against float64 at most twice as wrong as the plain formula in that dtype, gradients three times."""
    inputs = tokens(B=1, H=2, Hk=1, N=150, D=32, dtype=dtype)
    gradient = torch.randn(1, 2, 150, 32).to(dtype)
    options = {"far": far, "block_size": 40, "is_causal": is_causal, "alpha": 1.25, "beta": 1.25}
    ours = run(functools.partial(fused, **options), inputs, gradient)
    plain = functools.partial(explicit, **options)
    exact, rounded = run(plain, inputs, gradient, torch.float64), run(plain, inputs, gradient)
    for got, want, other, factor in zip(ours, exact, rounded, (2, 3, 3, 3), strict=True):
        assert got.dtype == dtype
        assert relative(got, want) < factor * relative(other, want) + 1e-3


@causal_or_full
@pytest.mark.parametrize("which", ["key", "value"])
def test_what_is_not_finite_shows_only_where_it_is_seen(tokens, which, is_causal):
    inputs = tokens(B=1, H=1, N=150, D=8, dtype=torch.float32)
    options = {"far": False, "block_size": 20, "is_causal": is_causal}
    gradient = torch.randn(1, 1, 150, 8)
    before, after = (0, 19) if is_causal else (10, 9)
    affected = torch.zeros(150, dtype=torch.bool)
    affected[70 - before : 70 + after + 1] = True
    gradient[:, :, affected] = 0  # a loss of the other rows
    clean = run(functools.partial(fused, **options), inputs, gradient)
    inputs[1 if which == "key" else 2][0, 0, 70, 3] = torch.nan
    dirty = run(functools.partial(fused, **options), inputs, gradient)
    assert dirty[0][0, 0, affected].isnan().any(dim=-1).all()
    for x, y in zip(clean[:2], dirty[:2], strict=True):  # of keys and values: only by the queries that see them
        torch.testing.assert_close(x[0, 0, ~affected], y[0, 0, ~affected])
    unrelated = torch.ones(150, dtype=torch.bool)
    unrelated[70 - 40 : 70 + 40] = False
    for x, y in zip(clean[2:], dirty[2:], strict=True):
        torch.testing.assert_close(x[0, 0, unrelated], y[0, 0, unrelated])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_later_tokens_that_are_not_finite_do_not_reach_earlier_rows(tokens, which):
    inputs = tokens(B=1, H=2, N=100, D=16, dtype=torch.float32)
    options = {"far": True, "block_size": 30, "is_causal": True, "alpha": 1.3, "beta": 0.7}
    clean = fused(*inputs, **options)
    inputs[which][:, :, 60:] = torch.inf
    dirty = fused(*inputs, **options)
    torch.testing.assert_close(dirty[:, :, :60], clean[:, :, :60])
    assert not dirty[:, :, 60].isfinite().any()


@causal_or_full
def test_compiled_op(tokens, is_causal):
    inputs = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32, grad=True)
    torch.library.opcheck(
        autograd.forward_op, (*inputs, None, None, None, None, True, 8, is_causal, "variance", True, None)
    )
    gradient = torch.randn(1, 2, 40, 8)
    ours = run(functools.partial(fused, far=True, block_size=8, is_causal=is_causal), inputs, gradient)
    by_op = run(
        lambda *x: autograd.forward_op(*x, None, None, None, None, True, 8, is_causal, "variance", True)[0],
        inputs,
        gradient,
    )
    assert all(torch.equal(x, y) for x, y in zip(ours, by_op, strict=True))
