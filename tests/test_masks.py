"""Padding on every backend: what stands in it, and who else is in the batch, changes nothing, not by a bit."""

import functools

import pytest
import torch

import lln
from helpers import FORMS, FUNCTIONS, all_functions, assert_as_exact, causal_or_full, centers_of
from lln.masks import read_padding

NOISE = {"ones": 1.0, "huge": 1e30, "largest": 3e38, "nan": float("nan"), "inf": float("inf")}


def keep_of(side, N=40):
    position = torch.arange(N)
    return {
        "right": position < torch.tensor([[N], [23], [1]]),
        "left": position >= torch.tensor([[0], [17], [N - 1]]),
        "holes": torch.rand(3, N).argsort(1) < torch.tensor([[N], [N // 2], [3]]),
    }[side]


@pytest.mark.parametrize("noise", list(NOISE))
@pytest.mark.parametrize("side", ["right", "left", "holes"])
@causal_or_full
@all_functions
def test_content_of_padding_moves_no_bit_and_gets_no_gradient(tokens, backend, wide, name, is_causal, side, noise):
    keep = keep_of(side)
    attention = functools.partial(getattr(lln, name), key_padding_mask=keep, is_causal=is_causal)
    clean = tokens(B=3, N=40, dtype=wide)
    dirty = [x.masked_fill(~keep[:, None, :, None], NOISE[noise]) for x in clean]
    results = []
    for inputs in (clean, dirty):
        x = [t.detach().clone().requires_grad_() for t in inputs]
        kept_rows = attention(*x).transpose(1, 2)[keep]
        kept_rows.square().sum().backward()
        results.append([kept_rows, *(t.grad for t in x)])
    for first, second in zip(*results, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
    for gradient in results[1][1:]:
        assert (gradient.transpose(1, 2)[~keep] == 0).all()


@causal_or_full
@all_functions
def test_neighbours_in_the_batch_move_no_bit(tokens, backend, name, is_causal):
    keep = keep_of("right")
    attention = functools.partial(getattr(lln, name), key_padding_mask=keep, is_causal=is_causal)
    inputs = tokens(B=3, N=40, dtype=torch.float32)
    others = [torch.cat((x[:1] * 100 + 3, x[1:2], torch.randn_like(x[2:]))) for x in inputs]
    assert torch.equal(attention(*inputs)[1], attention(*others)[1])


@pytest.mark.parametrize("side", ["right", "left", "holes"])
@causal_or_full
@all_functions
def test_a_padded_sample_is_the_sample_alone(tokens, backend, wide, name, is_causal, side):
    keep = keep_of(side)
    options = {"is_causal": is_causal} | ({} if name == "lln_attention" else {"block_size": 8})
    inputs = tokens(B=3, N=40, dtype=wide)
    padded = getattr(lln, name)(*inputs, key_padding_mask=keep, **options)
    for sample in range(3):
        alone = getattr(lln, name)(*(x[sample : sample + 1, :, keep[sample]] for x in inputs), **options)
        assert_as_exact(padded[sample, :, keep[sample]], alone[0], rtol=1e-10, atol=1e-11)


@causal_or_full
@all_functions
def test_no_kept_key_gives_zeros(tokens, backend, wide, name, is_causal):
    q, k, v = tokens(N=9, dtype=wide, grad=True)
    output = getattr(lln, name)(q, k, v, key_padding_mask=torch.tensor([9, 0]), is_causal=is_causal)
    assert (output[1] == 0).all()
    output.sum().backward()
    assert all(x.grad.isfinite().all() and (x.grad[1] == 0).all() for x in (q, k, v))


def test_causal_rows_before_the_first_kept_key_are_zero(tokens, backend, wide):
    keep = torch.arange(12) >= torch.tensor([[0], [5]])
    output = lln.lln_attention(*tokens(N=12, dtype=wide), key_padding_mask=keep, is_causal=True)
    assert (output[1, :, :5] == 0).all()
    assert (output[1, :, 5:] != 0).all()


def test_lengths_are_masks(tokens):
    inputs = tokens(N=10)
    for dtype in (torch.int32, torch.int64, torch.uint8):
        lengths = torch.tensor([10, 4], dtype=dtype)
        mask = torch.arange(10) < torch.tensor([[10], [4]])
        assert torch.equal(read_padding(lengths, inputs[1]), mask)
        assert torch.equal(
            lln.lln_attention(*inputs, key_padding_mask=lengths), lln.lln_attention(*inputs, key_padding_mask=mask)
        )


def test_a_mask_that_keeps_all_is_no_mask(tokens, backend, wide):
    inputs = tokens(N=70, dtype=wide)
    for name in FUNCTIONS:
        for is_causal in (False, True):
            attention = functools.partial(getattr(lln, name), is_causal=is_causal)
            everything = torch.ones(2, 70, dtype=torch.bool)
            torch.testing.assert_close(attention(*inputs), attention(*inputs, key_padding_mask=everything))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("noise", list(NOISE))
@pytest.mark.parametrize("form", FORMS)
@causal_or_full
def test_content_of_padding_does_not_matter_in_any_form(tokens, backend, form, is_causal, noise, dtype):
    keep = keep_of("right")
    options = {"form": form, "alpha": 1.0, "beta": 1.0, "is_causal": is_causal, "key_padding_mask": keep}
    options |= centers_of(form, 4, 4, 16) if is_causal else {}
    clean = tokens(B=3, N=40, dtype=dtype)
    dirty = [x.masked_fill(~keep[:, None, :, None], torch.tensor(NOISE[noise]).to(dtype)) for x in clean]
    results = []
    for inputs in (clean, dirty):
        x = [t.detach().clone().requires_grad_() for t in inputs]
        kept_rows = lln.lln_attention(*x, **options).transpose(1, 2)[keep]
        kept_rows.square().sum().backward()
        results.append([kept_rows, *(t.grad for t in x)])
    for first, second in zip(*results, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
