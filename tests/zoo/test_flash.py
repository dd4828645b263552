"""FLASH's mixed-chunk attention against the explicit matrix of its formula."""

import pytest
import torch
from torch import Tensor

from lln.zoo import build
from lln.zoo.flash import Flash

HEADS, HEAD_DIM = 3, 4


def tokens_of(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, number, HEAD_DIM, dtype=torch.float64, generator=generator)
    return 4.0 * q, k, v


def make(chunk_size: int) -> Flash:
    torch.manual_seed(0)
    mechanism = build("flash", num_heads=HEADS, head_dim=HEAD_DIM, chunk_size=chunk_size).double()
    assert isinstance(mechanism, Flash)
    for parameter in mechanism.parameters():  # not the ones and zeros they start with
        torch.nn.init.normal_(parameter)
    return mechanism


def explicit(mechanism: Flash, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    number, size = q.shape[2], mechanism.chunk_size
    scale, offset = mechanism.scale, mechanism.offset
    inside = (q * scale[0] + offset[0]) @ (k * scale[2] + offset[2]).mT / size
    across = (q * scale[1] + offset[1]) @ (k * scale[3] + offset[3]).mT / (size if is_causal else number)
    weights = torch.zeros_like(inside)
    for i in range(number):
        for j in range(number):
            if i // size == j // size and not (is_causal and j > i):
                weights[..., i, j] += inside[..., i, j].clamp(min=0) ** 2
            if not is_causal or j // size < i // size:
                weights[..., i, j] += across[..., i, j]
    return weights @ v


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("number", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("chunk_size", [1, 8, 256])
def test_formula(chunk_size: int, number: int, is_causal: bool) -> None:
    mechanism = make(chunk_size)
    q, k, v = tokens_of(number)
    expected = explicit(mechanism, q, k, v, is_causal)
    torch.testing.assert_close(mechanism(q, k, v, is_causal=is_causal), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_padding_is_as_if_removed(is_causal: bool) -> None:
    mechanism = make(8)
    q, k, v = tokens_of(40)
    keep = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    output = mechanism(q, k, v, key_padding_mask=keep, is_causal=is_causal)
    for sample in range(2):
        cut = (x[sample : sample + 1, :, keep[sample]] for x in (q, k, v))
        expected = explicit(mechanism, *cut, is_causal)[0]
        torch.testing.assert_close(output[sample, :, keep[sample]], expected, rtol=1e-9, atol=1e-9)
    assert (output.transpose(1, 2)[~keep] == 0).all()


def test_starts_with_the_given_queries_and_keys() -> None:
    mechanism = build("flash", num_heads=HEADS, head_dim=HEAD_DIM, chunk_size=8).double()
    assert isinstance(mechanism, Flash)
    q, k, v = tokens_of(20)
    same_chunk = torch.arange(20)[:, None] // 8 == torch.arange(20) // 8
    weights = torch.relu(q @ k.mT / 8).square() * same_chunk + q @ k.mT / 20
    torch.testing.assert_close(mechanism(q, k, v), weights @ v, rtol=1e-9, atol=1e-9)


def test_values_may_have_another_width() -> None:
    q, k, v = tokens_of(20)
    mechanism = make(8)
    torch.testing.assert_close(mechanism(q, k, v[..., :2]), mechanism(q, k, v)[..., :2])


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        make(0)
