"""Longformer against transformers, local-attention and its own formula as a matrix."""

import pytest
import torch
from local_attention import LocalAttention
from torch import Tensor
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from lln.zoo import build

HEADS, HEAD_DIM = 3, 8


def tokens_of(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, number, HEAD_DIM, dtype=torch.float64, generator=generator)
    return q, k, v


def matrix_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, global_tokens: int, is_causal: bool = False
) -> Tensor:
    """The formula pair by pair."""
    number = q.shape[2]
    allowed = torch.zeros(number, number, dtype=torch.bool)
    for i in range(number):
        for j in range(number):
            near = abs(i - j) <= window or j < global_tokens or i < global_tokens
            allowed[i, j] = near and not (is_causal and j > i)
    scores = (q @ k.mT / HEAD_DIM**0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1) @ v


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("number", [1, 2, 15, 16, 17, 65])
@pytest.mark.parametrize(
    ("window", "global_tokens"), [(16, 1), (5, 3), (0, 0), (0, 2), (3, 0), (100, 1), (2, 100)], ids=str
)
def test_formula(window: int, global_tokens: int, number: int, is_causal: bool) -> None:
    mechanism = build("longformer", num_heads=HEADS, head_dim=HEAD_DIM, window=window, global_tokens=global_tokens)
    q, k, v = tokens_of(number)
    expected = matrix_attention(q, k, v, window=window, global_tokens=global_tokens, is_causal=is_causal)
    torch.testing.assert_close(mechanism(q, k, v, is_causal=is_causal), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("lengths", [(64, 64), (64, 41)], ids=["whole", "padded"])
def test_transformers(global_tokens: int, lengths: tuple[int, int]) -> None:
    """Their layer projects its input; ours is handed their projections."""
    width = HEADS * HEAD_DIM
    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=width, num_attention_heads=HEADS, attention_window=[16], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, layer_id=0).double()
    for name in ("query", "key", "value"):  # one projection for both kinds of token
        getattr(theirs, f"{name}_global").load_state_dict(getattr(theirs, name).state_dict())
    x = torch.randn(2, 64, width, dtype=torch.float64)
    keep = torch.arange(64) < torch.tensor(lengths)[:, None]
    state = torch.where(keep, 0.0, -10000.0)
    state[:, :global_tokens] = 10000.0
    expected = theirs(
        x,
        attention_mask=state,
        is_index_masked=state < 0,
        is_index_global_attn=state > 0,
        is_global_attn=global_tokens > 0,
    )[0]

    q, k, v = (getattr(theirs, name)(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for name in ("query", "key", "value"))
    mechanism = build("longformer", num_heads=HEADS, head_dim=HEAD_DIM, window=8, global_tokens=global_tokens)
    output = mechanism(q, k, v, key_padding_mask=keep).transpose(1, 2).flatten(2)
    # They take the softmax in float32 whatever the input is.
    torch.testing.assert_close(output[keep], expected[keep], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_local_attention(is_causal: bool) -> None:
    theirs = LocalAttention(8, causal=is_causal, exact_windowsize=True, use_rotary_pos_emb=False)
    q, k, v = tokens_of(64)
    mechanism = build("longformer", num_heads=HEADS, head_dim=HEAD_DIM, window=8, global_tokens=0)
    torch.testing.assert_close(mechanism(q, k, v, is_causal=is_causal), theirs(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_padding_is_as_if_removed(is_causal: bool) -> None:
    """Left, right or in between: windows and global tokens count kept tokens."""
    mechanism = build("longformer", num_heads=HEADS, head_dim=HEAD_DIM, window=4, global_tokens=2)
    q, k, v = (x.requires_grad_() for x in tokens_of(40))
    keep = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[:, :3] = False
    output = mechanism(q, k, v, key_padding_mask=keep, is_causal=is_causal)
    for sample in range(2):
        cut = (x[sample : sample + 1, :, keep[sample]] for x in (q, k, v))
        expected = mechanism(*cut, is_causal=is_causal)[0]
        torch.testing.assert_close(output[sample, :, keep[sample]], expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(output.transpose(1, 2)[~keep], torch.zeros_like(output.transpose(1, 2)[~keep]))
    output.sum().backward()
    assert all((x.grad.transpose(1, 2)[~keep] == 0).all() for x in (q, k, v) if x.grad is not None)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="window must be at least 0, got -1"):
        build("longformer", num_heads=1, head_dim=4, window=-1)
    with pytest.raises(TypeError, match="global_tokens must be an int"):
        build("longformer", num_heads=1, head_dim=4, global_tokens=0.5)
