"""Transformer-LS against its formula, query by query."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from lln.zoo import build
from lln.zoo.transformer_ls import TransformerLS

HEADS, HEAD_DIM = 3, 4
WIDTH = HEADS * HEAD_DIM


def tokens_of(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, number, HEAD_DIM, dtype=torch.float64, generator=generator)
    return q, k, v


def make(**options: int) -> TransformerLS:
    torch.manual_seed(0)
    mechanism = build("transformer_ls", num_heads=HEADS, head_dim=HEAD_DIM, **options).double()
    assert isinstance(mechanism, TransformerLS)
    for norm in (mechanism.short_norm, mechanism.long_norm):  # not the ones and zeros they start with
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    return mechanism


def explicit(mechanism: TransformerLS, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sample (H, N, D)."""

    def norm(x: Tensor, which: torch.nn.LayerNorm) -> Tensor:
        rows = torch.stack([torch.cat(list(x[:, i])) for i in range(x.shape[1])])  # all heads of a token
        rows = layer_norm(rows, (WIDTH,), which.weight, which.bias)
        return torch.stack(rows.split(HEAD_DIM, dim=1))

    summary = (k @ mechanism.projection).softmax(dim=1)
    k, v = norm(k, mechanism.short_norm), norm(v, mechanism.short_norm)
    long_k, long_v = (norm(summary.mT @ x, mechanism.long_norm) for x in (k, v))
    segment, half = mechanism.segment, max(mechanism.segment // 2, 1)
    output = torch.empty_like(q)
    for i in range(q.shape[1]):
        start = i // segment * segment
        near = slice(max(0, start - half), start + segment + half)
        keys, values = torch.cat((k[:, near], long_k), dim=1), torch.cat((v[:, near], long_v), dim=1)
        output[:, i] = ((q[:, i, None] @ keys.mT / HEAD_DIM**0.5).softmax(dim=-1) @ values)[:, 0]
    return output


@pytest.mark.parametrize("number", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize(("segment", "rank"), [(8, 3), (5, 1), (1, 2), (64, 32)], ids=str)
def test_formula(segment: int, rank: int, number: int) -> None:
    mechanism = make(segment=segment, rank=rank)
    q, k, v = tokens_of(number)
    expected = torch.stack([explicit(mechanism, *sample) for sample in zip(q, k, v, strict=True)])
    torch.testing.assert_close(mechanism(q, k, v), expected, rtol=1e-9, atol=1e-9)


def test_padding_is_as_if_removed() -> None:
    mechanism = make(segment=6, rank=3)
    q, k, v = tokens_of(40)
    keep = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    output = mechanism(q, k, v, key_padding_mask=keep)
    for sample in range(2):
        expected = explicit(mechanism, *(x[sample, :, keep[sample]] for x in (q, k, v)))
        torch.testing.assert_close(output[sample, :, keep[sample]], expected, rtol=1e-9, atol=1e-9)
    assert (output.transpose(1, 2)[~keep] == 0).all()


def test_gradients() -> None:
    """Also those of the parameters, which two parts of one softmax share."""
    mechanism = make(segment=3, rank=2)
    names = [name for name, _ in mechanism.named_parameters()]
    q, k, v = (x[:1, :, :7].requires_grad_() for x in tokens_of(7))

    def run(*values: Tensor) -> Tensor:
        parameters = dict(zip(names, values[3:], strict=True))
        output = torch.func.functional_call(mechanism, parameters, values[:3])
        assert isinstance(output, Tensor)
        return output

    assert torch.autograd.gradcheck(run, (q, k, v, *mechanism.parameters()), fast_mode=True)


def test_refusals() -> None:
    mechanism = make()
    q, k, v = tokens_of(8)
    with pytest.raises(ValueError, match="transformer_ls cannot be causal"):
        mechanism(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match=r"built for head_dim=4, got value \(2, 3, 8, 2\)"):
        mechanism(q, k, v[..., :2])
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        make(rank=0)
