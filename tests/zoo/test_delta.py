"""DeltaNet against the gated delta rule of transformers without its gate, and against the recurrence token by token."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import lln.zoo
from lln.zoo.delta import Delta, delta_sums

HEADS, DIM = 2, 8


def tokens(number: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, number, DIM, dtype=torch.float64) for _ in range(3)]


def make() -> Delta:
    torch.manual_seed(1)
    module = lln.zoo.build("delta", num_heads=HEADS, head_dim=DIM).double()
    assert isinstance(module, Delta)
    with torch.no_grad():
        module.bias.copy_(torch.randn_like(module.bias))
    return module


def strengths(module: Delta, key: Tensor) -> Tensor:
    return torch.sigmoid(torch.einsum("bhnd,hde->bhn", key, module.weight) + module.bias[..., 0])


def recurrence(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, own: bool) -> Tensor:
    """One token after the other, in the order given; `own`: a token is read after it was written."""
    state = torch.zeros(*key.shape[:2], key.shape[3], value.shape[3], dtype=value.dtype)
    outputs = []
    for t in range(query.shape[2]):
        q, k, v = (x[:, :, t, :, None] for x in (query, key, value))
        after = state + beta[:, :, t, None, None] * k @ (v - state.mT @ k).mT
        outputs.append((after if own else state).mT @ q)
        state = after
    return torch.stack(outputs, dim=2)[..., 0]


@pytest.mark.parametrize("number", [1, 64, 65, 200])
@pytest.mark.parametrize("peer", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_against_transformers(number: int, peer) -> None:
    module, (query, key, value) = make(), tokens(number)
    with torch.no_grad():
        actual = module(query, key, value, is_causal=True)
        beta = strengths(module, key).transpose(1, 2).float()
    q, k, v = (x.transpose(1, 2).float() for x in (normalize(query, dim=-1), normalize(key, dim=-1), value))
    expected, _ = peer(q, k, v, torch.zeros_like(beta), beta)  # it divides queries by sqrt(D)
    torch.testing.assert_close(actual, DIM**0.5 * expected.transpose(1, 2).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 150])
def test_recurrence(number: int, is_causal: bool, padded: bool) -> None:
    module, (query, key, value) = make(), tokens(number)
    keep = torch.rand(2, number) > 0.3 if padded else torch.ones(2, number, dtype=torch.bool)
    beta = strengths(module, key) * keep[:, None]
    q, k = normalize(query, dim=-1), normalize(key, dim=-1)
    expected = recurrence(q, k, value, beta, own=True)
    if not is_causal:
        expected = expected + recurrence(*(x.flip(2) for x in (q, k, value, beta)), own=False).flip(2)
    output = module(query, key, value, is_causal=is_causal, key_padding_mask=keep if padded else None)
    kept = keep[:, None, :, None]
    torch.testing.assert_close(output.where(kept, 0.0), expected.where(kept, 0.0), rtol=1e-9, atol=1e-9)


def test_a_key_is_overwritten() -> None:
    """With a strength of 1 a query that is a key reads the last value that was written for it."""
    key = torch.eye(DIM, dtype=torch.float64).repeat(2, 1)[None, None]  # each key twice
    value = torch.randn(1, 1, 2 * DIM, 5, dtype=torch.float64)
    output, state = delta_sums(key, key, value, torch.ones(1, 1, 2 * DIM, 1, dtype=torch.float64), None, own=True)
    torch.testing.assert_close(output, value)
    torch.testing.assert_close(state, value[:, :, DIM:])


@pytest.mark.parametrize("same", [0.0, 0.9, 1.0], ids=["random keys", "similar keys", "equal keys"])
def test_float32_stays_exact_over_long_sequences(same: float) -> None:
    """Chunks are solved, not inverted by powers, so that keys that repeat do no harm."""
    query, key, value = tokens(3000)
    key = same * key[:, :, :1] + (1 - same) * key
    module = make()
    with torch.no_grad():
        expected = module(query, key, value, is_causal=True)
        actual = module.float()(query.float(), key.float(), value.float(), is_causal=True)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


def test_zero_keys_and_queries() -> None:
    """A key without a direction writes nothing, a query without one reads nothing, and gradients are finite."""
    qkv = [x.requires_grad_() for x in torch.zeros(3, 1, HEADS, 70, DIM).unbind()]
    output = make().float()(*qkv)
    assert output.abs().max() == 0
    output.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in qkv)
