import math
from itertools import pairwise

import pytest
import torch

import lln
from lln.neighbors import Past, log_mass_ratio, packed_log_mass_ratio

TOKENS, HEADS, KEY_HEADS, WIDTH = 37, 4, 2, 8
NEARS = ["window", "blocks"]


def inputs(dtype=torch.float64, samples=2):
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, TOKENS, WIDTH), (KEY_HEADS, TOKENS, WIDTH), (HEADS, TOKENS))
    return [torch.randn(samples, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def explicit_sums(query, key, weight, kept, *, near, block_size, is_causal):
    """From the matrices of all pairs; which pairs are near is what the attention among neighbours shows."""
    samples = len(query)
    identity = torch.eye(TOKENS, dtype=query.dtype).expand(samples, KEY_HEADS, TOKENS, TOKENS)
    options = {"near": near, "block_size": block_size, "is_causal": is_causal}
    matrix = lln.reference.block_diagonal_attention(query, key, identity, key_padding_mask=kept, **options)
    is_near = matrix > 0
    seen = kept[:, None, None].expand_as(matrix)
    seen = seen.tril() if is_causal else seen
    scores = query @ key.repeat_interleave(HEADS // KEY_HEADS, dim=1).mT * WIDTH**-0.5
    near_sum = scores.exp().where(is_near, 0.0).sum(dim=-1)
    far_sum = weight.exp()[:, :, None].where(seen & ~is_near, 0.0).sum(dim=-1)
    return far_sum, near_sum


def explicit(*tensors, **options):
    far, near = explicit_sums(*tensors, **options)
    return (far / near).log()


@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_ratio_is_that_of_the_explicit_sums(near, is_causal, block_size, padded):
    query, key, weight = inputs()
    kept = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) > (0.3 if padded else -1.0)
    options = {"near": near, "block_size": block_size, "is_causal": is_causal}
    found = log_mass_ratio(query, key, weight, kept if padded else None, **options)
    expected = explicit(query, key, weight, kept, **options)
    real = kept[:, None].expand_as(found)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-9, atol=1e-9)
    assert not bool(found.isnan().any())
    unweighted = log_mass_ratio(query, key, None, kept if padded else None, **options)
    expected = explicit(query, key, torch.zeros_like(weight), kept, **options)
    torch.testing.assert_close(unweighted[real], expected[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
def test_gradients_are_those_of_the_explicit_sums(near, is_causal):
    options = {"near": near, "block_size": 5, "is_causal": is_causal}
    kept = torch.ones(2, TOKENS, dtype=torch.bool)
    tensors, same = ([x.requires_grad_() for x in inputs()] for _ in range(2))
    log_mass_ratio(*tensors, kept, **options).sigmoid().square().sum().backward()
    far, near_sum = explicit_sums(*same, kept, **options)
    (far / (far + near_sum)).square().sum().backward()
    for found, expected in zip((x.grad for x in tensors), (x.grad for x in same), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("near", NEARS)
def test_a_large_weight_among_the_neighbours_leaves_finite_gradients(near):
    """The rest of the total is below the rounding of the sum then."""
    query, key, weight = inputs(torch.float32)
    weight[:, :, 3] = 60.0
    tensors = [x.requires_grad_() for x in (query, key, weight)]
    log_mass_ratio(*tensors, near=near, block_size=5, is_causal=False).sigmoid().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in tensors)


@pytest.mark.parametrize("near", NEARS)
def test_tokens_after_others_get_what_they_get_in_one_call(near):
    size = 5
    query, key, weight = inputs()
    whole = log_mass_ratio(query, key, weight, near=near, block_size=size, is_causal=True)
    for start in (0, 1, 4, 11, 30):
        places = torch.arange(size)
        numbers = start - 1 - (start - 1 - places) % size  # the last token at each place; below 0: there is none
        index = numbers.clamp(min=0)
        total = weight[:, :, :start].logsumexp(dim=2) if start else torch.full((2, HEADS), -1e30, dtype=weight.dtype)
        past = Past(torch.full((2,), start), key[:, :, index], weight[:, :, index], total)
        later = (x[:, :, start:] for x in (query, key, weight))
        found = log_mass_ratio(*later, near=near, block_size=size, is_causal=True, past=past)
        torch.testing.assert_close(found, whole[:, :, start:], rtol=1e-9, atol=1e-9)


def test_packed_sequences_are_alone():
    query, key, weight = inputs(samples=1)
    options = {"near": "window", "block_size": 6, "is_causal": False}
    starts = [0, 9, 10, TOKENS]
    found = packed_log_mass_ratio(query, key, weight, torch.tensor(starts, dtype=torch.int32), **options)
    parts = [log_mass_ratio(*(x[:, :, a:b] for x in (query, key, weight)), **options) for a, b in pairwise(starts)]
    torch.testing.assert_close(found, torch.cat(parts, dim=2), rtol=1e-9, atol=1e-9)
    assert float(found[0, 0, 9]) == -math.inf  # a sequence of one token has nothing far


def test_no_tokens():
    empty = torch.zeros(2, HEADS, 0, WIDTH)
    assert log_mass_ratio(empty, empty, near="window", block_size=4, is_causal=False).shape == (2, HEADS, 0)
