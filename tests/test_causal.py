"""Causal attention and its state: nothing later counts, and every split gives the same."""

import functools
import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

import lln
from lln import LLNState

FUNCTIONS = ["lln_attention", "block_diagonal_attention", "lln_diag_attention"]
MATCHINGS = ["linear", "variance", "entropy"]


def state_for(q, v, Hk, **options):
    return LLNState.empty(q.shape[0], q.shape[1], q.shape[3], v.shape[3], key_heads=Hk, dtype=q.dtype, **options)


def feed(state, inputs, cuts, mask=None):
    """The outputs of tokens that arrive in pieces, and the state after the last."""
    outputs = []
    for start, end in itertools.pairwise(cuts):
        piece = [x[:, :, start:end] for x in inputs]
        output, state = state.prefill(*piece, key_padding_mask=None if mask is None else mask[:, start:end])
        outputs.append(output)
    return torch.cat(outputs, 2), state


@pytest.mark.parametrize("t", [0, 1, 30, 63, 64, 99])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_gradient_reaches_later_tokens(tokens, name, t):
    inputs = tokens(N=100, D=8, dtype=torch.float32, grad=True)
    getattr(lln, name)(*inputs, is_causal=True)[:, :, t].square().sum().backward()
    for x in inputs:
        assert (x.grad[:, :, t + 1 :] == 0).all()
    assert (inputs[2].grad[:, :, t] != 0).any()


@pytest.mark.parametrize("growth", [1e3, 1e6, -1e3])
@pytest.mark.parametrize("t", [1, 31, 64, 90])
@pytest.mark.parametrize(
    ("name", "options"),
    [("block_diagonal_attention", {})]
    + [(name, {"matching": matching}) for name in ("lln_attention", "lln_diag_attention") for matching in MATCHINGS],
    ids=str,
)
def test_later_tokens_may_grow_without_being_felt(tokens, name, options, t, growth):
    attention = functools.partial(getattr(lln, name), is_causal=True, **options)
    inputs = tokens(N=100, D=8, dtype=torch.float32)
    grown = [torch.cat((x[:, :, :t], growth * x[:, :, t:]), 2) for x in inputs]
    torch.testing.assert_close(attention(*grown)[:, :, :t], attention(*inputs)[:, :, :t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [None, 1, 7, 16], ids=lambda b: f"block{b}")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("matching", MATCHINGS)
def test_every_split_is_the_whole(tokens, block_size, masked, matching):
    N = 41
    inputs = tokens(N=N, H=4, Hk=2, D=8, Dv=5)
    mask = torch.ones(2, N, dtype=torch.bool)
    if masked:
        mask = torch.rand(2, N) > 0.3
        mask[1, :9] = False  # a left-padded sample
    options = {"matching": matching, "key_padding_mask": mask, "is_causal": True}
    name = "lln_attention" if block_size is None else "lln_diag_attention"
    whole = getattr(lln, name)(*inputs, **options, **({} if block_size is None else {"block_size": block_size}))
    states = []
    for cuts in [(0, N), range(N + 1), (0, 1, N), (0, 13, 14, 40, N), (0, 16, 32, N), *((0, t, N) for t in (7, 8, 20))]:
        output, state = feed(state_for(*inputs[::2], 2, block_size=block_size, matching=matching), inputs, cuts, mask)
        torch.testing.assert_close(output, whole, rtol=1e-9, atol=1e-10)
        states.append(state)
    assert torch.equal(states[0].count, mask.sum(1))
    for state in states[1:]:
        for name, x in state.to_dict().items():
            if not name.startswith("recent"):  # places that no token has filled hold anything
                torch.testing.assert_close(x, states[0].to_dict()[name], rtol=1e-9, atol=1e-10)


def test_step_in_float32_stays_close_over_a_long_sequence(tokens):
    inputs = tokens(B=1, H=2, N=1500, D=16, dtype=torch.float32)
    whole = lln.lln_diag_attention(*inputs, is_causal=True, block_size=32)
    state = state_for(inputs[0], inputs[2], 2, block_size=32)
    output, _ = feed(state, inputs, (0, 1000, *range(1001, 1501)))
    torch.testing.assert_close(output, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_state_does_not_grow(tokens, dtype):
    q, k, v = tokens(N=200, D=8, dtype=dtype)
    empty = state_for(q, v, 4, block_size=16)
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
    _, state = feed(state_for(*inputs[::2], 4, block_size=block_size), inputs, (0, 20))
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
    empty = state_for(*inputs[::2], 4, block_size=block_size, alpha=alpha, beta=beta)
    _, whole = feed(empty, inputs, (0, 32), mask)
    _, first = feed(empty, inputs, (0, split), mask)
    _, second = feed(empty, inputs, (split, 32), mask)
    merged = first.merge(second)
    following = tokens(N=20, D=8, Dv=3)
    torch.testing.assert_close(merged.prefill(*following)[0], whole.prefill(*following)[0], rtol=1e-9, atol=1e-10)
    for x, y in ((empty.merge(whole), whole), (whole.merge(empty), whole)):
        torch.testing.assert_close(x.prefill(*following)[0], y.prefill(*following)[0], rtol=1e-9, atol=1e-10)


def test_merging_what_does_not_belong_together_is_refused(tokens):
    q, _, v = tokens(N=4, D=8)
    matched = state_for(q, v, 4)
    with pytest.raises(ValueError, match="alpha= and beta="):
        matched.merge(matched)
    one, two = (state_for(q, v, 4, alpha=1.0, beta=beta) for beta in (1.0, 2.0))
    with pytest.raises(ValueError, match="different beta"):
        one.merge(two)
    with pytest.raises(ValueError, match="different shape"):
        one.merge(state_for(q, v, 4, alpha=1.0, beta=1.0, block_size=4))


def test_state_as_a_dict_of_tensors(tokens):
    q, k, v = tokens(N=10, D=8)
    for options in ({}, {"block_size": 4, "matching": "entropy"}, {"alpha": 1.0, "beta": 2.0}):
        _, state = state_for(q, v, 4, **options).prefill(q, k, v)
        tensors = state.to_dict()
        assert all(isinstance(x, torch.Tensor) for x in tensors.values())
        again = LLNState.from_dict({name: x.clone() for name, x in tensors.items()})
        assert again.matching == state.matching
        assert torch.equal(again.prefill(q, k, v)[0], state.prefill(q, k, v)[0])
    with pytest.raises(ValueError, match=r"missing \['mass'\], unknown \['max'\]"):
        LLNState.from_dict({"max" if name == "mass" else name: x for name, x in tensors.items()})


def test_state_refuses_other_tokens(tokens):
    q, k, v = tokens(N=3, D=8, Hk=2)
    state = state_for(q, v, 2, block_size=4)
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
        state_for(q, v, 2, alpha=-1.0)


def test_scales_of_a_state_follow_its_samples(tokens):
    q, k, v = tokens(N=4, D=8)
    state = state_for(q, v, 4, alpha=torch.ones(1, 4), beta=torch.ones(1, 4))
    assert state.reorder(torch.tensor([1, 0, 1])).alpha.shape == (3, 4)
    with pytest.raises(ValueError, match="same for all tokens"):
        state_for(q, v, 4, alpha=torch.ones(2, 4, 1))
    _, state = state_for(q, v, 4, block_size=4).prefill(
        q, k.masked_fill(torch.ones(4, 1) > 0, torch.nan), v, key_padding_mask=torch.tensor([0, 0])
    )
    assert state.recent_key.isfinite().all()


def test_autocast_leaves_a_state_alone(tokens):
    q, k, v = tokens(N=9, D=8, dtype=torch.float32)
    expected, _ = state_for(q, v, 4, block_size=4).prefill(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = state_for(q, v, 4, block_size=4).prefill(q, k, v)
        alpha, _ = lln.match_moments(q * 1e3, k * 1e3)
    assert torch.equal(got, expected)
    assert torch.equal(alpha, lln.match_moments(q * 1e3, k * 1e3)[0])


def test_gradients_flow_through_a_state(tokens):
    inputs = tokens(B=1, H=2, N=6, D=3, Dv=2, grad=True)

    def run(*inputs):
        return feed(state_for(*inputs[::2], 2, block_size=4, alpha=1.2, beta=0.8), inputs, (0, 2, 3, 6))[0]

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fused", "plain"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("name", ["lln_attention", "lln_diag_attention", "block_diagonal_attention"])
def test_what_is_not_finite_reaches_no_earlier_token(tokens, name, which, bad, dtype):
    attention = functools.partial(getattr(lln, name), is_causal=True)
    clean = tokens(N=150, dtype=dtype)
    inputs = [x.clone() for x in clean]
    inputs[which][0, :, 90] = bad
    output = attention(*inputs)
    torch.testing.assert_close(output[:, :, :90], attention(*clean)[:, :, :90], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output[1], attention(*clean)[1], rtol=0, atol=0)
    assert not output[0, :, 90].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_every_split_is_the_whole_where_a_token_is_not_finite(tokens, which, step, dtype):
    inputs = tokens(N=150, dtype=dtype)
    inputs[which][0, :, 90] = torch.nan
    state = lln.LLNState.empty(2, 4, 16, block_size=64, dtype=dtype)
    outputs = []
    for start in range(0, 150, step):
        output, state = state.prefill(*(x[:, :, start : start + step] for x in inputs))
        outputs.append(output)
    whole = lln.lln_diag_attention(*inputs, is_causal=True)
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=1e-4, atol=1e-5, equal_nan=True)


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
