"""TNN against an explicit Toeplitz matrix for every head and feature."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from lln.zoo import build
from lln.zoo.tnn import TNN

HEADS, HEAD_DIM = 2, 3


def tokens_of(number: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, number, HEAD_DIM, dtype=dtype, generator=generator)
    return q, k, v


def make(**options: float) -> TNN:
    torch.manual_seed(0)
    mechanism = build("tnn", num_heads=HEADS, head_dim=HEAD_DIM, **options).double()
    assert isinstance(mechanism, TNN)
    return mechanism


def network(mechanism: TNN, position: Tensor) -> Tensor:
    """t(p) for positions (...), (..., H, D): linear, (norm, relu, linear) for each further layer; decay."""
    first, *rest = mechanism.network
    x = first(position[..., None].double())
    for layer in rest:
        assert isinstance(layer, nn.Linear)
        x = layer(torch.relu(rms_norm(x, x.shape[-1:], eps=1e-8)))
    return (mechanism.decay ** position.abs().double())[..., None, None] * x.unflatten(-1, (HEADS, HEAD_DIM))


def explicit(mechanism: TNN, q: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    number = q.shape[2]
    toeplitz = network(mechanism, torch.arange(number)[:, None] - torch.arange(number))  # (N, N, H, D)
    if is_causal:
        toeplitz = toeplitz * torch.ones(number, number, dtype=torch.float64).tril()[:, :, None, None]
    return silu(q) * torch.einsum("ijhd,bhjd->bhid", toeplitz, silu(v))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 130, 200])
def test_formula(number: int, is_causal: bool) -> None:
    mechanism = make(width=8, layers=2, decay=0.97)
    q, k, v = tokens_of(number)
    expected = explicit(mechanism, q, v, is_causal)
    torch.testing.assert_close(mechanism(q, k, v, is_causal=is_causal), expected, rtol=1e-9, atol=1e-9)


def test_layers_and_decay_are_options() -> None:
    mechanism = make(width=5, layers=1, decay=1.0)
    assert [tuple(p.shape) for p in mechanism.parameters() if p.dim() == 2] == [(5, 1), (5, 5), (6, 5)]
    q, k, v = tokens_of(20)
    torch.testing.assert_close(mechanism(q, k, v), explicit(mechanism, q, v, False), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_padding_is_as_if_removed(is_causal: bool) -> None:
    mechanism = make(width=8)
    q, k, v = tokens_of(150)
    keep = torch.rand(2, 150, generator=torch.Generator().manual_seed(1)) < 0.6
    output = mechanism(q, k, v, key_padding_mask=keep, is_causal=is_causal)
    for sample in range(2):
        q_cut, v_cut = (x[sample : sample + 1, :, keep[sample]] for x in (q, v))
        expected = explicit(mechanism, q_cut, v_cut, is_causal)[0]
        torch.testing.assert_close(output[sample, :, keep[sample]], expected, rtol=1e-9, atol=1e-9)
    assert (output.transpose(1, 2)[~keep] == 0).all()


@pytest.mark.parametrize("seen", [1, 64, 100, 128, 299])
def test_the_future_does_not_leak_by_rounding(seen: int) -> None:
    """One Fourier transform of it all would carry 1e-7 of what is to come into the past, whatever its size."""
    mechanism = make(width=8).float()
    q, k, v = tokens_of(300, torch.float32)
    loud = torch.cat((v[:, :, :seen], 1e20 * v[:, :, seen:]), dim=2)
    past, also_past = (mechanism(q, k, x, is_causal=True)[:, :, :seen] for x in (v, loud))
    assert torch.equal(past, also_past)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients(is_causal: bool) -> None:
    """Of all parameters, through the transforms and through the network."""
    mechanism = make(width=4, layers=1)
    names = [name for name, _ in mechanism.named_parameters()]
    q, k, v = (x[:1, :, :70].requires_grad_() for x in tokens_of(70))

    def run(query: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
        output = torch.func.functional_call(
            mechanism, dict(zip(names, parameters, strict=True)), (query, k, value), {"is_causal": is_causal}
        )
        assert isinstance(output, Tensor)
        return output

    assert torch.autograd.gradcheck(run, (q, v, *mechanism.parameters()), fast_mode=True)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="decay must be above 0 and at most 1"):
        make(decay=1.5)
    q, k, v = tokens_of(8)
    with pytest.raises(ValueError, match="built for head_dim=3"):
        make()(q, k, v[..., :2])
