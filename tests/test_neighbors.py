import math
from itertools import pairwise

import pytest
import torch

import lln
from lln.neighbors import Past, log_far_mass, log_mean_exp, near_with_mass_ratio, next_log_far_mass

TOKENS, HEADS, KEY_HEADS, WIDTH = 37, 4, 2, 8
NEARS = ["window", "blocks"]


def inputs(dtype=torch.float64, samples=2):
    """query, key, value and weights of the keys."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, TOKENS, WIDTH), (KEY_HEADS, TOKENS, WIDTH), (KEY_HEADS, TOKENS, WIDTH), (HEADS, TOKENS))
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


def close_to(dtype):
    return {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-6}


dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)  # plain torch, and fused code


@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("padded", [False, True])
@dtypes
def test_the_ratio_is_that_of_the_explicit_sums(near, is_causal, block_size, padded, dtype):
    query, key, value, weight = inputs()
    kept = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) > (0.3 if padded else -1.0)
    options = {"near": near, "block_size": block_size, "is_causal": is_causal}
    tokens = [x.to(dtype) for x in (query, key, value)]
    padding = {"key_padding_mask": kept if padded else None}
    real = kept[:, None].expand_as(weight)
    for given, added in ((weight.to(dtype), weight), (None, torch.zeros_like(weight))):
        output, found = near_with_mass_ratio(*tokens, given, **padding, **options)
        expected = explicit(query, key, added, kept, **options)
        torch.testing.assert_close(found[real].double(), expected[real], **close_to(dtype))
        assert not bool(found.isnan().any())
        assert torch.equal(output, lln.block_diagonal_attention(*tokens, **padding, **options))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
@dtypes
def test_gradients_are_those_of_the_explicit_sums(near, is_causal, padded, dtype):
    options = {"near": near, "block_size": 5, "is_causal": is_causal}
    kept = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) > (0.3 if padded else -1.0)
    tensors, same = ([x.to(kind).requires_grad_() for x in inputs()] for kind in (dtype, torch.float64))
    output, ratio = near_with_mass_ratio(*tensors, key_padding_mask=kept if padded else None, **options)
    real = kept[:, None].expand_as(ratio)
    (ratio.sigmoid()[real].square().sum() + output.square().sum()).backward()
    query, key, value, weight = same
    far, near_sum = explicit_sums(query, key, weight, kept, **options)
    output = lln.reference.block_diagonal_attention(query, key, value, key_padding_mask=kept, **options)
    ((far / (far + near_sum))[real].square().sum() + output.square().sum()).backward()
    limits = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}
    for found, expected in zip((x.grad for x in tensors), (x.grad for x in same), strict=True):
        torch.testing.assert_close(found.double(), expected, **limits)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
@dtypes
def test_gradients_of_gradients(near, is_causal, dtype):
    """Fused code has none: those of plain torch take their place."""
    options = {"near": near, "block_size": 5, "is_causal": is_causal}
    seconds = []
    for kind in (dtype, torch.float64):
        tensors = [x.to(kind).requires_grad_() for x in inputs()]
        output, ratio = near_with_mass_ratio(*tensors, **options)
        loss = output.square().sum() + ratio.sigmoid().square().sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), tensors))
    for found, expected in zip(*seconds, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
def test_gradcheck(near, is_causal):
    # 7 tokens of 4 numbers: the time of gradgradcheck grows with the square of the size
    query, key, value, weight = (x[:1, : 2 if x.shape[1] == HEADS else 1, :7].clone() for x in inputs())
    tensors = [x.requires_grad_() for x in (*(x[..., :4].clone() for x in (query, key, value)), weight)]
    options = {"near": near, "block_size": 3, "is_causal": is_causal}

    def far_share(*tensors):
        output, ratio = near_with_mass_ratio(*tensors, **options)
        return output, ratio.sigmoid()

    assert torch.autograd.gradcheck(far_share, tensors)
    assert torch.autograd.gradgradcheck(far_share, tensors)


@pytest.mark.parametrize("near", NEARS)
def test_what_the_future_holds_has_no_part(near):
    """A gradient of the log-sum-exp alone, of the first tokens, where the last keys are NaN."""
    gradients = []
    for odd in (0.0, torch.nan):
        query, key, value, weight = inputs(torch.float32)
        key[:, :, 30:] += odd
        tensors = [x.requires_grad_() for x in (query, key, value)]
        _, ratio = near_with_mass_ratio(*tensors, weight, near=near, block_size=10, is_causal=True)
        ratio[:, :, :30].sigmoid().sum().backward()
        gradients.append([x.grad[:, :, :30] for x in tensors])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("near", NEARS)
def test_a_large_weight_among_the_neighbours_leaves_finite_gradients(near):
    query, key, value, weight = inputs(torch.float32)
    weight[:, :, 3] = 60.0
    tensors = [x.requires_grad_() for x in (query, key, value, weight)]
    near_with_mass_ratio(*tensors, near=near, block_size=5)[1].sigmoid().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in tensors)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
def test_the_mass_of_the_rest_is_exact_beside_a_large_weight(near, is_causal):
    """It is not the difference of two sums, which would leave nothing of it."""
    weight = inputs(torch.float32)[3]
    weight[:, :, 20] = 80.0
    options = {"near": near, "block_size": 5, "is_causal": is_causal}
    found = log_far_mass(weight, **options)
    query, key, _, _ = inputs()
    far, _ = explicit_sums(query, key, weight.double(), torch.ones(2, TOKENS, dtype=torch.bool), **options)
    torch.testing.assert_close(found.double(), far.log(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("near", NEARS)
def test_tokens_after_others_get_what_they_get_in_one_call(near):
    size = 5
    weight = inputs()[3]
    whole = log_far_mass(weight, near=near, block_size=size, is_causal=True)
    for start in (0, 1, 4, 11, 30):
        places = torch.arange(size)
        numbers = start - 1 - (start - 1 - places) % size  # the last token at each place; below 0: there is none
        index = numbers.clamp(min=0)
        total = weight[:, :, :start].logsumexp(dim=2) if start else torch.full((2, HEADS), -1e30, dtype=weight.dtype)
        past = Past(torch.full((2,), start), weight[:, :, index], total)
        found = log_far_mass(weight[:, :, start:], near=near, block_size=size, is_causal=True, past=past)
        torch.testing.assert_close(found, whole[:, :, start:], rtol=1e-9, atol=1e-9)
        found = next_log_far_mass(past.key_weight, total, past.tokens, near=near)
        torch.testing.assert_close(found, whole[:, :, start : start + 1], rtol=1e-9, atol=1e-9)


@dtypes
def test_packed_sequences_are_alone(dtype):
    tensors = inputs(dtype, samples=1)
    options = {"near": "window", "block_size": 6}
    starts = [0, 9, 10, 17, TOKENS]
    found = near_with_mass_ratio(*tensors, cu_seqlens=torch.tensor(starts, dtype=torch.int32), **options)
    parts = [near_with_mass_ratio(*(x[:, :, a:b] for x in tensors), **options) for a, b in pairwise(starts)]
    for x, y in zip(found, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(x, torch.cat(y, dim=2), **close_to(dtype))
    assert float(found[1][0, 0, 9]) == -math.inf  # a sequence of one token has nothing far


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_the_tokens_and_not_the_ratio(dtype):
    tensors = inputs(torch.float32)
    options = {"near": "window", "block_size": 6}
    with torch.autocast("cpu", dtype):
        output, ratio = near_with_mass_ratio(*tensors, **options)
    assert (output.dtype, ratio.dtype) == (dtype, torch.float32)
    expected = near_with_mass_ratio(*(x.to(dtype) for x in tensors[:3]), tensors[3], **options)[1]
    torch.testing.assert_close(ratio, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", NEARS)
def test_compiled_and_transformed_calls(near, is_causal):
    tensors = inputs(torch.float32)

    def loss(*tensors):
        output, ratio = near_with_mass_ratio(*tensors, near=near, block_size=10, is_causal=is_causal)
        return output.square().sum() + ratio.sigmoid().sum()

    leaves = [x.requires_grad_() for x in tensors]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    transformed = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*(x.detach() for x in tensors))
    for found in (torch.autograd.grad(compiled(*leaves), leaves), transformed):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_no_tokens():
    empty = torch.zeros(2, HEADS, 0, WIDTH)
    _, ratio = near_with_mass_ratio(empty, empty, empty, near="window", block_size=4)
    assert ratio.shape == (2, HEADS, 0)


def test_the_mean_of_exponentials_of_gaussian_scores():
    """For keys of a known Gaussian the second order is all there is: a mean over many of them comes near it."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    key = draw(1, 2, 200_000, 6) @ draw(2, 6, 6) * 0.4 + draw(2, 1, 6)
    query = draw(1, 4, 5, 6)
    found = log_mean_exp(query, key)
    scores = query @ key.repeat_interleave(2, dim=1).mT * 6**-0.5
    expected = scores.logsumexp(dim=-1) - math.log(key.shape[2])
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.05)


def test_padding_and_other_sequences_have_no_part_in_an_estimated_mass():
    module = lln.LLNDiagAttention(HEADS, WIDTH, combine="mass", near="window", block_size=5, num_key_heads=KEY_HEADS)
    query, key, value, _ = inputs()
    alone = module(query[:1, :, :20], key[:1, :, :20], value[:1, :, :20])
    kept = torch.arange(TOKENS) < torch.tensor([[20], [TOKENS]])
    query, key, value = (x.masked_fill(~kept[:, None, :, None], math.nan).requires_grad_() for x in (query, key, value))
    padded = module(query, key, value, key_padding_mask=kept)
    torch.testing.assert_close(padded[:1, :, :20], alone)
    padded.where(kept[:, None, :, None], 0.0).sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))
    rows = [torch.cat((x[:1, :, :20], x[1:]), dim=2).detach() for x in (query, key, value)]
    packed = module(*rows, cu_seqlens=torch.tensor([0, 20, 20 + TOKENS], dtype=torch.int32))
    torch.testing.assert_close(packed[:, :, :20], alone)
    torch.testing.assert_close(packed[:, :, 20:], padded[1:].detach())


@pytest.mark.parametrize("near", NEARS)
def test_an_estimated_mass_brings_gaussian_attention_next_to_softmax(near):
    """The share by itself: with the far branch as it is, no constant share is nearer to softmax attention."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 400, 16, generator=generator) for _ in range(3))
    softmax = torch.nn.functional.scaled_dot_product_attention(query * 2, key, value)
    module = lln.LLNDiagAttention(2, 16, combine="mass", near=near, block_size=32, form="unbiased")
    error = (module(query * 2, key, value) - softmax).square().mean()
    for share in (0.02, 0.3, 0.5, 0.7, 0.9, 0.98):
        constant = lln.LLNDiagAttention(2, 16, combine="ratio", share=share, near=near, block_size=32, form="unbiased")
        with torch.no_grad():
            assert error < (constant(query * 2, key, value) - softmax).square().mean()


def test_an_estimated_mass_is_refused_where_it_cannot_be_measured():
    module = lln.LLNDiagAttention(HEADS, WIDTH, combine="mass", num_key_heads=KEY_HEADS)
    assert not list(module.parameters())
    query, key, value, _ = inputs()
    with pytest.raises(ValueError, match='causal attention takes "gate"'):
        module(query, key, value, is_causal=True)
    like = {"key_heads": KEY_HEADS, "value_dim": WIDTH, "dtype": torch.float32, "device": torch.device("cpu")}
    assert module.init_state(1, **like) is None
    with pytest.raises(ValueError, match='combine="mass" estimates the share'):
        lln.LLNDiagAttention(HEADS, WIDTH, combine="mass", share=0.1)
