"""The fused code as ops of torch.library, which torch.compile keeps in its graphs."""

import functools

import pytest
import torch

import lln
from helpers import causal_or_full, needs_cpu, run
from lln.backends.cpu import autograd, binding

pytestmark = needs_cpu


def test_the_compiled_op_refuses_gradients_of_gradients(tokens):
    inputs = tokens(B=1, H=1, N=9, D=8, dtype=torch.float32, grad=True)
    output = autograd.forward_op(*inputs, None, None, None, None, True, 0, False, "variance")[0]
    first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(first[0].sum(), inputs)


@causal_or_full
def test_registered_ops_pass_opcheck(tokens, is_causal):
    inputs = tokens(B=1, H=2, N=20, D=8, dtype=torch.float32, grad=True)
    keep = torch.rand(1, 20) > 0.2
    alpha = torch.ones(1, 2, 1, requires_grad=True)
    for arguments in (
        (*inputs, None, None, None, None, True, 0, is_causal, "variance"),
        (*inputs, keep, keep, alpha, None, True, 8, is_causal, "entropy"),
        (*inputs, None, keep, None, None, False, 8, is_causal, "variance"),
    ):
        torch.library.opcheck(autograd.forward_op, arguments)
    rest = (True, None, "paper", None, None)
    near = (*inputs, None, keep, None, None, False, 8, is_causal, "variance", *rest)
    torch.library.opcheck(autograd.forward_op, (*near, True))
    q, k, v = (x.detach() for x in inputs)
    output, *kept, _ = binding.forward(q, k, v, None, None, None, None, True, 0, is_causal, "variance")
    torch.library.opcheck(autograd.backward_op, (output, q, k, v, None, None, *kept, True, 0, is_causal, True))


def test_the_op_is_in_the_compiled_graph(tokens):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    inputs = tokens(N=70, D=8, dtype=torch.float32)
    compiled = torch.compile(lln.lln_attention, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), lln.lln_attention(*inputs))
    assert "lln.fused_forward" in graphs[0].code or "fused_forward" in str(graphs[0].graph)


@causal_or_full
def test_the_op_with_weights(tokens, is_causal):
    q, k, v = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32, grad=True)
    weight = torch.randn(1, 2, 40).requires_grad_()
    scales = torch.full((1, 1, 1), 1.25), torch.full((1, 1, 1), 0.75)
    settings = (None, None, *scales, True, 16, is_causal, "variance", True)
    torch.library.opcheck(autograd.forward_op, (q, k, v, *settings, weight))
    tensors = [x.detach() for x in (q, k, v)]
    output, *kept, _ = binding.forward(*tensors, *settings, weight.detach())
    arguments = (output, *tensors, None, None, *kept, True, 16, is_causal, True, True, weight.detach(), True)
    torch.library.opcheck(autograd.backward_op, arguments)
    gradient = torch.randn(1, 2, 40, 8)
    options = {"alpha": 1.25, "beta": 0.75, "near": "window", "block_size": 16, "is_causal": is_causal}

    def weighted(q, k, v, w):
        return lln.lln_diag_attention(q, k, v, key_weight=w, **options)

    ours = run(weighted, (q, k, v, weight), gradient)
    by_op = run(lambda q, k, v, w: autograd.forward_op(q, k, v, *settings, w)[0], (q, k, v, weight), gradient)
    assert all(torch.equal(x, y) for x, y in zip(ours, by_op, strict=True))


@causal_or_full
def test_the_op_with_a_window(tokens, is_causal):
    inputs = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32, grad=True)
    torch.library.opcheck(
        autograd.forward_op, (*inputs, None, None, None, None, True, 8, is_causal, "variance", True, None)
    )
    gradient = torch.randn(1, 2, 40, 8)
    attention = functools.partial(lln.lln_diag_attention, near="window", block_size=8, is_causal=is_causal)
    ours = run(attention, inputs, gradient)
    by_op = run(
        lambda *x: autograd.forward_op(*x, None, None, None, None, True, 8, is_causal, "variance", True)[0],
        inputs,
        gradient,
    )
    assert all(torch.equal(x, y) for x, y in zip(ours, by_op, strict=True))
