"""A state as a value: its size, its memory, saved, reordered, merged, and what it refuses."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import lln
from helpers import FORMS, empty_for, feed, state_options
from lln import LLNState


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_state_does_not_grow(tokens, backend, dtype):
    q, k, v = tokens(N=200, D=8, dtype=dtype)
    empty = empty_for(q, k, v, block_size=16)
    output, state = empty.prefill(q, k, v)
    assert output.dtype == dtype
    assert state.nbytes == empty.nbytes
    assert state.mass.dtype == torch.float32
    assert state.recent_key.shape[2] == 16
    output, later = state.step(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    assert output.shape == (2, 4, 1, 8)
    assert later.nbytes == empty.nbytes
    assert torch.equal(state.count, torch.tensor([200, 200]))  # a state is a value: stepping on leaves it alone


@pytest.mark.parametrize("block_size", [None, 8])
def test_reorder_follows_beams(tokens, block_size):
    inputs = tokens(B=3, N=21, D=8)
    index = torch.tensor([2, 0, 0, 1])
    _, state = feed(empty_for(*inputs, block_size=block_size), inputs, (0, 20))
    reordered = state.reorder(index)
    last = [x[:, :, 20:] for x in inputs]
    expected, _ = state.step(*last)
    got, _ = reordered.step(*(x[index] for x in last))
    torch.testing.assert_close(got, expected[index])


@pytest.mark.parametrize("block_size", [None, 1, 8, 16])
@pytest.mark.parametrize("split", [1, 5, 8, 17, 31])
def test_merged_shards_are_one_sequence(tokens, block_size, split):
    inputs = tokens(N=32, D=8, Dv=3)
    alpha, beta = lln.match_moments(*inputs[:2])
    mask = torch.rand(2, 32) > 0.2
    empty = empty_for(*inputs, block_size=block_size, alpha=alpha, beta=beta)
    _, whole = feed(empty, inputs, (0, 32), mask)
    _, first = feed(empty, inputs, (0, split), mask)
    _, second = feed(empty, inputs, (split, 32), mask)
    merged = first.merge(second)
    following = tokens(N=20, D=8, Dv=3)
    torch.testing.assert_close(merged.prefill(*following)[0], whole.prefill(*following)[0], rtol=1e-9, atol=1e-10)
    for x, y in ((empty.merge(whole), whole), (whole.merge(empty), whole)):
        torch.testing.assert_close(x.prefill(*following)[0], y.prefill(*following)[0], rtol=1e-9, atol=1e-10)


def test_merging_what_does_not_belong_together_is_refused(tokens):
    q, k, v = tokens(N=4, D=8)
    matched = empty_for(q, k, v)
    with pytest.raises(ValueError, match="alpha= and beta="):
        matched.merge(matched)
    one, two = (empty_for(q, k, v, alpha=1.0, beta=beta) for beta in (1.0, 2.0))
    with pytest.raises(ValueError, match="different beta"):
        one.merge(two)
    with pytest.raises(ValueError, match="different shape"):
        one.merge(empty_for(q, k, v, alpha=1.0, beta=1.0, block_size=4))


def test_state_as_a_dict_of_tensors(tokens):
    q, k, v = tokens(N=10, D=8)
    for options in ({}, {"block_size": 4, "matching": "entropy"}, {"alpha": 1.0, "beta": 2.0}):
        _, state = empty_for(q, k, v, **options).prefill(q, k, v)
        tensors = state.to_dict()
        assert all(isinstance(x, torch.Tensor) for x in tensors.values())
        again = LLNState.from_dict({name: x.clone() for name, x in tensors.items()})
        assert again.matching == state.matching
        assert torch.equal(again.prefill(q, k, v)[0], state.prefill(q, k, v)[0])
    with pytest.raises(ValueError, match=r"missing \['mass'\], unknown \['max'\]"):
        LLNState.from_dict({"max" if name == "mass" else name: x for name, x in tensors.items()})


def test_state_refuses_other_tokens(tokens):
    q, k, v = tokens(N=3, D=8, Hk=2)
    state = empty_for(q, k, v, block_size=4)
    with pytest.raises(ValueError, match=r"the state is for .*\(2, 4, 8, 8\), got \(1, 4, 8, 8\)"):
        state.prefill(q[:1], k[:1], v[:1])
    with pytest.raises(ValueError, match="2 key heads, got 4"):
        state.prefill(q, q, q)
    with pytest.raises(TypeError, match=r"for torch\.float64 tokens, got torch\.float32"):
        state.prefill(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="step takes one token"):
        state.step(q, k, v)
    with pytest.raises(ValueError, match="at least one token"):
        state.prefill(q[:, :, :0], k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match="alpha must be positive"):
        empty_for(q, k, v, alpha=-1.0)


def test_scales_of_a_state_follow_its_samples(tokens):
    q, k, v = tokens(N=4, D=8)
    state = empty_for(q, k, v, alpha=torch.ones(1, 4), beta=torch.ones(1, 4))
    assert state.reorder(torch.tensor([1, 0, 1])).alpha.shape == (3, 4)
    with pytest.raises(ValueError, match="same for all tokens"):
        empty_for(q, k, v, alpha=torch.ones(2, 4, 1))
    _, state = empty_for(q, k, v, block_size=4).prefill(
        q, k.masked_fill(torch.ones(4, 1) > 0, torch.nan), v, key_padding_mask=torch.tensor([0, 0])
    )
    assert state.recent_key.isfinite().all()


@pytest.mark.parametrize("block_size", [None, 16])
def test_a_state_owns_its_memory_and_can_be_saved(tokens, block_size, tmp_path):
    scales = {"alpha": 1.5, "beta": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    for given in ({}, scales):
        state = lln.LLNState.empty(2, 4, 16, block_size=block_size, **given)
        states = [state]
        for _ in range(2):
            states.append(states[-1].prefill(*tokens(N=300, dtype=torch.float32))[1])
        states.append(states[-1].step(*tokens(N=1, dtype=torch.float32))[1])
        states.append(states[-1].reorder(torch.tensor([1, 1, 0])))
        for state in states:
            tensors = state.to_dict()
            assert sum(x.untyped_storage().nbytes() for x in tensors.values()) == state.nbytes
            save_file(tensors, tmp_path / "state.safetensors")
            loaded = lln.LLNState.from_dict(load_file(tmp_path / "state.safetensors"))
            assert all(torch.equal(x, tensors[name]) for name, x in loaded.to_dict().items())


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("near", ["blocks", "window7"])
def test_saving_reordering_and_merging(tokens, backend, form, near):
    inputs = tokens(N=40, D=16, H=4, Hk=2, dtype=torch.float32)
    options = state_options(form, near) | {"alpha": 1.1, "beta": 0.9}
    expected, whole = feed(empty_for(*inputs, **options), inputs, (0, 40))
    first, second = ([x[:, :, part] for x in inputs] for part in (slice(0, 17), slice(17, 40)))
    _, state = empty_for(*inputs, **options).prefill(*first)
    again = LLNState.from_dict({name: x.clone() for name, x in state.to_dict().items()})
    assert (again.near, again.form, again.nbytes) == (options.get("near", "blocks"), form, state.nbytes)
    torch.testing.assert_close(again.prefill(*second)[0], expected[:, :, 17:])
    swapped, _ = state.reorder(torch.tensor([1, 0])).prefill(*(x[[1, 0]] for x in second))
    torch.testing.assert_close(swapped[[1, 0]], expected[:, :, 17:])
    merged = state.merge(empty_for(*inputs, **options).prefill(*second)[1])
    for name, x in whole.to_dict().items():
        torch.testing.assert_close(merged.to_dict()[name], x, rtol=1e-4, atol=1e-5, msg=name)
    other = {"near": "blocks" if near == "window7" else "window"}
    with pytest.raises(ValueError, match="different near cannot be merged"):
        state.merge(empty_for(*inputs, **(options | other)))


def test_a_dict_without_the_new_words_is_of_the_papers_form():
    state = LLNState.empty(1, 2, 8, block_size=4)
    old = {name: x for name, x in state.to_dict().items() if name not in ("near", "form")}
    assert (LLNState.from_dict(old).near, LLNState.from_dict(old).form) == ("blocks", "paper")


def test_what_a_state_refuses(tokens):
    q, k, v = tokens(N=3, D=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="give centers="):
        LLNState.empty(2, 4, 16, form="decomposed")
    with pytest.raises(ValueError, match='centers belong to form="decomposed"'):
        LLNState.empty(2, 4, 16, centers=(torch.zeros(4, 16), torch.zeros(4, 16)))
    with pytest.raises(ValueError, match="m_q of centers must have shape"):
        LLNState.empty(2, 4, 16, form="decomposed", centers=(torch.zeros(4, 8), torch.zeros(4, 16)))
    with pytest.raises(ValueError, match="near must be one of"):
        LLNState.empty(2, 4, 16, near="sliding")
    with pytest.raises(ValueError, match="give block_size= too"):
        LLNState.empty(2, 4, 16, near_dim=8)
    with pytest.raises(ValueError, match="leave near_query and near_key out"):
        LLNState.empty(2, 4, 16).prefill(q, k, v, near_query=q, near_key=k)
    state = LLNState.empty(2, 4, 16, near_dim=8, block_size=4)
    with pytest.raises(ValueError, match="for 8 features, got 16"):
        state.prefill(q, k, v)
    with pytest.raises(ValueError, match="belong together"):
        state.prefill(q, k, v, near_query=q[..., :8])
    with pytest.raises(ValueError, match="same tokens and heads"):
        state.prefill(q, k, v[:, :, :2], near_query=q[:, :, :2, :8], near_key=k[:, :, :2, :8])
    with pytest.raises(ValueError, match="key_weight must have shape"):
        LLNState.empty(2, 4, 16).prefill(q, k, v, key_weight=torch.zeros(2, 4, 2))
    with pytest.raises(TypeError, match="key_weight must be a floating point"):
        LLNState.empty(2, 4, 16).prefill(q, k, v, key_weight=torch.zeros(2, 4, 3, dtype=torch.int64))
    tensors = LLNState.empty(2, 4, 16, **state_options("decomposed", "far", H=4, Hk=4)).to_dict()
    with pytest.raises(ValueError, match="two centres"):
        LLNState.from_dict({name: x for name, x in tensors.items() if name != "center_k"})


def test_states_of_modules(tokens, backend):
    inputs = tokens(N=40, D=16, H=4, Hk=2, dtype=torch.float32)
    shape = {"key_heads": 2, "value_dim": 16, "dtype": torch.float32, "device": torch.device("cpu")}
    for form in FORMS:
        for near in ("blocks", "window"):
            module = lln.LLNDiagAttention(
                4, 16, block_size=7, near=near, form=form, statistics="running", num_key_heads=2
            )
            module(*inputs, is_causal=True)
            module.eval()
            got, _ = module.init_state(2, **shape).prefill(*inputs)
            torch.testing.assert_close(got, module(*inputs, is_causal=True), rtol=0, atol=4e-6)
    assert lln.LLNAttention(4, 16, form="decomposed").init_state(2, **shape) is None
    assert lln.LLNAttention(4, 16, form="unbiased").init_state(2, **shape).form == "unbiased"
