"""Nyströmformer against nystrom-attention and transformers, and against the softmax attention that it approximates."""

import pytest
import torch
from nystrom_attention import NystromAttention
from torch import Tensor, nn
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

import lln.zoo
from lln.zoo.nystrom import landmarks


def split(x: Tensor, heads: int) -> Tensor:
    """(B, N, H D) as (B, H, N, D)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("conv_kernel", [None, 5])
@pytest.mark.parametrize(
    ("heads", "iterations"), [(1, 6), (2, 40)], ids=["one matrix", "two heads, iterated to the end"]
)
def test_against_nystrom_attention(conv_kernel: int | None, heads: int, iterations: int) -> None:
    """Its iteration starts from the largest norm in the batch, so with several heads only the limit is the same."""
    torch.manual_seed(0)
    peer = NystromAttention(
        dim=8 * heads,
        dim_head=8,
        heads=heads,
        num_landmarks=4,
        pinv_iterations=iterations,
        residual=conv_kernel is not None,
        residual_conv_kernel=conv_kernel or 1,
    ).double()
    peer.to_out = nn.Identity()
    module = lln.zoo.build(
        "nystrom", num_heads=heads, head_dim=8, num_landmarks=4, iterations=iterations, conv_kernel=conv_kernel
    ).double()
    if conv_kernel is not None:
        module.load_state_dict({"conv": peer.res_conv.weight})
    x = 2 * torch.randn(1, 64, 8 * heads, dtype=torch.float64)
    qkv = [split(y, heads) for y in peer.to_qkv(x).chunk(3, dim=-1)]
    torch.testing.assert_close(join(module(*qkv)), peer(x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("conv_kernel", [None, 7])
def test_against_transformers(conv_kernel: int | None) -> None:
    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_landmarks=16,
        segment_means_seq_len=64,
        conv_kernel_size=conv_kernel or 1,
        attention_probs_dropout_prob=0.0,
    )
    peer = NystromformerSelfAttention(config).double()
    peer.init_option = "exact"  # the norm of each matrix; its config cannot set it (it reads a key that is not there)
    module = lln.zoo.build("nystrom", num_heads=3, head_dim=8, num_landmarks=16, conv_kernel=conv_kernel).double()
    if conv_kernel is None:
        peer.conv_kernel_size = None  # the attention can do without, its config refuses it
    else:
        module.load_state_dict({"conv": peer.conv.weight})
    x = 2 * torch.randn(2, 64, 24, dtype=torch.float64)
    qkv = [split(layer(x), 3) for layer in (peer.query, peer.key, peer.value)]
    torch.testing.assert_close(join(module(*qkv)), peer(x)[0], rtol=1e-6, atol=1e-8)


def test_landmarks_are_means_of_even_segments() -> None:
    x = torch.arange(10.0)[None, None, :, None]
    means, real = landmarks(x, None, 4)
    assert means.flatten().tolist() == [1.0, 3.5, 6.0, 8.5]  # 0 1 2, 3 4, 5 6 7, 8 9
    assert real.all()
    keep = torch.tensor([[True, False, True, False, True, False, False, False, False, True]])
    means, real = landmarks(x, keep, 2)
    assert means.flatten().tolist() == [1.0, 6.5]
    means, real = landmarks(x, keep, 6)
    assert means.flatten().tolist() == [0.0, 2.0, 4.0, 9.0, 0.0, 0.0]
    assert real.tolist() == [[True] * 4 + [False] * 2]


def smooth(number: int, frequencies: int = 8) -> Tensor:
    """Tokens that change slowly, as means of segments can represent."""
    time = torch.linspace(0, 2 * torch.pi, number, dtype=torch.float64)[:, None]
    waves = [torch.randn(2, 2, 1, 8) * torch.sin(f * time + 6 * torch.rand(1)) for f in range(1, frequencies + 1)]
    return torch.stack(waves).sum(dim=0) / 2


def test_error_falls_with_landmarks() -> None:
    torch.manual_seed(0)
    query, key, value = smooth(256), smooth(256), torch.randn(2, 2, 256, 8, dtype=torch.float64)
    exact = torch.softmax(query @ key.mT / 8**0.5, dim=-1) @ value
    errors = []
    for number, iterations in ((4, 6), (16, 6), (64, 6), (64, 20)):
        module = lln.zoo.build("nystrom", num_heads=2, head_dim=8, num_landmarks=number, iterations=iterations)
        errors.append(((module(query, key, value) - exact).norm() / exact.norm()).item())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.05  # what six iterations leave, however many landmarks there are
    assert errors[3] < 2e-3


@pytest.mark.parametrize(("queries", "keys"), [(10, 10), (7, 12), (12, 7)])
def test_few_tokens_are_their_own_landmarks(queries: int, keys: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 8, dtype=torch.float64) for n in (queries, keys, keys))
    module = lln.zoo.build("nystrom", num_heads=1, head_dim=8, num_landmarks=64, iterations=40)
    exact = torch.softmax(query @ key.mT / 8**0.5, dim=-1) @ value
    torch.testing.assert_close(module(query, key, value), exact, rtol=0, atol=1e-6)


def test_convolution_runs_over_kept_tokens() -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 40, 8) for _ in range(3)]
    keep = torch.rand(1, 40) > 0.3
    module = lln.zoo.build("nystrom", num_heads=2, head_dim=8, num_landmarks=4, conv_kernel=5)
    output = module(*qkv, key_padding_mask=keep)[:, :, keep[0]]
    torch.testing.assert_close(output, module(*(x[:, :, keep[0]] for x in qkv)), rtol=1e-4, atol=1e-5)
    output.square().sum().backward()
    assert module.conv.grad.abs().min() > 0


def test_refuses() -> None:
    with pytest.raises(ValueError, match="num_landmarks must be at least 1"):
        lln.zoo.build("nystrom", num_heads=1, head_dim=4, num_landmarks=0)
    with pytest.raises(ValueError, match="conv_kernel must be odd"):
        lln.zoo.build("nystrom", num_heads=1, head_dim=4, conv_kernel=4)
    module = lln.zoo.build("nystrom", num_heads=1, head_dim=4, conv_kernel=3)
    with pytest.raises(ValueError, match="leave conv_kernel out"):
        module(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
