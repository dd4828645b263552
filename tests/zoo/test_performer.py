"""Performer: against performer-pytorch with the same random vectors, and what the random vectors must be."""

import warnings

import pytest
import torch
from torch import Tensor

import lln.zoo

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads torch's version with distutils
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda, linear_attention, softmax_kernel

RANDOM = ["performer", "rfa"]


def tokens(*scales: float, number: int = 131, heads: int = 2, dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [scale * torch.randn(2, heads, number, dim, dtype=torch.float64) for scale in scales]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_against_performer_pytorch(is_causal: bool) -> None:
    query, key, value = tokens(1.0, 1.0, 1.0)
    module = lln.zoo.build("performer", num_heads=2, head_dim=8, num_features=24, seed=3)
    heads = []
    for head in range(2):
        q, k, v = (x[:, head : head + 1] for x in (query, key, value))
        projection = module.projection[head]
        phi_q = softmax_kernel(q, projection_matrix=projection, is_query=True, eps=0.0)
        phi_k = softmax_kernel(k, projection_matrix=projection, is_query=False, eps=0.0)
        if is_causal:
            heads.append(causal_linear_attention_noncuda(phi_q, phi_k, v, eps=0.0))
        else:
            heads.append(linear_attention(phi_q, phi_k, v))
    torch.testing.assert_close(module(query, key, value, is_causal=is_causal), torch.cat(heads, dim=1))


def test_projection_is_orthogonal_and_as_long_as_gaussian_vectors() -> None:
    module = lln.zoo.build("performer", num_heads=50, head_dim=16, num_features=40, seed=0)
    for start in (0, 16, 32):
        block = torch.nn.functional.normalize(module.projection[:, start : start + 16].double(), dim=-1)
        eye = torch.eye(block.shape[1], dtype=torch.float64).expand(50, -1, -1)
        torch.testing.assert_close(block @ block.mT, eye, rtol=0, atol=1e-6)
    squares = module.projection.square().sum(dim=-1)  # chi-squared: mean 16, variance 32, from 2000 vectors
    assert squares.mean().item() == pytest.approx(16, abs=0.6)
    assert squares.var().item() == pytest.approx(32, rel=0.2)
    assert module.projection.mean().abs() < 0.03  # no preferred sign


@pytest.mark.parametrize("features", [(32, 512, 8192)])
def test_error_falls_with_features(features: tuple[int, ...]) -> None:
    query, key, value = tokens(0.6, 0.6, 1.0, number=64)
    exact = torch.softmax(query @ key.mT / 8**0.5, dim=-1) @ value
    errors = []
    for number in features:
        modules = [
            lln.zoo.build("performer", num_heads=2, head_dim=8, num_features=number, seed=seed) for seed in range(4)
        ]
        errors.append(sum((m(query, key, value) - exact).norm() / exact.norm() for m in modules).item() / 4)
    # 16 times the features, a quarter of the error; half is requested.
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.05


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_large_keys_elsewhere_cost_no_precision(is_causal: bool) -> None:
    """A common maximum over all keys would round the weights of the small ones to 0 in float32."""
    query, key, value = tokens(0.5, 0.5, 1.0)
    module = lln.zoo.build("performer", num_heads=2, head_dim=8, seed=0)
    key[:, :, 100] = 3 * torch.nn.functional.normalize(module.projection[:, 0].double(), dim=-1) ** 3 * 50
    expected = module(query, key, value, is_causal=is_causal)
    actual = module(query.float(), key.float(), value.float(), is_causal=is_causal)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-3)
    if is_causal:
        before = module(query[:, :, :100], key[:, :, :100], value[:, :, :100], is_causal=True)
        torch.testing.assert_close(expected[:, :, :100], before)


@pytest.mark.parametrize("name", RANDOM)
def test_seed_and_redraw(name: str) -> None:
    def build(seed: int | None) -> lln.zoo.Mechanism:
        return lln.zoo.build(name, num_heads=2, head_dim=8, seed=seed)

    torch.manual_seed(0)
    first = build(7)
    torch.manual_seed(1)
    second = build(7)
    assert torch.equal(first.projection, second.projection)
    assert not torch.equal(first.projection, build(8).projection)
    drawn = [first.projection.clone()]
    for _ in range(2):
        first.redraw()
        drawn.append(first.projection.clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    second.redraw()
    second.redraw()
    assert torch.equal(second.projection, drawn[2])
    assert not torch.equal(build(None).projection, build(None).projection)  # layers of a model differ


@pytest.mark.parametrize("name", RANDOM)
def test_redraw_while_training(name: str) -> None:
    module = lln.zoo.build(name, num_heads=2, head_dim=8, seed=0, redraw_every=2)
    qkv = [x.float() for x in tokens(1.0, 1.0, 1.0, number=5)]  # the buffer's dtype, so that it is used uncopied
    qkv[0].requires_grad_()

    def projections(passes: int) -> list[Tensor]:
        seen = []
        for _ in range(passes):
            module(*qkv)
            seen.append(module.projection.clone())
        return seen

    first, second, third, fourth, fifth = projections(5)
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.equal(third, fourth)
    assert not torch.equal(fourth, fifth)
    module.eval()
    assert all(torch.equal(fifth, x) for x in projections(5))
    module.train()
    output = module(*qkv)
    module.redraw()
    output.sum().backward()  # the graph still has the vectors of its own pass


@pytest.mark.parametrize("name", RANDOM)
def test_refuses(name: str) -> None:
    with pytest.raises(ValueError, match="num_features must be at least 1"):
        lln.zoo.build(name, num_heads=1, head_dim=4, num_features=0)
    with pytest.raises(ValueError, match="redraw_every"):
        lln.zoo.build(name, num_heads=1, head_dim=4, redraw_every=0)


def test_default_number_of_features() -> None:
    assert lln.zoo.build("performer", num_heads=1, head_dim=64).projection.shape == (1, 266, 64)  # 64 ln 64
    assert lln.zoo.build("performer", num_heads=1, head_dim=1).projection.shape == (1, 1, 1)
