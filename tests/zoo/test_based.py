"""Based against the explicit matrix of the series, and against the softmax attention that it approximates."""

import pytest
import torch
from torch import Tensor

import lln.zoo
from helpers import assert_kernel
from lln.zoo.based import Based


def tokens(scale: float = 1.0, number: int = 70) -> list[Tensor]:
    torch.manual_seed(0)
    return [factor * torch.randn(2, 2, number, 8, dtype=torch.float64) for factor in (scale, scale, 1.0)]


def make(feature_dim: int | None) -> Based:
    torch.manual_seed(1)
    module = lln.zoo.build("based", num_heads=2, head_dim=8, feature_dim=feature_dim).double()
    assert isinstance(module, Based)
    return module


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("feature_dim", [None, 1, 5, 16])
def test_explicit_matrix(is_causal: bool, padded: bool, feature_dim: int | None) -> None:
    module, (query, key, value) = make(feature_dim), tokens()
    q, k = query, key
    if module.project_query is not None and module.project_key is not None:
        with torch.no_grad():
            module.project_key.add_(0.1 * torch.randn_like(module.project_key))
        q, k = query @ module.project_query, key @ module.project_key
    scores = q @ k.mT / (feature_dim or 8) ** 0.5
    matrix = 1 + scores + scores.square() / 2
    assert_kernel(module, query, key, value, matrix, is_causal=is_causal, padded=padded)


def test_close_to_softmax_for_small_scores() -> None:
    query, key, value = tokens(scale=0.3)
    exact = torch.softmax(query @ key.mT / 8**0.5, dim=-1) @ value
    torch.testing.assert_close(make(None)(query, key, value), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_float32_with_large_scores(is_causal: bool) -> None:
    module, qkv = make(None), tokens(scale=10.0)
    expected = module(*qkv, is_causal=is_causal)
    torch.testing.assert_close(
        module(*(x.float() for x in qkv), is_causal=is_causal).double(), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_huge_queries_and_keys(is_causal: bool) -> None:
    """Weights of 1e48 are more than float32 holds; only their ratios count, and those are of s² alone."""
    query, key, value = tokens(scale=1e12)
    scores = query @ key.mT / 1e24
    matrix = scores.square().tril() if is_causal else scores.square()
    expected = matrix @ value / matrix.sum(dim=-1, keepdim=True)
    output = make(None)(query.float(), key.float(), value.float(), is_causal=is_causal)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-3)


def test_projections_start_equal_and_orthogonal() -> None:
    module = lln.zoo.build("based", num_heads=3, head_dim=32)
    assert isinstance(module, Based)
    assert module.project_query is not None
    assert module.project_key is not None
    assert module.project_query.shape == (3, 32, 16)  # the paper's 16
    assert torch.equal(module.project_query, module.project_key)
    torch.testing.assert_close(module.project_query.mT @ module.project_query, torch.eye(16).expand(3, -1, -1))
    assert not list(make(None).parameters())


def test_refuses() -> None:
    with pytest.raises(ValueError, match="feature_dim must be at least 1"):
        make(0)
