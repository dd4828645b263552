"""The log-sum-exp of attention among neighbours, which gates compare with what is further away."""

import pytest
import torch

import lln
from lln.backends.torch import TorchBackend
from lln.neighbors import near_with_mass_ratio


@pytest.fixture
def without_plain(monkeypatch):
    """A function after which plain torch computes no log-sum-exp."""

    def refuse(*_):
        raise AssertionError("the log-sum-exp was computed by plain torch")

    def forbid():
        monkeypatch.setattr(TorchBackend, "near_with_lse", refuse)
        monkeypatch.setattr(lln.backends, "near_lse", refuse)

    return forbid


@pytest.mark.parametrize("used", ["both", "output", "ratio"])
@pytest.mark.parametrize(("near", "padded"), [("window", False), ("blocks", True)])
def test_attention_among_neighbours_with_the_mass_ratio(without_plain, near, padded, used):
    query = torch.randn(2, 4, 40, 16).requires_grad_()
    key, value = (torch.randn(2, 2, 40, 16).requires_grad_() for _ in range(2))
    weight = torch.randn(2, 4, 40).requires_grad_()
    padding = torch.rand(2, 40) < 0.3 if padded else None
    inputs = [query, key, value, weight]
    results = []
    for name in ("torch", "triton"):
        if name == "triton":
            without_plain()
        with lln.backends.use(name):
            options = {"near": near, "block_size": 8, "key_padding_mask": padding}
            output, ratio = near_with_mass_ratio(*inputs, **options)
        share = ratio.sigmoid() if padding is None else ratio.sigmoid().masked_fill(padding[:, None], 0.0)
        losses = {"output": output.square().sum(), "ratio": share.sum()}
        loss = losses.get(used, sum(losses.values()))
        results.append((output, share, *torch.autograd.grad(loss, inputs, materialize_grads=True)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients_of_the_log_sum_exp():
    tokens = [torch.randn(1, 2, 12, 16).requires_grad_() for _ in range(3)]
    results = []
    for name in ("torch", "triton"):
        with lln.backends.use(name):
            _, ratio = near_with_mass_ratio(*tokens, near="window", block_size=4)
            (first,) = torch.autograd.grad(ratio.sigmoid().sum(), tokens[:1], create_graph=True)
            results.append((first, *torch.autograd.grad(first.square().sum(), tokens[:2])))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("near", ["window", "blocks"])
def test_the_next_token_of_a_gated_layer(without_plain, near):
    options = {"near": near, "block_size": 8, "combine": "gate"}
    module = lln.LLNDiagAttention(2, 16, statistics="learned", form="decomposed", **options).eval()
    tokens = torch.randn(3, 1, 2, 21, 16)
    before, after = tokens[..., :20, :], tokens[..., 20:, :]
    results = []
    for name in ("torch", "triton"):
        state = module.init_state(1, key_heads=2, value_dim=16, dtype=torch.float32, device=tokens.device)
        for backend, (query, key, value) in (("torch", before), (name, after)):
            if backend == "triton":
                without_plain()
            with lln.backends.use(backend), torch.no_grad():
                a, b, weight = module.far_inputs(query, key)
                far_mass = module.log_far_mass(key, None, state)
                inputs = {"near_query": query, "near_key": key, "key_weight": weight}
                far, close, lse, state = state.branches(a, b, value, **inputs, in_place=True)
                output = module.join(far, close, far_mass - lse, query=query)
        results.append((output, lse))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
