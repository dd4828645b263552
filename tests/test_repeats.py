"""Calls like an earlier one give what a call that is validated gives, and what is not like it is validated."""

import pytest
import torch

import lln
from lln import LLNState, lln_attention, lln_diag_attention
from lln.backends import CALLS
from lln.backends.cpu import build_problem

pytestmark = pytest.mark.skipif(build_problem() is not None, reason="no C compiler")


@pytest.fixture(autouse=True)
def no_calls_yet(monkeypatch):
    monkeypatch.setattr(CALLS, "_prepared", {})


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(N=70, seed=0, Hk=2, dtype=torch.float32):
    heads = (4, Hk, Hk)
    return [draw(2, h, N, 16, seed=3 * seed + i, dtype=dtype) for i, h in enumerate(heads)]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "unbiased": {"form": "unbiased", "matching": "entropy"},
    "decomposed": {"form": "decomposed"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("attention", [lln_attention, lln_diag_attention], ids=["lln", "lln_diag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_repeated_call_has_its_own_tensors(attention, options, dtype):
    first, second = tokens(seed=1, dtype=dtype), tokens(seed=2, dtype=dtype)
    expected = [attention(*x, **options, key_padding_mask=torch.ones(2, 70, dtype=torch.bool)) for x in (first, second)]
    assert not CALLS._prepared  # a mask is a tensor: validated each time
    found = [attention(*x, **options) for x in (first, second, first)]
    assert len(CALLS._prepared) == 1
    torch.testing.assert_close(found[:2], expected)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_other_strides_are_another_call():
    inputs = tokens(Hk=4)
    expected = lln_attention(*inputs)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    for _ in range(2):
        output = lln_attention(*apart)
        assert torch.equal(output, expected)
        assert output.transpose(1, 2).is_contiguous()


def test_frozen_centers_are_read_where_they_are():
    inputs = tokens()
    centers = draw(4, 16, seed=7), draw(2, 16, seed=8)
    options = {"form": "decomposed", "is_causal": True}
    first = lln_attention(*inputs, centers=centers, **options)
    others = tuple(x + 1 for x in centers)
    second = lln_attention(*inputs, centers=others, **options)
    for x in centers:
        x.add_(1)
    assert torch.equal(lln_attention(*inputs, centers=centers, **options), second)
    assert not torch.equal(first, second)
    transposed = draw(16, 4, seed=9).mT, draw(16, 2, seed=9).mT
    before = lln_attention(*inputs, centers=transposed, **options)
    transposed[0].mul_(3)
    assert not torch.equal(lln_attention(*inputs, centers=transposed, **options), before)


def test_what_equals_a_valid_option_is_refused():
    inputs = tokens()
    lln_diag_attention(*inputs, block_size=1)
    for wrong in (True, 1.0):
        with pytest.raises(TypeError, match="block_size must be an int"):
            lln_diag_attention(*inputs, block_size=wrong)


def test_gradients_autocast_and_other_backends_are_noticed(monkeypatch):
    inputs = tokens()
    plain = lln_attention(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lln_attention(*inputs).dtype is torch.bfloat16
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert lln_attention(*leaves).requires_grad
    batched = torch.func.vmap(lambda x: lln_attention(x, *inputs[1:]))(torch.stack([inputs[0], 2 * inputs[0]]))
    torch.testing.assert_close(batched[0], plain)
    assert not torch.allclose(batched[1], plain)
    monkeypatch.setenv("LLN_BACKEND", "torch")
    other = lln_attention(*inputs)
    assert not torch.equal(other, plain)
    torch.testing.assert_close(other, plain)


def test_the_number_of_prepared_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(CALLS, "_size", 3)
    for n in range(1, 9):
        lln_attention(*tokens(N=n))
        assert len(CALLS._prepared) <= 3


@pytest.mark.parametrize("form", ["paper", "unbiased", "decomposed"])
@pytest.mark.parametrize("block_size", [None, 8])
def test_repeated_steps_are_those_of_one_sequence(form, block_size):
    inputs = tokens(N=30)
    centers = (draw(4, 16, seed=5), draw(2, 16, seed=6)) if form == "decomposed" else None
    options = {"form": form, "centers": centers}
    more = {} if block_size is None else {"block_size": block_size}
    whole = (lln_attention if block_size is None else lln_diag_attention)(*inputs, is_causal=True, **options, **more)
    state = LLNState.empty(2, 4, 16, key_heads=2, block_size=block_size, **options)
    before = state
    outputs = []
    for t in range(30):
        output, state = state.step(*(x[:, :, t : t + 1].contiguous() for x in inputs), in_place=True)
        outputs.append(output)
    assert state is before
    assert len(state._steps._prepared) == 1
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=1e-4, atol=1e-5)


def test_a_repeated_step_marks_the_state_as_changed():
    state = LLNState.empty(2, 4, 16, key_heads=2)
    inputs = tokens(N=1)
    for _ in range(3):
        before = state.values._version
        state.step(*inputs, in_place=True)
        assert state.values._version > before
    with pytest.raises(ValueError, match="the state is for"):
        state.step(*tokens(N=1)[:2], draw(2, 2, 1, 8), in_place=True)
    assert lln.LLNState.from_dict(state.to_dict())._steps is not state._steps


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("attention", [lln_attention, lln_diag_attention], ids=["lln", "lln_diag"])
def test_repeated_calls_with_gradients(attention, options):
    mask = torch.ones(2, 70, dtype=torch.bool)
    for seed, width in ((1, 16), (2, 16), (3, 32)):  # the last gradient has other strides
        leaves = [x.requires_grad_() for x in tokens(seed=seed)]
        gradient = draw(2, 4, 70, width, seed=seed)[..., :16]
        found = torch.autograd.grad(attention(*leaves, **options), leaves, gradient)
        assert len(CALLS._prepared) == 1
        expected = torch.autograd.grad(attention(*leaves, **options, key_padding_mask=mask), leaves, gradient)
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        attention(*leaves, **options)
    assert len(CALLS._prepared) == 2


def test_a_compiled_call_does_not_read_the_prepared_calls(monkeypatch):
    """torch.compile would wrap every signature, which takes seconds after some hundred calls."""
    torch._dynamo.reset()
    monkeypatch.setattr(CALLS, "_prepared", None)
    compiled = torch.compile(lln_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*tokens()), lln.reference.lln_attention(*tokens()), rtol=1e-4, atol=1e-5)


def test_gradients_of_many_layouts_fill_no_memory():
    from lln.backends.cpu import prepared

    inputs = [x.requires_grad_() for x in tokens()]
    made = []
    with pytest.MonkeyPatch.context() as patch:
        pack = prepared.Call._pack
        patch.setattr(prepared.Call, "_pack", lambda call, *x: (made.append(call), pack(call, *x))[1])
        for extra in range(3 * prepared.MAX_LAYOUTS):
            gradient = draw(2, 4, 70, 16 + extra)[..., :16]
            expected = torch.autograd.grad(lln_attention(*inputs), inputs, gradient.contiguous())
            for x, y in zip(torch.autograd.grad(lln_attention(*inputs), inputs, gradient), expected, strict=True):
                assert torch.equal(x, y)
    assert len(made) >= 3 * prepared.MAX_LAYOUTS
    assert all(len(call._jobs) <= prepared.MAX_LAYOUTS for call in made)
