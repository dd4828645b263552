"""The fused state: what the C code makes of the next tokens is what plain torch makes of them, in place or not."""

import ctypes
import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lln import LLNState
from lln.backends.cpu import binding, build, build_problem, layout

pytestmark = pytest.mark.skipif(build_problem() is not None, reason=f"no fused code: {build_problem()}")

SHAPES = {
    "square": {"B": 2, "H": 2, "N": 150, "D": 16},
    "grouped": {"B": 3, "H": 6, "Hk": 2, "N": 70, "D": 24, "Dv": 8},
    "wide": {"B": 1, "H": 3, "N": 66, "D": 64, "Dv": 72},
}
CUTS = {
    "whole": lambda N: (0, N),
    "steps": lambda N: range(N + 1),
    "mixed": lambda N: (0, 1, 2, 15, 16, N - 1, N),
}
MATCHINGS = ["linear", "variance", "entropy"]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch):
    """How often the C code was called for a state."""
    made = []
    advance = binding.advance
    monkeypatch.setattr(binding, "advance", lambda recurrence: made.append(1) or advance(recurrence))
    return made


def empty_for(q, k, v, **options):
    return LLNState.empty(
        q.shape[0], q.shape[1], q.shape[3], v.shape[3], key_heads=k.shape[1], dtype=q.dtype, **options
    )


def feed(state, inputs, cuts, mask=None, **options):
    outputs = []
    for start, end in itertools.pairwise(cuts):
        keep = None if mask is None else mask[:, start:end]
        piece = (x[:, :, start:end] for x in inputs)
        output, state = state.prefill(*piece, key_padding_mask=keep, **options)
        outputs.append(output)
    return torch.cat(outputs, 2), state


def copy_of(state):
    return {name: x.clone() for name, x in state.to_dict().items()}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("block_size", [None, 1, 7, 64, 100], ids=lambda size: f"block{size}")
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_split_is_the_plain_whole(tokens, calls, threads, shape, cuts, block_size, masked):
    exact = tokens(**SHAPES[shape])
    inputs = [x.float() for x in exact]
    B, _, N, _ = exact[0].shape
    mask = None
    if masked:
        mask = torch.rand(B, N) > 0.3
        mask[0, :9] = False
    matching = MATCHINGS[len(cuts) % 3]
    options = {"block_size": block_size, "matching": matching}
    places = CUTS[cuts](N)
    got, state = feed(empty_for(*inputs, **options), inputs, places, mask)
    assert len(calls) == len(list(itertools.pairwise(places)))
    expected, plain = feed(empty_for(*exact, **options), exact, (0, N), mask)
    real = torch.ones(B, N, dtype=torch.bool) if mask is None else mask
    got, expected = (x.transpose(1, 2)[real] for x in (got, expected))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    assert torch.equal(state.count, plain.count)
    for name in ("mass", "values", "query_sums", "key_sums"):
        torch.testing.assert_close(getattr(state, name).double(), getattr(plain, name), rtol=1e-5, atol=1e-5)
    if block_size is not None:
        filled = torch.arange(block_size) < state.count[:, None]
        for name in ("recent_key", "recent_value"):
            fused, wanted = (getattr(x, name).transpose(1, 2)[filled] for x in (state, plain))
            assert torch.equal(fused, wanted.float())


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("tokens_at_once", [1, 5, 80])
def test_in_place_or_not(tokens, threads, tokens_at_once, block_size):
    inputs = tokens(N=90, D=16, H=4, Hk=2, dtype=torch.float32)
    _, old = empty_for(*inputs, block_size=block_size).prefill(*(x[:, :, :10] for x in inputs))
    before, new = copy_of(old), [x[:, :, 10 : 10 + tokens_at_once] for x in inputs]
    expected, state = old.prefill(*new)
    assert state is not old
    for name, x in old.to_dict().items():
        assert torch.equal(x, before[name])
    addresses = {name: x.data_ptr() for name, x in old.to_dict().items() if x.dim() > 0}
    output, same = old.prefill(*new, in_place=True)
    assert torch.equal(output, expected)
    for name, address in addresses.items():
        assert getattr(same, name).data_ptr() == address
        assert torch.equal(getattr(same, name), getattr(state, name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("cuts", CUTS)
def test_half_precision(tokens, calls, dtype, block_size, cuts):
    inputs = tokens(N=70, D=16, H=4, Hk=2, dtype=dtype)
    exact = [x.double() for x in inputs]
    got, state = feed(empty_for(*inputs, block_size=block_size), inputs, CUTS[cuts](70))
    assert calls
    assert state.mass.dtype == torch.float32
    expected, _ = feed(empty_for(*exact, block_size=block_size), exact, (0, 70))
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("number", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_branches_apart(tokens, calls, number, dtype):
    inputs = tokens(N=40, D=16, H=4, Hk=2, dtype=dtype)
    exact = [x.double() for x in inputs]
    mask = torch.rand(2, 40) > 0.2
    mask[:, -1] = torch.tensor([True, False])
    first, last = slice(0, 40 - number), slice(40 - number, 40)
    found = []
    for values in (inputs, exact):
        state = empty_for(*values, block_size=7)
        if number < 40:
            _, state = state.prefill(*(x[:, :, first] for x in values), key_padding_mask=mask[:, first])
        found.append(state.branches(*(x[:, :, last] for x in values), key_padding_mask=mask[:, last]))
    assert calls
    (far, near, _), (plain_far, plain_near, _) = found
    assert far.dtype == near.dtype == torch.float32
    torch.testing.assert_close(near.double(), plain_near, rtol=1e-5, atol=2e-6)
    real = mask[:, last]
    for x, y in ((far, plain_far), (near, plain_near)):
        torch.testing.assert_close(x.double().transpose(1, 2)[real], y.transpose(1, 2)[real], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("given", ["alpha", "beta", "both"])
@pytest.mark.parametrize("cuts", CUTS)
def test_given_scales(tokens, calls, given, cuts):
    exact = tokens(N=70, D=16)
    inputs = [x.float() for x in exact]
    scales = {"alpha": 1.3, "beta": torch.rand(2, 4) + 0.5}
    options = scales if given == "both" else {given: scales[given]}
    got, _ = feed(empty_for(*inputs, block_size=16, **options), inputs, CUTS[cuts](70))
    assert calls
    expected, _ = feed(empty_for(*exact, block_size=16, **options), exact, (0, 70))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("cuts", CUTS)
def test_a_token_that_is_not_finite_shows_from_then_on(tokens, calls, cuts, which, bad):
    clean = tokens(N=70, D=16, dtype=torch.float32)
    inputs = [x.clone() for x in clean]
    inputs[which][0, :, 30, 3] = bad
    got, state = feed(empty_for(*inputs, block_size=16), inputs, CUTS[cuts](70))
    expected, _ = feed(empty_for(*clean, block_size=16), clean, CUTS[cuts](70))
    assert calls
    torch.testing.assert_close(got[:, :, :30], expected[:, :, :30], rtol=0, atol=2e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=2e-6)
    assert not got[0, :, 30:].isfinite().all(dim=-1).any()
    assert state.values[1].isfinite().all()


def test_what_is_left_to_plain_torch(tokens, calls):
    q, k, v = tokens(N=5, D=16, dtype=torch.float32)
    state = empty_for(q, k, v, block_size=4)
    output, _ = state.prefill(q.clone().requires_grad_(), k, v)
    assert output.requires_grad
    torch.func.vmap(lambda v: state.prefill(q, k, v)[0])(torch.stack((v, v)))
    make_fx(lambda q, k, v: state.prefill(q, k, v)[0])(q, k, v)
    wide = tokens(N=5, D=12, dtype=torch.float32)
    empty_for(*wide).prefill(*wide)
    double = tokens(N=5, D=16)
    empty_for(*double).prefill(*double)
    mixed = LLNState(*(x.double() for x in (state.mass, state.values)), state.count, state.query_sums, state.key_sums)
    with pytest.raises(TypeError, match=r"sums in torch\.float64"):
        mixed.prefill(q, k, v)
    assert not calls
    state.prefill(q, k, v)
    assert calls


def test_the_environment_leaves_only_one_backend(tokens, calls, monkeypatch):
    inputs = tokens(N=5, D=16, dtype=torch.float32)
    monkeypatch.setenv("LLN_BACKEND", "torch")
    empty_for(*inputs).prefill(*inputs)
    assert not calls


def test_autograd_notices_a_state_that_was_overwritten(tokens):
    q, k, v = tokens(N=5, D=16, dtype=torch.float32)
    _, state = empty_for(q, k, v).prefill(q, k, v)
    output, _ = state.step(*(x[:, :, :1].clone().requires_grad_() for x in (q, k, v)))
    state.step(*(x[:, :, :1] for x in (q, k, v)), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_state_of_tensors_that_do_not_belong_together_is_refused():
    tensors = LLNState.empty(2, 4, 16, block_size=8).to_dict()
    for name, shape in (("mass", (2, 4, 8)), ("count", (3,)), ("key_sums", (2, 2, 3)), ("recent_value", (2, 4, 4, 16))):
        with pytest.raises(ValueError, match=f"{name} of a state must be"):
            LLNState.from_dict(tensors | {name: torch.zeros(shape)})
    with pytest.raises(ValueError, match="recent keys and recent values"):
        LLNState.from_dict({name: x for name, x in tensors.items() if name != "recent_value"})


@pytest.mark.parametrize("change", [{"MAX_WIDTH": 128}, {"TILE": 64}], ids=["another value", "missing in C"])
def test_a_library_that_does_not_fit_is_refused(monkeypatch, change):
    library = build.build(build.choose_flavour())
    monkeypatch.setattr(layout, "CONSTANTS", layout.CONSTANTS | change)
    with pytest.raises(build.BuildError, match=r"do not fit together: \w+ is (256|None) in C"):
        build.open_library(library)


def test_structs_are_compared_field_by_field(monkeypatch):
    class State(layout.State):
        _fields_ = (("further", ctypes.c_int64),)

    monkeypatch.setattr(layout, "STRUCTS", (*layout.STRUCTS[:-2], State))
    with pytest.raises(build.BuildError, match=r"State is 56 in C and 64 in Python; .*State\.further is None in C"):
        build.open_library(build.build(build.choose_flavour()))


def test_an_unknown_matching_is_refused_in_the_binding():
    with pytest.raises(ValueError, match="matching must be one of"):
        binding.curve_of(16, "median")
