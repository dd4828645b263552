"""The plain torch path: gradients from a second computation, in pieces, are those of the explicit formula."""

import functools

import pytest
import torch
from torch.autograd import forward_ad

from lln import reference
from lln.backends.torch.blocks import block_diagonal_attention
from lln.backends.torch.causal import _segment, _segment_gradients, causal_attention
from lln.backends.torch.full import full_attention
from lln.backends.torch.summary import KeySummary, empty_summary
from lln.matching import moments

KINDS = ["full", "causal", "blocks", "blocks-causal"]


@pytest.fixture(params=[False, True], ids=["whole", "pieces"])
def _pieces(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(moments, "CHUNK_TOKENS", 32)


def attention_of(kind, keep=None):
    """The plain function of query, key, value, alpha and beta, and the reference."""
    if kind.startswith("blocks"):
        options = {"block_size": 16, "is_causal": kind.endswith("causal")}
        theirs = functools.partial(reference.block_diagonal_attention, key_padding_mask=keep, **options)
        return lambda q, k, v, *_: block_diagonal_attention(q, k, v, keep, **options)[0], lambda q, k, v, *_: theirs(
            q, k, v
        )

    def ours(q, k, v, alpha, beta):
        alpha, beta = (x[..., None] for x in (alpha, beta))
        if kind == "full":
            return full_attention(q, k, v, alpha, beta, keep)
        memory = empty_summary(*q.shape[:2], q.shape[3], v.shape[3], q)
        return causal_attention(q, k, v, alpha, beta, keep, memory)[0]

    def theirs(q, k, v, alpha, beta):
        return reference.lln_attention(
            q, k, v, alpha=alpha, beta=beta, key_padding_mask=keep, is_causal=kind == "causal"
        )

    return ours, theirs


def gradients(attention, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = attention(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).sin().view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs, allow_unused=True)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("N", [1, 64, 150], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_reference(tokens, kind, N, masked):
    """Also those of alpha and beta, of whatever shape, and with fewer key heads."""
    keep = torch.rand(2, N) > 0.3 if masked else None
    if masked:
        keep[0] = False  # a sample without any kept key
        keep[1, 0] = True
    for shape in ((2, 4, 1), (1, 1, 1), (1, 4, N)):
        alpha, beta = (torch.rand(shape, dtype=torch.float64) + 0.5 for _ in range(2))
        inputs = [*tokens(N=N, H=4, Hk=2, D=8, Dv=5), alpha, beta]
        ours, theirs = (gradients(attention, inputs) for attention in attention_of(kind, keep))
        for x, y in zip(ours, theirs, strict=True):
            if y is not None:
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_exact_as_it_can_be(tokens, kind):
    inputs = [*tokens(B=1, H=2, N=300, D=64), *(torch.ones(1, 1, 1, dtype=torch.float64) * 1.2 for _ in range(2))]
    single = [x.float() for x in inputs]
    ours, theirs = attention_of(kind)
    exact = theirs(*(x.double() for x in single))
    assert (ours(*single) - exact).norm() <= 2e-6 * exact.norm()
    for x, y in zip(gradients(ours, single), gradients(theirs, [x.double() for x in single]), strict=True):
        assert y is None or (x - y).norm() <= 1e-5 * y.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's forward mode scripts its rules when first used
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_differentiating_agrees(tokens, kind):
    """With a graph of the gradient, in batches, in torch.func and forward."""
    attention, _ = attention_of(kind)
    scale = torch.ones(1, 1, 1, dtype=torch.float64)
    inputs = tokens(B=1, H=2, N=70, D=4, grad=True)
    output = attention(*inputs, scale, scale)
    direction = torch.randn(3, *output.shape, dtype=torch.float64)
    plainly = [torch.autograd.grad(output, inputs, g, retain_graph=True) for g in direction]
    with_graph = torch.autograd.grad(output, inputs, direction[0], retain_graph=True, create_graph=True)
    batched = torch.autograd.grad(output, inputs, direction, is_grads_batched=True)
    leaves = [x.detach() for x in inputs]
    _, pull = torch.func.vjp(lambda q, k, v: attention(q, k, v, scale, scale), *leaves)
    for i, expected in enumerate(plainly[0]):
        torch.testing.assert_close(with_graph[i], expected)
        torch.testing.assert_close(batched[i][0], expected)
        torch.testing.assert_close(batched[i][2], plainly[2][i])
        torch.testing.assert_close(pull(direction[0])[i], expected)
    tangents = [torch.randn_like(x) for x in leaves]
    with forward_ad.dual_level():
        dual = attention(*(forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents, strict=True)), scale, scale)
        pushed = forward_ad.unpack_dual(dual).tangent
    pulled = sum((t * g).sum() for t, g in zip(tangents, plainly[0], strict=True))
    torch.testing.assert_close((pushed * direction[0]).sum(), pulled)


def test_the_gradient_of_a_causal_memory(tokens):
    """What comes later reaches what came before through the memory alone."""
    a, b, v = (x.requires_grad_() for x in tokens(B=1, H=2, N=150, D=4, Dv=3))
    _, memory = _segment(*(x.detach()[:, :, :20] for x in (a, b, v)), empty_summary(1, 2, 4, 3, a))
    memory = KeySummary(*(x.requires_grad_() for x in memory))
    output, after = _segment(a, b, v, memory)
    g = [torch.randn_like(x) for x in (output, *after)]
    expected = torch.autograd.grad((output, *after), (a, b, v, *memory), g)
    with torch.no_grad():
        *found, start = _segment_gradients(g[0], a, b, v, memory, KeySummary(*g[1:]))
    for x, y in zip((*found, *start), expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("kind", ["full", "causal", "blocks"])
def test_nothing_but_the_inputs_is_kept_for_the_backward_pass(tokens, kind):
    inputs = tokens(B=1, H=2, N=1000, D=8, dtype=torch.float32, grad=True)
    scale = torch.ones(1, 1, 1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention_of(kind)[0](*inputs, scale, scale)
    others = [x for x in kept if all(x.data_ptr() != y.data_ptr() for y in (*inputs, scale))]
    assert sum(x.nbytes for x in others) <= 0.05 * sum(x.nbytes for x in inputs)


def test_backward_under_autocast_stays_in_full_precision(tokens):
    inputs = [*tokens(N=40, dtype=torch.float32), torch.ones(1, 1, 1), torch.ones(1, 1, 1)]
    for kind in KINDS:
        attention, _ = attention_of(kind)
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = attention(*leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(output, leaves, torch.ones_like(output), retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
        for x, y in zip(found, expected, strict=True):
            assert y is None or torch.equal(x, y)
