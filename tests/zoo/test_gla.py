"""Gated linear attention against Kimi's, whose correction is made negligible, and against the explicit matrix."""

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

import lln.zoo
from lln.zoo.gla import GLA

HEADS, DIM = 2, 8


def tokens(number: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, number, DIM, dtype=torch.float64) for _ in range(3)]


def make(bias: float | None = 0.0, **options: int) -> GLA:
    torch.manual_seed(1)
    module = lln.zoo.build("gla", num_heads=HEADS, head_dim=DIM, **options).double()
    assert isinstance(module, GLA)
    if bias is not None:
        with torch.no_grad():
            module.bias.copy_(bias + torch.randn_like(module.bias))
    return module


def log_gates(module: GLA, key: Tensor) -> Tensor:
    logits = torch.einsum("bhnd,hdr,hre->bhne", key, module.down, module.up) + module.bias
    return torch.log(1 / (1 + torch.exp(-logits))) / 16


def explicit(module: GLA, query: Tensor, key: Tensor, value: Tensor, keep: Tensor, is_causal: bool) -> Tensor:
    """Every weight by itself: from j to i > j through the gates j + 1 to i, from j to i < j through i to j - 1."""
    logs = log_gates(module, key) * keep[:, None, :, None]
    upto = logs.cumsum(dim=2)
    forward = (upto[..., :, None, :] - upto[..., None, :, :]).exp()  # (B, H, i, j, D)
    before = upto - logs
    backward = (before[..., None, :, :] - before[..., :, None, :]).exp()
    i, j = torch.arange(query.shape[2])[:, None], torch.arange(query.shape[2])
    decay = torch.where((j <= i)[..., None], forward, 0.0 if is_causal else backward)
    matrix = torch.einsum("bhid,bhjd,bhijd->bhij", query, key, decay) / DIM**0.5
    return (matrix * keep[:, None, None, :]) @ value


@pytest.mark.parametrize("number", [1, 64, 65, 130])
@pytest.mark.parametrize("bias", [-40.0, 0.0, 4.0])
def test_against_kimi(number: int, bias: float) -> None:
    """Kimi adds beta k (v - Sᵀ k)ᵀ to the state: with beta = 2^-40 and values of 2^40 v, k vᵀ is all that is left."""
    module, (query, key, value) = make(bias), tokens(number)
    with torch.no_grad():
        actual = module(query, key, value, is_causal=True)
        q, k, v, gates = (x.transpose(1, 2).float() for x in (query, key, value * 2.0**40, log_gates(module, key)))
    expected, _ = recurrent_kimi_delta_attention(q, k, v, gates, torch.full_like(k[..., 0], 2.0**-40), None, False)
    torch.testing.assert_close(actual, expected.transpose(1, 2).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 150])
def test_explicit_matrix(number: int, is_causal: bool, padded: bool) -> None:
    module, qkv = make(), tokens(number)
    keep = torch.rand(2, number) > 0.3 if padded else torch.ones(2, number, dtype=torch.bool)
    output = module(*qkv, is_causal=is_causal, key_padding_mask=keep if padded else None)
    expected, kept = explicit(module, *qkv, keep, is_causal), keep[:, None, :, None]
    torch.testing.assert_close(output.where(kept, 0.0), expected.where(kept, 0.0), rtol=1e-9, atol=1e-9)


def test_starts_with_gates_close_to_one() -> None:
    module = make(bias=None)
    gates = module.gates(tokens(100)[1])
    assert gates.max() < 1
    assert gates.min() > 0.98
    assert gates.mean().item() == pytest.approx(0.999, abs=0.001)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("bias", [-1e2, -1e4, -1e30], ids=str)
def test_small_gates(is_causal: bool, bias: float) -> None:
    """Products of gates that are far below the smallest number are 0, where their quotients would overflow."""
    module, qkv = make(bias), tokens(70)
    query, key, value = qkv
    output = module.float()(*(x.float().requires_grad_() for x in qkv), is_causal=is_causal)
    own = (query * key).sum(dim=-1, keepdim=True) / DIM**0.5 * value
    expected = explicit(module.double(), *qkv, torch.ones(2, 70, dtype=torch.bool), True) if bias == -1e2 else own
    if bias < -1e2 or is_causal:
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-5)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_rank_is_an_option() -> None:
    shapes = {name: tuple(p.shape) for name, p in make(rank=3).named_parameters()}
    assert shapes == {"down": (HEADS, DIM, 3), "up": (HEADS, 3, DIM), "bias": (HEADS, 1, DIM)}
    with pytest.raises(ValueError, match="rank must be at least 1"):
        make(rank=0)
