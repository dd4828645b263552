"""Hedgehog against the explicit matrix of its features."""

import pytest
import torch
from torch import Tensor

import lln.zoo
from helpers import assert_kernel
from lln.zoo.hedgehog import Hedgehog


def tokens(scale: float = 1.0, number: int = 70) -> list[Tensor]:
    torch.manual_seed(0)
    return [factor * torch.randn(2, 2, number, 8, dtype=torch.float64) for factor in (scale, scale, 1.0)]


def make() -> Hedgehog:
    torch.manual_seed(1)
    module = lln.zoo.build("hedgehog", num_heads=2, head_dim=8).double()
    assert isinstance(module, Hedgehog)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def features(x: Tensor, matrix: Tensor) -> Tensor:
    projected = torch.einsum("bhnd,hdf->bhnf", x, matrix)
    return torch.cat((projected.softmax(dim=-1), (-projected).softmax(dim=-1)), dim=-1)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_explicit_matrix(is_causal: bool, padded: bool) -> None:
    module, (query, key, value) = make(), tokens()
    matrix = features(query, module.map_query) @ features(key, module.map_key).mT
    assert_kernel(module, query, key, value, matrix, is_causal=is_causal, padded=padded)


def test_starts_as_the_identity() -> None:
    """A map for each head, for queries and for keys, so that a new mechanism has softmaxes of what it is given."""
    module = lln.zoo.build("hedgehog", num_heads=3, head_dim=4)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "map_query": (3, 4, 4),
        "map_key": (3, 4, 4),
    }
    assert all(torch.equal(p[head], torch.eye(4)) for p in module.parameters() for head in range(3))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_no_weight_underflows(is_causal: bool) -> None:
    """Queries and keys that each have a feature of their own: as float32, all of their weights would be 0."""
    query, key, value = tokens(scale=0.5)
    query[..., 0], query[..., 1], key[..., 2], key[..., 3] = 150.0, -150.0, 150.0, -150.0
    module = lln.zoo.build("hedgehog", num_heads=2, head_dim=8)
    a, b = (features(x, torch.eye(8, dtype=torch.float64).expand(2, -1, -1)).log() for x in (query, key))
    scores = torch.logsumexp(a[..., :, None, :] + b[..., None, :, :], dim=-1)
    assert scores.max() < -104  # the logarithm of the smallest float32
    if is_causal:
        scores = scores.masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril(), -torch.inf)
    expected = scores.softmax(dim=-1) @ value
    actual = module(query.float(), key.float(), value.float(), is_causal=is_causal)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-3)  # logarithms of -150 have 1e-5 in float32
