"""What the mechanisms that sum in linear time share: tokens that are not finite, and autocast."""

import math

import pytest
import torch
from torch import Tensor, nn

import lln.zoo

SUMS = ["elu", "relu", "quadratic", "cosformer", "rfa", "t2r", "based", "hedgehog"]
STATES = ["retention", "gla", "delta"]
every = pytest.mark.parametrize("name", SUMS + STATES)
full_and_causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
not_finite = pytest.mark.parametrize("content", [math.nan, math.inf, -math.inf], ids=str)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return lln.zoo.build(name, num_heads=2, head_dim=8, max_len=200).double()


def tokens(number: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 2, number, 8, dtype=torch.float64) for _ in range(3)]


@every
@full_and_causal
@not_finite
def test_padding_that_is_not_finite(name: str, is_causal: bool, content: float) -> None:
    """It reaches neither the outputs of kept tokens nor any gradient, that of the parameters included."""
    module = make(name)
    keep = torch.rand(2, 130, generator=torch.Generator().manual_seed(2)) < 0.7
    kept = keep[:, None, :, None]

    def everything(qkv: list[Tensor]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in qkv]
        output = module(*inputs, key_padding_mask=keep, is_causal=is_causal).where(kept, 0.0)
        gradients = torch.autograd.grad(output.square().sum(), [*inputs, *module.parameters()])
        return [output.detach(), *gradients]

    qkv = tokens(130)
    for actual, expected in zip(
        everything([x.where(kept, content) for x in qkv]), everything([x.where(kept, 0.0) for x in qkv]), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@every
@not_finite
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_later_tokens_that_are_not_finite(name: str, which: str, content: float) -> None:
    """Tokens before them, also those of the same chunk, do not change at all, and a NaN is not hidden after them."""
    module, qkv, first = make(name), tokens(200), 100
    expected = module(*qkv, is_causal=True)
    index = ["query", "key", "value"].index(which)
    qkv[index] = qkv[index].clone()
    qkv[index][:, :, first, 3] = content
    output = module(*qkv, is_causal=True)
    assert torch.equal(output[:, :, :first], expected[:, :, :first])
    if math.isnan(content):
        assert output[:, :, first].isnan().any()
        later = output[:, :, first + 1 :]
        assert later.isfinite().all() if which == "query" else later.isnan().any(dim=-1).all()


@pytest.mark.parametrize("name", STATES)
def test_a_token_that_is_not_finite_reaches_all_without_a_causal_mask(name: str) -> None:
    query, key, value = tokens(130)
    key[0, 0, 70, 3] = math.nan
    output = make(name)(query, key, value)
    assert output[0, 0].isnan().all()
    assert output[0, 1].isfinite().all()
    assert output[1].isfinite().all()


@every
@full_and_causal
def test_autocast_changes_no_sum(name: str, is_causal: bool) -> None:
    module, qkv = make(name).float(), [x.float() for x in tokens(130)]
    expected = module(*qkv, is_causal=is_causal)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(*qkv, is_causal=is_causal)
    assert torch.equal(output, expected)
