"""Softmax attention among neighbours on every backend: blocks, and windows of the kept tokens around each token."""

import functools

import pytest
import torch

import lln
from helpers import (
    assert_as_exact,
    assert_low_precision,
    causal_or_full,
    compare,
    compare_call,
    half_dtypes,
    in_dtype,
    only_cpu,
    random_gradient,
    run,
)
from lln import reference

alone_or_mean = pytest.mark.parametrize("far", [False, True], ids=["alone", "mean"])


def window(module, far, **options):
    """Attention in a window, alone or in the mean with LLN attention."""
    name = "lln_diag_attention" if far else "block_diagonal_attention"
    return functools.partial(getattr(module, name), near="window", **options)


def compare_windows(inputs, far, **options):
    theirs = in_dtype(options, torch.float64)
    return compare(window(lln, far, **options), window(reference, far, **theirs), inputs)


@causal_or_full
@alone_or_mean
@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 300], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("N", [1, 2, 64, 150], ids=lambda n: f"N{n}")
def test_equals_the_reference(tokens, backend, N, size, far, is_causal):
    # gradients of 32 features are summed where they are returned, those of 8 in scratch memory if vectors are longer
    inputs = tokens(B=1, H=2, N=N, D=32, Dv=8, dtype=torch.float32)
    compare_windows(inputs, far, block_size=size, is_causal=is_causal)


@causal_or_full
def test_the_largest_window(tokens, backend, is_causal):
    inputs = tokens(B=1, H=1, N=1200, D=8, dtype=torch.float32)
    compare_windows(inputs, False, block_size=1024, is_causal=is_causal)


@causal_or_full
def test_how_far_a_token_attends(backend, is_causal):
    """With equal scores the output is the mean of the values seen, here the numbers of the tokens."""
    size, N = 6, 40
    q, k, v = torch.zeros(1, 1, N, 8), torch.zeros(1, 1, N, 8), torch.arange(N).float()[:, None].expand(1, 1, N, 8)
    got = window(lln, False, block_size=size, is_causal=is_causal)(q, k, v)[0, 0, :, 0]
    for i in range(N):
        seen = range(i - 5, i + 1) if is_causal else range(i - 2, i + 4)
        seen = [j for j in seen if 0 <= j < N]
        assert got[i] == pytest.approx(sum(seen) / len(seen), rel=1e-5)


@causal_or_full
@alone_or_mean
@pytest.mark.parametrize("size", [7, 40])
def test_padding_shared_keys_and_layouts(tokens, backend, size, far, is_causal):
    """Only kept tokens count, however far apart they are; the others get zeros, and what they hold does not matter."""
    q, k, v = tokens(B=2, H=4, Hk=2, N=170, D=16, Dv=40, dtype=torch.float32)
    keep = torch.rand(2, 170) > 0.3
    keep[1] = torch.arange(170) >= 60
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    options = {"block_size": size, "is_causal": is_causal, "key_padding_mask": keep}
    output, *gradients = compare_windows((q, k, v), far, **options)
    padding = ~keep[:, None, :, None]
    if not far:
        assert not output.masked_select(padding).any()
        assert not any(x.masked_select(padding).any() for x in gradients)
    dirty = [x.masked_fill(padding, torch.nan) for x in (k, v)]
    assert torch.equal(window(lln, far, **options)(q, *dirty), output)


@causal_or_full
@alone_or_mean
@pytest.mark.parametrize(("size", "padded"), [(64, False), (200, False), (50, True)])
@only_cpu
def test_chunks_attend_to_keys_of_their_neighbours(tokens, backend, four_threads, size, padded, far, is_causal):
    inputs = tokens(B=1, H=2, Hk=1, N=400, D=16, dtype=torch.float32)
    keep = torch.rand(1, 400) > 0.2 if padded else None
    options = {"block_size": size, "is_causal": is_causal, "key_padding_mask": keep}
    compare_windows(inputs, far, **options)
    gradient = random_gradient(inputs)
    again = [run(window(lln, far, **options), inputs, gradient) for _ in range(5)]
    assert all(torch.equal(x, y) for other in again for x, y in zip(again[0], other, strict=True))


@causal_or_full
@alone_or_mean
@half_dtypes
def test_low_precision(tokens, backend, dtype, far, is_causal):
    inputs = tokens(B=1, H=2, Hk=1, N=150, D=32, dtype=dtype)
    options = {"block_size": 40, "is_causal": is_causal} | ({"alpha": 1.25, "beta": 1.25} if far else {})
    gradient = random_gradient(inputs).to(dtype)
    assert_low_precision(window(lln, far, **options), window(reference, far, **options), inputs, gradient)


@causal_or_full
@pytest.mark.parametrize("which", ["key", "value"])
def test_what_is_not_finite_shows_only_where_it_is_attended_to(tokens, backend, which, is_causal):
    inputs = tokens(B=1, H=1, N=150, D=8, dtype=torch.float32)
    attention = window(lln, False, block_size=20, is_causal=is_causal)
    gradient = torch.randn(1, 1, 150, 8)
    before, after = (0, 19) if is_causal else (10, 9)
    affected = torch.zeros(150, dtype=torch.bool)
    affected[70 - before : 70 + after + 1] = True
    gradient[:, :, affected] = 0  # a loss of the other rows
    clean = run(attention, inputs, gradient)
    inputs[1 if which == "key" else 2][0, 0, 70, 3] = torch.nan
    dirty = run(attention, inputs, gradient)
    assert dirty[0][0, 0, affected].isnan().any(dim=-1).all()
    for x, y in zip(clean[:2], dirty[:2], strict=True):  # of keys and values: only by the queries that attend to them
        torch.testing.assert_close(x[0, 0, ~affected], y[0, 0, ~affected])
    unrelated = torch.ones(150, dtype=torch.bool)
    unrelated[70 - 40 : 70 + 40] = False
    for x, y in zip(clean[2:], dirty[2:], strict=True):
        torch.testing.assert_close(x[0, 0, unrelated], y[0, 0, unrelated])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_later_tokens_that_are_not_finite_do_not_reach_earlier_rows(tokens, backend, which):
    inputs = tokens(B=1, H=2, N=100, D=16, dtype=torch.float32)
    attention = window(lln, True, block_size=30, is_causal=True, alpha=1.3, beta=0.7)
    clean = attention(*inputs)
    inputs[which][:, :, 60:] = torch.inf
    dirty = attention(*inputs)
    torch.testing.assert_close(dirty[:, :, :60], clean[:, :, :60])
    assert not dirty[:, :, 60].isfinite().any()


@causal_or_full
@pytest.mark.parametrize("near", ["blocks", "window"])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("size", [1, 2, 33])
def test_a_query_whose_scores_are_all_minus_infinity_gives_nan(tokens, backend, near, is_causal, size, padding):
    """As softmax does; and no value beyond the block or window, which a finite output would hold."""
    inputs = tokens(B=1, H=2, N=100, D=16, dtype=torch.float32)
    inputs[0][0, 1, 3], inputs[1] = -torch.inf, inputs[1].abs()
    options = {"near": near, "block_size": size, "is_causal": is_causal}
    if padding:
        options["key_padding_mask"] = (torch.arange(100) < 100 - padding)[None]
    found, expected = (x.block_diagonal_attention(*inputs, **options) for x in (lln, reference))
    assert found[0, 1, 3].isnan().all()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    output, ratio = lln.neighbors.near_with_mass_ratio(*inputs, **options)
    torch.testing.assert_close(output, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert not ratio[0, 1, 3].isfinite()


def test_block_of_any_size_with_softmax_as_the_limit(tokens, backend, wide):
    inputs = tokens(N=50, dtype=wide)
    for block_size in (50, 51, 1000):
        for is_causal in (False, True):
            got = lln.block_diagonal_attention(*inputs, block_size=block_size, is_causal=is_causal)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            assert_as_exact(got, sdpa(*(x.double() for x in inputs), is_causal=is_causal))
    assert_as_exact(lln.block_diagonal_attention(*inputs, block_size=1), inputs[2])


@causal_or_full
@pytest.mark.parametrize("near", ["blocks", "window"])
def test_gradients_beside_a_large_key(tokens, backend, near, is_causal):
    """It has all of a token's weight or none: what is rounded of its score must not show in the way back."""
    inputs = tokens(B=1, H=2, Hk=1, N=40, D=24, dtype=torch.float32)
    inputs[1][:, :, 7] *= 3e4
    compare_call("block_diagonal_attention", inputs, block_size=16, near=near, is_causal=is_causal)
