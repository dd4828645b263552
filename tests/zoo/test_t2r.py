"""T2R against the explicit matrix of its features."""

import pytest
import torch
from torch import Tensor

import lln.zoo
from lln.zoo.t2r import T2R


def tokens(number: int = 70) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, number, 8, dtype=torch.float64) for _ in range(3)]


def make(num_features: int | None = None) -> T2R:
    torch.manual_seed(1)
    module = lln.zoo.build("t2r", num_heads=2, head_dim=8, num_features=num_features).double()
    assert isinstance(module, T2R)
    return module


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("num_features", [3, 8, 21])
def test_explicit_matrix(is_causal: bool, padded: bool, num_features: int) -> None:
    module, (query, key, value) = make(num_features), tokens()
    phi_q, phi_k = (torch.relu(torch.einsum("bhnd,hdf->bhnf", x, module.weight) + module.bias) for x in (query, key))
    matrix = torch.einsum("bhif,bhjf->bhij", phi_q, phi_k)
    keep = torch.rand(2, 70) > 0.3 if padded else torch.ones(2, 70, dtype=torch.bool)
    matrix = matrix * keep[:, None, None, :]
    if is_causal:
        matrix = matrix.tril()
    total = matrix.sum(dim=-1, keepdim=True)
    assert (total == 0).any() or not is_causal or num_features > 3  # with few features some queries have no weight
    expected = torch.where(total > 0, matrix @ value / total, 0.0)
    mask = keep if padded else None
    torch.testing.assert_close(module(query, key, value, is_causal=is_causal, key_padding_mask=mask), expected)


def test_as_many_features_as_the_head_by_default() -> None:
    assert {name: tuple(p.shape) for name, p in make().named_parameters()} == {"weight": (2, 8, 8), "bias": (2, 1, 8)}
    assert make(5).weight.shape == (2, 8, 5)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="num_features must be at least 1"):
        make(0)
