"""TransNormer T1 and T2 against the explicit matrices of their two kinds of layer."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu, layer_norm, rms_norm

from lln.zoo import build
from lln.zoo.transnormer import TransNormer

HEADS, HEAD_DIM = 3, 4
WIDTH = HEADS * HEAD_DIM
NAMES = ("transnormer_t1", "transnormer_t2")


def tokens_of(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, number, HEAD_DIM, dtype=torch.float64, generator=generator)
    return q, k, v


def make(name: str, **options: object) -> TransNormer:
    torch.manual_seed(0)
    mechanism = build(name, num_heads=HEADS, head_dim=HEAD_DIM, **options).double()
    assert isinstance(mechanism, TransNormer)
    for parameter in mechanism.parameters():  # not the ones and zeros they start with
        torch.nn.init.normal_(parameter)
    return mechanism


def explicit(mechanism: TransNormer, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    number = q.shape[2]
    block = torch.arange(number) // mechanism.block_size
    allowed = torch.ones(number, number, dtype=torch.bool)
    if mechanism.layer == "diag":
        allowed &= block[:, None] == block
    if is_causal:
        allowed &= torch.arange(number)[:, None] >= torch.arange(number)
    if mechanism.layer == "linear":
        phi_q, phi_k = (elu(q), elu(k)) if name == "transnormer_t1" else (1 + elu(q), 1 + elu(k))
        weights = phi_q @ phi_k.mT * allowed
    elif name == "transnormer_t1":
        weights = torch.relu(q @ k.mT / HEAD_DIM**0.5) * allowed
    else:
        return (q @ k.mT / HEAD_DIM**0.5).masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ v
    output = torch.cat(list((weights @ v).unbind(dim=1)), dim=-1)  # all heads of a token
    if mechanism.norm == "layer":
        output = layer_norm(output, (WIDTH,), mechanism.scale, mechanism.offset)
    else:
        output = rms_norm(output, (WIDTH,), mechanism.scale, eps=1e-8)
    return torch.stack(output.split(HEAD_DIM, dim=-1), dim=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", ["diag", "linear"])
@pytest.mark.parametrize("norm", ["rms", "srms", "layer"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("number", [1, 15, 16, 17, 70])
def test_formula(name: str, layer: str, norm: str, is_causal: bool, number: int) -> None:
    mechanism = make(name, layer=layer, norm=norm, block_size=16)
    q, k, v = tokens_of(number)
    expected = explicit(mechanism, name, q, k, v, is_causal)
    torch.testing.assert_close(mechanism(q, k, v, is_causal=is_causal), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", ["diag", "linear"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_padding_is_as_if_removed(name: str, layer: str, is_causal: bool) -> None:
    """With a norm whose offset would show on padding."""
    mechanism = make(name, layer=layer, norm="layer", block_size=8)
    q, k, v = tokens_of(40)
    keep = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    output = mechanism(q, k, v, key_padding_mask=keep, is_causal=is_causal)
    for sample in range(2):
        cut = (x[sample : sample + 1, :, keep[sample]] for x in (q, k, v))
        expected = explicit(mechanism, name, *cut, is_causal)[0]
        torch.testing.assert_close(output[sample, :, keep[sample]], expected, rtol=1e-9, atol=1e-9)
    assert (output.transpose(1, 2)[~keep] == 0).all()


def test_parameters_are_those_that_are_used() -> None:
    assert [n for n, _ in make("transnormer_t2", layer="diag").named_parameters()] == []
    assert [n for n, _ in make("transnormer_t1", layer="diag").named_parameters()] == ["scale"]
    assert [n for n, _ in make("transnormer_t1", norm="srms").named_parameters()] == []
    assert [n for n, _ in make("transnormer_t2", norm="layer").named_parameters()] == ["scale", "offset"]


def test_rows_without_weight_have_finite_gradients() -> None:
    """Where no score is above zero, rectified attention gives zeros, which the norm must not divide by."""
    mechanism = make("transnormer_t1", layer="diag")
    q = torch.ones(1, HEADS, 5, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, HEADS, 5, HEAD_DIM, dtype=torch.float64)
    output = mechanism(q, -q, v)
    assert (output == 0).all()
    output.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="layer must be one of 'diag', 'linear', got 'both'"):
        make("transnormer_t1", layer="both")
    with pytest.raises(ValueError, match="norm must be one of 'rms', 'srms', 'layer'"):
        make("transnormer_t2", norm="batch")
    q, k, v = tokens_of(8)
    with pytest.raises(ValueError, match="built for head_dim=4"):
        make("transnormer_t1")(q, k, v[..., :2])
