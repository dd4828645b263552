"""cosFormer against the explicit matrix of its formula."""

import math

import pytest
import torch
from torch import Tensor

import lln.zoo


def tokens(queries: int, keys: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, n, 6, dtype=torch.float64) for n in (queries, keys, keys)]


def explicit(query: Tensor, key: Tensor, value: Tensor, length: float, is_causal: bool = False) -> Tensor:
    i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    matrix = query.relu() @ key.relu().mT * torch.cos(math.pi / 2 * (i - j) / length)
    if is_causal:
        matrix = matrix.tril()
    total = matrix.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, matrix / total, 0.0) @ value


@pytest.mark.parametrize("max_len", [None, 70, 1000])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (1, 1), (20, 33), (33, 20)])
def test_explicit_matrix(max_len: int | None, queries: int, keys: int) -> None:
    qkv = tokens(queries, keys)
    module = lln.zoo.build("cosformer", num_heads=2, head_dim=6, max_len=max_len)
    torch.testing.assert_close(module(*qkv), explicit(*qkv, length=max_len or max(queries, keys)))


def test_causal_explicit_matrix() -> None:
    qkv = tokens(130, 130)
    module = lln.zoo.build("cosformer", num_heads=2, head_dim=6, max_len=150)
    torch.testing.assert_close(module(*qkv, is_causal=True), explicit(*qkv, length=150, is_causal=True))


@pytest.mark.parametrize("max_len", [None, 100])
def test_positions_count_kept_tokens(max_len: int | None) -> None:
    qkv = tokens(70, 70)
    keep = torch.rand(2, 70) > 0.4
    module = lln.zoo.build("cosformer", num_heads=2, head_dim=6, max_len=max_len)
    output = module(*qkv, key_padding_mask=keep)
    for sample, kept in enumerate(keep):
        alone = [x[sample : sample + 1, :, kept] for x in qkv]
        length = max_len or int(kept.sum())
        torch.testing.assert_close(output[sample : sample + 1, :, kept], explicit(*alone, length=length))


def test_near_tokens_weigh_more() -> None:
    ones = torch.ones(1, 1, 50, 6)
    weights = lln.zoo.build("cosformer", num_heads=1, head_dim=6)(ones, ones, torch.eye(50)[None, None])[0, 0]
    assert (weights[0].diff() < 0).all()
    assert (weights[-1].diff() > 0).all()


def test_refuses() -> None:
    qkv = tokens(70, 70)
    with pytest.raises(ValueError, match="length of its future"):
        lln.zoo.build("cosformer", num_heads=2, head_dim=6)(*qkv, is_causal=True)
    with pytest.raises(ValueError, match="max_len=69 tokens, got 70"):
        lln.zoo.build("cosformer", num_heads=2, head_dim=6, max_len=69)(*qkv)
