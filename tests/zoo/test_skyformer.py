"""Skyformer against the explicit matrices of its formula, and against the Gaussian attention that it approximates."""

import pytest
import torch
from torch import Tensor

import lln.zoo


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_i - y_j|² / (2 sqrt(D))), pair by pair."""
    squares = (x[..., :, None, :] - y[..., None, :, :]).square().sum(dim=-1)
    return torch.exp(-squares / (2 * x.shape[-1] ** 0.5))


def tokens(queries: int = 60, keys: int = 60) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, n, 8, dtype=torch.float64) for n in (queries, keys, keys)]


def segment_means(x: Tensor, number: int) -> Tensor:
    return x.reshape(*x.shape[:2], number, -1, x.shape[3]).mean(dim=3)


@pytest.mark.parametrize(("queries", "keys"), [(60, 60), (36, 60)])
def test_explicit_matrix(queries: int, keys: int) -> None:
    query, key, value = tokens(queries, keys)
    module = lln.zoo.build("skyformer", num_heads=2, head_dim=8, num_landmarks=6, iterations=30, ridge=1e-2)
    z = torch.cat((segment_means(query, 6), segment_means(key, 6)), dim=2)
    inverse = torch.linalg.inv(gaussian(z, z) + 1e-2 * torch.eye(12))
    expected = gaussian(query, z) @ inverse @ gaussian(z, key) @ value
    torch.testing.assert_close(module(query, key, value), expected)


def test_explicit_matrix_with_padding_and_few_tokens() -> None:
    """Four kept tokens and six landmarks: each token is its own, two do not exist."""
    query, key, value = tokens(9, 9)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 0]).bool().expand(2, -1)
    q, k, v = (x[:, :, keep[0]] for x in (query, key, value))
    z = torch.cat((q, k), dim=2)
    expected = gaussian(q, z) @ torch.linalg.inv(gaussian(z, z) + 1e-2 * torch.eye(8)) @ gaussian(z, k) @ v
    module = lln.zoo.build("skyformer", num_heads=2, head_dim=8, num_landmarks=6, iterations=30, ridge=1e-2)
    actual = module(query, key, value, key_padding_mask=keep)[:, :, keep[0]]
    torch.testing.assert_close(actual, expected)


def test_error_falls_with_landmarks() -> None:
    query, key, value = tokens(256, 256)
    exact = gaussian(query, key) @ value
    errors = []
    for number in (4, 32, 128, 256):
        module = lln.zoo.build("skyformer", num_heads=2, head_dim=8, num_landmarks=number)
        errors.append(((module(query, key, value) - exact).norm() / exact.norm()).item())
    assert errors[0] > 1.2 * errors[1] > 1.2**2 * errors[2] > 1.2**3 * errors[3]
    assert errors[3] < 0.02  # every token is a landmark


def test_the_ridge_costs_no_accuracy() -> None:
    query, key, value = tokens(256, 256)
    usual = lln.zoo.build("skyformer", num_heads=2, head_dim=8)(query, key, value)
    least = lln.zoo.build("skyformer", num_heads=2, head_dim=8, ridge=1e-9)(query, key, value)
    exact = gaussian(query, key) @ value
    assert (usual - exact).norm() < 1.02 * (least - exact).norm()


def test_refuses() -> None:
    with pytest.raises(ValueError, match="ridge must be positive"):
        lln.zoo.build("skyformer", num_heads=1, head_dim=4, ridge=0.0)
    with pytest.raises(ValueError, match="num_landmarks must be at least 1"):
        lln.zoo.build("skyformer", num_heads=1, head_dim=4, num_landmarks=0)
