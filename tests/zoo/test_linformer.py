"""Linformer against the linformer package with the same projections."""

import pytest
import torch
from linformer import LinformerSelfAttention
from torch import Tensor, nn

import lln.zoo


def split(x: Tensor) -> Tensor:
    """(B, N, H D) as (B, H, N, D) for three heads."""
    return x.reshape(*x.shape[:2], 3, -1).transpose(1, 2)


@pytest.mark.parametrize("share_kv", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (25, 25), (1, 1), (12, 33)])
def test_against_linformer(share_kv: bool, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    peer = LinformerSelfAttention(dim=24, seq_len=40, k=10, heads=3, share_kv=share_kv)
    peer.to_out = nn.Identity()
    module = lln.zoo.build("linformer", num_heads=3, head_dim=8, max_len=40, rank=10, share_kv=share_kv)
    with torch.no_grad():
        module.project_key.copy_(peer.proj_k.mT)
        if not share_kv:
            module.project_value.copy_(peer.proj_v.mT)
    x, context = torch.randn(2, queries, 24), torch.randn(2, keys, 24)
    context = x if queries == keys else context
    value = peer.to_k(context) if share_kv else peer.to_v(context)
    output = module(split(peer.to_q(x)), split(peer.to_k(context)), split(value))
    torch.testing.assert_close(output.transpose(1, 2).flatten(2), peer(x, context=context))


def test_shared_projection_is_one_parameter() -> None:
    module = lln.zoo.build("linformer", num_heads=1, head_dim=4, max_len=9, rank=5, share_kv=True)
    assert [tuple(p.shape) for p in module.parameters()] == [(5, 9)]


def test_with_the_identity_as_projection_it_is_softmax_attention() -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 1, 12, 4) for _ in range(3)]
    module = lln.zoo.build("linformer", num_heads=1, head_dim=4, max_len=12, rank=12)
    with torch.no_grad():
        module.project_key.copy_(torch.eye(12))
        module.project_value.copy_(torch.eye(12))
    torch.testing.assert_close(module(*qkv), lln.zoo.build("softmax", num_heads=1, head_dim=4)(*qkv))


def test_refuses() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1"):
        lln.zoo.build("linformer", num_heads=1, head_dim=4, max_len=9, rank=0)
    module = lln.zoo.build("linformer", num_heads=1, head_dim=4, max_len=9)
    with pytest.raises(ValueError, match="max_len=9 tokens, got 10"):
        module(*(torch.ones(1, 1, 10, 4) for _ in range(3)))
