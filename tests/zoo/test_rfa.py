"""RFA against the explicit matrix of its features, and against the softmax attention that it estimates."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import lln.zoo


def tokens(number: int = 70) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, number, 8, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_explicit_matrix(is_causal: bool, padded: bool) -> None:
    """phi(q) . phi(k) is the mean over w of cos(w . (q - k))."""
    query, key, value = tokens()
    module = lln.zoo.build("rfa", num_heads=2, head_dim=8, num_features=4, seed=0).double()
    with torch.no_grad():
        module.scale.uniform_(0.5, 1.5)
    q, k = (normalize(x, dim=-1) * module.scale[:, None] for x in (query, key))
    matrix = ((q[..., :, None, :] - k[..., None, :, :]) @ module.projection[:, None].mT).cos().mean(dim=-1)
    keep = torch.rand(2, 70) > 0.3 if padded else torch.ones(2, 70, dtype=torch.bool)
    keep[:, 0] = True
    allowed = keep[:, None, None, :].expand_as(matrix)
    if is_causal:
        allowed = allowed.tril()
    matrix = matrix * allowed
    floor = allowed.sum(dim=-1, keepdim=True) * (-2 * module.scale.square().amax(dim=1))[:, None, None].exp()
    total = matrix.sum(dim=-1, keepdim=True)
    assert (total < floor).any() or not is_causal  # with few keys and features the bound is met
    expected = matrix @ value / torch.maximum(total, floor)
    mask = keep if padded else None
    torch.testing.assert_close(module(query, key, value, is_causal=is_causal, key_padding_mask=mask), expected)


@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_error_falls_with_features(scale: float) -> None:
    query, key, value = tokens()
    exact = torch.softmax(scale**2 * normalize(query, dim=-1) @ normalize(key, dim=-1).mT, dim=-1) @ value
    errors = []
    for number in (32, 512, 8192):
        total = 0.0
        for seed in range(4):
            module = lln.zoo.build("rfa", num_heads=2, head_dim=8, num_features=number, seed=seed)
            torch.nn.init.constant_(module.scale, scale)
            total += ((module(query, key, value) - exact).norm() / exact.norm()).item() / 4
        errors.append(total)
    # 16 times the features, a quarter of the error; half is requested.
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.1
