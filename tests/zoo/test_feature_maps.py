"""Kernels against their explicit matrices, and linear attention against performer-pytorch's."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lln.zoo

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads torch's version with distutils
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda
    from performer_pytorch.performer_pytorch import linear_attention as performer_linear_attention


def by_features(phi: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, k: phi(q) @ phi(k).mT


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elu": by_features(lambda x: functional.elu(x) + 1),
    "relu": by_features(functional.relu),
    "quadratic": by_features(lambda x: x**2),
    "relu_kernel": lambda q, k: functional.relu(q @ k.mT),
    "quadratic_kernel": lambda q, k: (q @ k.mT) ** 2,
}


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 3, 131, 5, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_explicit_matrix(name: str, is_causal: bool, padded: bool, qkv: tuple[Tensor, ...]) -> None:
    query, key, value = qkv
    keep = torch.rand(2, 131) > 0.3 if padded else torch.ones(2, 131, dtype=torch.bool)
    matrix = WEIGHTS[name](query, key) * keep[:, None, None, :]
    if is_causal:
        matrix = matrix.tril()
    total = matrix.sum(dim=-1, keepdim=True)
    expected = torch.where(total > 0, matrix / total, 0.0) @ value
    module = lln.zoo.build(name, num_heads=3, head_dim=5)
    actual = module(query, key, value, is_causal=is_causal, key_padding_mask=keep if padded else None)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_elu_against_performer_pytorch(is_causal: bool, qkv: tuple[Tensor, ...]) -> None:
    query, key, value = qkv
    phi_q, phi_k = functional.elu(query) + 1, functional.elu(key) + 1
    if is_causal:
        expected = causal_linear_attention_noncuda(phi_q, phi_k, value, eps=0.0)
    else:
        expected = performer_linear_attention(phi_q, phi_k, value)
    module = lln.zoo.build("elu", num_heads=3, head_dim=5)
    torch.testing.assert_close(module(query, key, value, is_causal=is_causal), expected)


def test_elu_of_very_negative_entries() -> None:
    """Where exp(x) - 1 + 1 is 0 in float32, the weights still differ."""
    query = torch.zeros(1, 1, 1, 2)
    key = torch.tensor([[-30.0, -30.0], [-31.0, -31.0]])[None, None]
    value = torch.tensor([[1.0], [0.0]])[None, None]
    output = lln.zoo.build("elu", num_heads=1, head_dim=2)(query, key, value)
    assert output.item() == pytest.approx(1 / (1 + torch.tensor(-1.0).exp().item()))


@pytest.mark.parametrize("name", ["relu", "quadratic", "relu_kernel", "quadratic_kernel"])
def test_no_weight_at_all_gives_zeros(name: str) -> None:
    query, key, value = torch.zeros(1, 1, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output = lln.zoo.build(name, num_heads=1, head_dim=4)(*inputs)
    assert output.abs().max() == 0
    output.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


def test_sums_run_in_float32() -> None:
    """In bfloat16 a sum of ones stops growing at 256."""
    ones = torch.ones(1, 1, 4096, 4, dtype=torch.bfloat16)
    value = torch.cat((torch.zeros(1, 1, 2048, 4), torch.ones(1, 1, 2048, 4)), dim=2).bfloat16()
    for is_causal in (False, True):
        output = lln.zoo.build("relu", num_heads=1, head_dim=4)(ones, ones, value, is_causal=is_causal)
        assert output[0, 0, -1, 0] == 0.5
