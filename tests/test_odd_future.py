"""Causal gradients of the past where later tokens, which have no part in the loss, are not finite."""

import pytest
import torch

from lln import block_diagonal_attention, lln_attention, lln_diag_attention

TOKENS, FIRST_ODD = 100, 60
CENTERS = torch.full((4, 8), 0.2), torch.full((2, 8), -0.1)
ATTENTIONS = {
    "lln": (lln_attention, {}),
    "given scales": (lln_attention, {"alpha": 0.7, "beta": 0.7}),
    "unbiased": (lln_attention, {"form": "unbiased"}),
    "decomposed": (lln_attention, {"form": "decomposed", "centers": CENTERS}),
    "blocks": (block_diagonal_attention, {"block_size": 16}),
    "window": (block_diagonal_attention, {"block_size": 16, "near": "window"}),
    "lln and blocks": (lln_diag_attention, {"block_size": 16}),
    "lln and window": (lln_diag_attention, {"block_size": 16, "near": "window"}),
}


def gradients_of_past(attention, options, inputs, gradient):
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = attention(*leaves, is_causal=True, **options)
    found = torch.autograd.grad(output[:, :, :FIRST_ODD], leaves, gradient)
    return [x[:, :, :FIRST_ODD] for x in found]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize(("attention", "options"), ATTENTIONS.values(), ids=ATTENTIONS)
def test_gradients_of_the_past_do_not_depend_on_it(backend, attention, options, which, odd, padded):
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, h, TOKENS, 8, generator=generator) for h in (4, 2, 2)]
    gradient = torch.randn(2, 4, FIRST_ODD, 8, generator=generator)
    if padded:
        options = options | {"key_padding_mask": torch.rand(2, TOKENS, generator=generator) > 0.2}
    expected = gradients_of_past(attention, options, inputs, gradient)
    inputs[which][0, :, FIRST_ODD:] = odd  # of the first sample alone
    found = gradients_of_past(attention, options, inputs, gradient)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_of_odd_tokens_has_odd_gradients(backend):
    inputs = [torch.randn(1, 2, 20, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    inputs[2][:, :, 10] = torch.nan
    leaves = [x.requires_grad_() for x in inputs]
    lln_attention(*leaves, is_causal=True).sum().backward()
    assert leaves[1].grad[:, :, 0].isnan().all()
