"""Retention against MiniMax's linear attention with the same decays, and against the explicit matrix."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

import lln.zoo

HEADS, DIM = 3, 8


def tokens(number: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, number, DIM, dtype=torch.float64) for _ in range(3)]


def gammas() -> Tensor:
    return torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], dtype=torch.float64)


class Zeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:2], HEADS * DIM, dtype=x.dtype)


def minimax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Its token mixing alone: no activation, projections or norm, and an output gate of sigmoid(0) = 1/2."""
    config = MiniMaxConfig(
        hidden_size=3 * HEADS * DIM, num_attention_heads=HEADS, head_dim=DIM, num_hidden_layers=2, block_size=32
    )
    layer = MiniMaxLightningAttention(config, layer_idx=0)
    layer.act_fn = layer.norm = layer.qkv_proj = layer.out_proj = nn.Identity()
    layer.output_gate = Zeros()
    layer.slope_rate = -gammas().log()[:, None, None]
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    joined = torch.cat((query, key, value), dim=-1).transpose(1, 2).flatten(2)
    output = layer(joined, position_embeddings=None, attention_mask=None)[0]
    return 2 * DIM**-0.5 * output.unflatten(2, (HEADS, DIM)).transpose(1, 2)


@pytest.mark.parametrize("number", [1, 32, 64, 65, 200])
def test_against_minimax(number: int) -> None:
    qkv = tokens(number)
    actual = lln.zoo.build("retention", num_heads=HEADS, head_dim=DIM)(*qkv, is_causal=True)
    torch.testing.assert_close(actual, minimax(*qkv), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 150])
def test_explicit_matrix(number: int, is_causal: bool, padded: bool) -> None:
    """The distance is the number of kept tokens between two tokens."""
    query, key, value = tokens(number)
    keep = torch.rand(2, number) > 0.3 if padded else torch.ones(2, number, dtype=torch.bool)
    position = keep.cumsum(dim=1)
    distance = (position[:, :, None] - position[:, None, :]).abs()
    decay = gammas()[:, None, None] ** distance[:, None]
    matrix = query @ key.mT / DIM**0.5 * decay * keep[:, None, None, :]
    expected = (matrix.tril() if is_causal else matrix) @ value
    module = lln.zoo.build("retention", num_heads=HEADS, head_dim=DIM)
    output = module(query, key, value, is_causal=is_causal, key_padding_mask=keep if padded else None)
    kept = keep[:, None, :, None]
    torch.testing.assert_close(output.where(kept, 0.0), expected.where(kept, 0.0), rtol=1e-10, atol=1e-10)


def test_many_heads() -> None:
    """1 - 2^(-5 - h) is 1 in float32 from h = 20 on: linear attention without decay."""
    query, key, value = (torch.randn(1, 40, 70, 4) for _ in range(3))
    output = lln.zoo.build("retention", num_heads=40, head_dim=4)(query, key, value, is_causal=True)
    expected = (query @ key.mT / 2).tril() @ value
    torch.testing.assert_close(output[:, 30:], expected[:, 30:], rtol=1e-4, atol=1e-4)
    assert (output[:, 0] - expected[:, 0]).abs().max() > 0.1
