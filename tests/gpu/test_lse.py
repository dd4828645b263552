"""Gates beside the Triton backend, whose kernels return no log-sum-exp: plain torch computes it."""

import torch

import lln
from lln.neighbors import near_with_mass_ratio


def test_attention_among_neighbours_with_the_mass_ratio():
    tokens = [torch.randn(1, 2, 40, 16).requires_grad_() for _ in range(3)]
    weight = torch.randn(1, 2, 40).requires_grad_()
    results = []
    for name in ("triton", "torch"):
        with lln.backends.use(name):
            output, ratio = near_with_mass_ratio(*tokens, weight, near="window", block_size=8)
        loss = output.square().sum() + ratio.sigmoid().sum()
        results.append((output, ratio, *torch.autograd.grad(loss, [*tokens, weight])))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_next_token_of_a_gated_layer():
    """The log-sum-exp is computed before the memory of the state is overwritten."""
    options = {"near": "window", "block_size": 8, "combine": "gate"}
    module = lln.LLNDiagAttention(2, 16, statistics="learned", form="decomposed", **options).eval()
    tokens = torch.randn(3, 1, 2, 21, 16)
    before, after = tokens[..., :20, :], tokens[..., 20:, :]
    results = []
    for name in ("triton", "torch"):
        state = module.init_state(1, key_heads=2, value_dim=16, dtype=torch.float32, device=tokens.device)
        for backend, (query, key, value) in (("torch", before), (name, after)):
            with lln.backends.use(backend), torch.no_grad():
                a, b, weight = module.far_inputs(query, key)
                far_mass = module.log_far_mass(key, None, state)
                near = {"near_query": query, "near_key": key, "key_weight": weight}
                far, close, lse, state = state.branches(a, b, value, **near, in_place=True)
                output = module.join(far, close, far_mass - lse, query=query)
        results.append((output, lse))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
