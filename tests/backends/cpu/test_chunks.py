"""The fused code with several threads: whole heads, and heads that are cut into chunks."""

import functools

import pytest
import torch

import lln
from helpers import CALLS, causal_or_full, compare_call, half_dtypes, needs_cpu, relative, run, threads
from lln import reference
from lln.backends.cpu import binding, build

pytestmark = [needs_cpu, pytest.mark.parametrize("backend", ["cpu"], indirect=True), pytest.mark.usefixtures("backend")]


@causal_or_full
def test_threads_and_chunks_give_the_same(tokens, is_causal):
    """One head is cut into chunks where there are threads to spare; the same job gives the same bits."""
    inputs = tokens(B=1, H=1, N=700, D=16, dtype=torch.float32)
    gradient = torch.randn(1, 1, 700, 16)
    attention = functools.partial(lln.lln_diag_attention, is_causal=is_causal)
    alone = run(attention, inputs, gradient)
    with threads(3):
        first, second = (run(attention, inputs, gradient) for _ in range(2))
    for x, y, z in zip(alone, first, second, strict=True):
        assert torch.equal(y, z)
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@causal_or_full
@pytest.mark.parametrize("call", ["lln", "given", "diag", "diag-odd", "blocks-large"])
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
def test_chunks_equal_the_reference(tokens, four_threads, call, is_causal, padded):
    q, k, v = tokens(B=1, H=2, Hk=1, N=300, D=16, Dv=24, dtype=torch.float32)
    keep = torch.rand(1, 300) > 0.3 if padded else None
    if padded:
        keep[0, :200] = False  # nothing at all before the second chunk
    name, options = CALLS[call]
    compare_call(name, (q, k, v), key_padding_mask=keep, is_causal=is_causal, **options)


def test_causal_chunks_of_keys_that_grow_and_grow(tokens):
    """Or shrink. As one piece: both have the rounding of large keys."""
    q, k, v = tokens(B=1, H=1, N=530, D=16, dtype=torch.float32)
    attention = functools.partial(lln.lln_attention, alpha=1.0, beta=1.0, is_causal=True)
    for factor in (torch.linspace(1, 100, 530), torch.linspace(10, 1, 530)):
        key = k * factor[:, None]
        whole = run(attention, (q, key, v), v)
        with threads(4):
            chunks = run(attention, (q, key, v), v)
        for x, y, limit in zip(whole, chunks, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
            assert relative(y, x.double()) < limit


@half_dtypes
def test_causal_chunks_in_low_precision_and_their_scales(tokens, dtype):
    """The same as alone, but for the order of sums in float32; the bits differ, or the head was not cut."""
    inputs = [x.to(dtype) for x in tokens(B=1, H=2, Hk=1, N=600, D=16, dtype=torch.float32)]
    scales = [torch.full((2,), x) for x in (1.2, 0.8)]

    def attention(q, k, v, alpha, beta):
        return lln.lln_attention(q, k, v, alpha=alpha.float(), beta=beta.float(), is_causal=True)

    gradient = torch.randn(1, 2, 600, 16).to(dtype)
    results = []
    for count in (1, 4):
        with threads(count):
            leaves = [x.detach().requires_grad_() for x in (*inputs, *scales)]
            output = attention(*leaves)
            results.append([output, *torch.autograd.grad(output, leaves, gradient)])
    assert not torch.equal(results[0][4], results[1][4])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_what_is_not_finite_shows_in_later_chunks_only(tokens, four_threads):
    inputs = tokens(B=1, H=1, N=600, D=8, dtype=torch.float32)
    clean = lln.lln_attention(*inputs, is_causal=True)
    inputs[1][0, 0, 320, 3] = torch.inf
    dirty = lln.lln_attention(*inputs, is_causal=True)
    torch.testing.assert_close(dirty[:, :, :320], clean[:, :, :320])
    assert not dirty[:, :, 320:].isfinite().all(dim=-1).any()


def test_whole_heads_give_the_same_bits_whoever_takes_them(tokens):
    inputs = tokens(B=2, H=7, N=130, D=16, dtype=torch.float32)
    gradient = torch.randn(2, 7, 130, 16)
    alone = run(lln.lln_diag_attention, inputs, gradient)
    with threads(2):
        together = run(lln.lln_diag_attention, inputs, gradient)
    assert all(torch.equal(x, y) for x, y in zip(alone, together, strict=True))


def test_results_in_large_pages(tokens):
    """Large pages are requested for results of 32 MB and more, whatever their layout."""
    q, k, v = tokens(B=1, H=4, N=33_000, D=64, dtype=torch.float32)
    spread = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    ours = [lln.lln_attention(*x) for x in ((q, k, v), spread)]
    assert ours[0].nbytes >= 32 << 20
    with lln.backends.use("torch"):
        plain = lln.lln_attention(q, k, v)
    for x in ours:
        torch.testing.assert_close(x, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flavour", ["portable", pytest.param("wide", marks=pytest.mark.slow)])
def test_other_flavours_give_the_same(tokens, flavour, monkeypatch):
    """Vectors of 4 floats in plain C, and of 16, which the compiler makes of what the CPU has."""
    flags = ["-DLANES=4"] if flavour == "portable" else ["-march=native", "-DLANES=16"]
    monkeypatch.setitem(build.FLAVOURS, flavour, (flags, set()))
    library = build.open_library(build.build(flavour))
    monkeypatch.setattr(binding, "load", lambda: library)
    for dtype in (torch.float32, torch.float16):
        for is_causal in (False, True):
            inputs = tokens(B=1, H=2, N=70, D=24, dtype=dtype)
            gradient = torch.randn(1, 2, 70, 24).to(dtype)
            attention = functools.partial(lln.lln_diag_attention, is_causal=is_causal, block_size=20)
            other = run(attention, inputs, gradient)
            with lln.backends.use("torch"):
                plain = run(attention, inputs, gradient)
            limit = 1e-5 if dtype == torch.float32 else 5e-3
            for x, y in zip(other, plain, strict=True):
                assert relative(x, y.double()) < limit
    for D in (8, 24, 72):
        check_moments_of_threads(tokens(B=1, H=2, N=600, D=D, dtype=torch.float32))


def check_moments_of_threads(inputs):
    """Threads do not write into the moments of each other, also where the width of a head leaves a vector half empty.

    Several times, because it depends on which thread is first.
    """
    expected = reference.lln_attention(*(x.double() for x in inputs))
    with threads(4):
        outputs = [lln.lln_attention(*inputs) for _ in range(20)]
    for output in outputs:
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
