"""States on every backend: every split of the tokens gives what causal attention gives, in every form and precision."""

import itertools

import pytest
import torch

import lln
from helpers import (
    FORMS,
    MATCHINGS,
    NEARS,
    assert_as_exact,
    empty_for,
    feed,
    half_dtypes,
    state_options,
    threads,
    widest,
)
from lln import LLNState

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
# Against float64.
CLOSE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
all_cuts = pytest.mark.parametrize("cuts", CUTS)


def exactly(inputs, cuts=None, mask=None, **options):
    """Outputs and state of plain torch in float64."""
    with lln.backends.use("torch"):
        exact = [x.double() for x in inputs]
        return feed(empty_for(*exact, **options), exact, cuts or (0, inputs[0].shape[2]), mask)


def attention(q, k, v, **options):
    function = lln.lln_diag_attention if "block_size" in options else lln.lln_attention
    return function(q, k, v, is_causal=True, **options)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize(
    ("block_size", "count"),
    [(None, 1), (1, 1), (7, 1), (64, 1), (100, 1), (None, 2), (7, 2)],
    ids=lambda number: f"{number}",
)
@all_cuts
@pytest.mark.parametrize("shape", SHAPES)
def test_every_split_is_the_plain_whole(tokens, backend, shape, cuts, block_size, count, masked):
    if backend == "torch" and (count == 2 or shape != "grouped"):
        pytest.skip("one thread and one shape are enough for plain torch")
    inputs = tokens(**SHAPES[shape], dtype=torch.float32)
    B, _, N, _ = inputs[0].shape
    mask = None
    if masked:
        mask = torch.rand(B, N) > 0.3
        mask[0, :9] = False
    options = {"block_size": block_size, "matching": MATCHINGS[len(cuts) % 3]}
    with threads(count):
        got, state = feed(empty_for(*inputs, **options), inputs, CUTS[cuts](N), mask)
    expected, plain = exactly(inputs, None, mask, **options)
    real = torch.ones(B, N, dtype=torch.bool) if mask is None else mask
    got, expected = (x.transpose(1, 2)[real] for x in (got, expected))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    assert torch.equal(state.count, plain.count)
    for name in ("mass", "values", "query_sums", "key_sums"):
        torch.testing.assert_close(getattr(state, name).double(), getattr(plain, name), rtol=1e-5, atol=1e-5)
    if block_size is not None:
        filled = torch.arange(block_size) < state.count[:, None]
        for name in ("recent_key", "recent_value"):
            found, wanted = (getattr(x, name).transpose(1, 2)[filled] for x in (state, plain))
            assert torch.equal(found, wanted.float())


@pytest.mark.parametrize("block_size", [None, 1, 16], ids=lambda b: f"block{b}")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("matching", MATCHINGS)
def test_every_split_is_the_whole(tokens, backend, wide, block_size, masked, matching):
    N = 41
    inputs = tokens(N=N, H=4, Hk=2, D=8, Dv=24, dtype=wide)
    mask = torch.ones(2, N, dtype=torch.bool)
    if masked:
        mask = torch.rand(2, N) > 0.3
        mask[1, :9] = False  # a left-padded sample
    options = {"matching": matching, "key_padding_mask": mask, "is_causal": True}
    name = "lln_attention" if block_size is None else "lln_diag_attention"
    whole = getattr(lln, name)(*inputs, **options, **({} if block_size is None else {"block_size": block_size}))
    states = []
    for cuts in [(0, N), range(N + 1), (0, 1, N), (0, 13, 14, 40, N), (0, 16, 32, N), *((0, t, N) for t in (7, 8, 20))]:
        output, state = feed(empty_for(*inputs, block_size=block_size, matching=matching), inputs, cuts, mask)
        assert_as_exact(output, whole)
        states.append(state)
    assert torch.equal(states[0].count, mask.sum(1))
    for state in states[1:]:
        for name, x in state.to_dict().items():
            if name.startswith("recent"):  # places that no token has filled hold anything
                continue
            if x.is_floating_point():
                assert_as_exact(x, states[0].to_dict()[name], limit=1e-5)
            else:
                assert torch.equal(x, states[0].to_dict()[name])


@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("form", FORMS)
def test_every_split_is_causal_attention(tokens, backend, form, near, dtype, masked):
    if dtype != widest(backend) and near not in ("far", "blocks", "window7"):
        pytest.skip("windows of other sizes in the widest dtype alone")
    inputs = [x.to(dtype) for x in tokens(N=90, D=16, Dv=24, H=4, Hk=2)]
    options = state_options(form, near)
    mask = None
    if masked:
        mask = torch.rand(2, 90, generator=torch.Generator().manual_seed(3)) > 0.3
        mask[0, :9], mask[1, -1] = False, False
        for x in inputs:
            x.transpose(1, 2)[~mask] = torch.nan
    real = torch.ones(2, 90, dtype=torch.bool) if mask is None else mask
    with lln.backends.use("torch"):
        expected = attention(*(x.double() for x in inputs), key_padding_mask=mask, **options).transpose(1, 2)[real]
    for name, places in CUTS.items():
        if name == "steps" and (dtype != widest(backend) or near in ("window64", "window200")):
            continue
        got, state = feed(empty_for(*inputs, **options), inputs, places(90), mask, in_place=True)
        got = got.transpose(1, 2)[real]
        torch.testing.assert_close(got.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype], msg=name)
        assert torch.equal(state.count, real.sum(1))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("tokens_at_once", [1, 5, 80])
def test_in_place_or_not(tokens, backend, count, tokens_at_once, block_size):
    inputs = tokens(N=90, D=16, H=4, Hk=2, dtype=torch.float32)
    _, old = empty_for(*inputs, block_size=block_size).prefill(*(x[:, :, :10] for x in inputs))
    before = {name: x.clone() for name, x in old.to_dict().items()}
    new = [x[:, :, 10 : 10 + tokens_at_once] for x in inputs]
    with threads(count):
        expected, state = old.prefill(*new)
    assert state is not old
    for name, x in old.to_dict().items():
        assert torch.equal(x, before[name])
    addresses = {name: x.data_ptr() for name, x in old.to_dict().items() if x.dim() > 0}
    with threads(count):
        output, same = old.prefill(*new, in_place=True)
    assert torch.equal(output, expected)
    for name, address in addresses.items():
        if backend == "cpu":  # in_place lets a backend take the memory; plain torch has no use for it
            assert getattr(same, name).data_ptr() == address
        assert torch.equal(getattr(same, name), getattr(state, name))


@half_dtypes
@pytest.mark.parametrize("block_size", [None, 16])
@all_cuts
def test_half_precision(tokens, backend, dtype, block_size, cuts):
    inputs = tokens(N=70, D=16, H=4, Hk=2, dtype=dtype)
    got, state = feed(empty_for(*inputs, block_size=block_size), inputs, CUTS[cuts](70))
    assert state.mass.dtype == torch.float32
    expected, _ = exactly(inputs, block_size=block_size)
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("number", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_branches_apart(tokens, backend, number, dtype):
    inputs = tokens(N=40, D=16, H=4, Hk=2, dtype=dtype)
    exact = [x.double() for x in inputs]
    mask = torch.rand(2, 40) > 0.2
    mask[:, -1] = torch.tensor([True, False])
    first, last = slice(0, 40 - number), slice(40 - number, 40)
    found = []
    for values, name in ((inputs, backend), (exact, "torch")):
        with lln.backends.use(name):
            state = empty_for(*values, block_size=7)
            if number < 40:
                _, state = state.prefill(*(x[:, :, first] for x in values), key_padding_mask=mask[:, first])
            found.append(state.branches(*(x[:, :, last] for x in values), key_padding_mask=mask[:, last]))
    (far, near, lse, _), (plain_far, plain_near, plain_lse, _) = found
    assert far.dtype == near.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(near.double(), plain_near, rtol=1e-5, atol=2e-6)
    real = mask[:, last]
    for x, y in ((far, plain_far), (near, plain_near), (lse, plain_lse)):
        torch.testing.assert_close(x.double().transpose(1, 2)[real], y.transpose(1, 2)[real], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("given", ["alpha", "beta", "both"])
@all_cuts
def test_given_scales(tokens, backend, given, cuts):
    inputs = tokens(N=70, D=16, dtype=torch.float32)
    scales = {"alpha": 1.3, "beta": torch.rand(2, 4) + 0.5}
    options = scales if given == "both" else {given: scales[given]}
    got, _ = feed(empty_for(*inputs, block_size=16, **options), inputs, CUTS[cuts](70))
    expected, _ = exactly(inputs, block_size=16, **options)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@all_cuts
def test_a_token_that_is_not_finite_shows_from_then_on(tokens, backend, cuts, which, bad):
    clean = tokens(N=70, D=16, dtype=torch.float32)
    inputs = [x.clone() for x in clean]
    inputs[which][0, :, 30, 3] = bad
    got, state = feed(empty_for(*inputs, block_size=16), inputs, CUTS[cuts](70))
    expected, _ = feed(empty_for(*clean, block_size=16), clean, CUTS[cuts](70))
    torch.testing.assert_close(got[:, :, :30], expected[:, :, :30], rtol=0, atol=2e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=2e-6)
    assert not got[0, :, 30:].isfinite().all(dim=-1).any()
    assert state.values[1].isfinite().all()


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_every_split_is_the_whole_where_a_token_is_not_finite(tokens, backend, wide, which, step):
    inputs = tokens(N=150, dtype=wide)
    inputs[which][0, :, 90] = torch.nan
    output, _ = feed(empty_for(*inputs, block_size=64), inputs, (*range(0, 150, step), 150))
    whole = lln.lln_diag_attention(*inputs, is_causal=True)
    torch.testing.assert_close(output, whole, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("matching", MATCHINGS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0])  # variances below, in and above the tabulated ones
def test_matching_of_the_unbiased_form(tokens, backend, matching, scale):
    inputs = [(x * y).float() for x, y in zip(tokens(N=40, D=24, H=2), (scale, scale, 1.0), strict=True)]
    got, _ = feed(empty_for(*inputs, form="unbiased", matching=matching), inputs, (0, 30, 31, 40))
    with lln.backends.use("torch"):
        expected = attention(*(x.double() for x in inputs), form="unbiased", matching=matching)
    # The C code reads the curves in float64, plain torch in the float32 of the moments.
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-5 if backend == "torch" else 2e-5)


@pytest.mark.parametrize("form", ["paper", "unbiased"])
@pytest.mark.parametrize("near", ["blocks", "window7"])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float64, 8), (torch.float32, 8), (torch.float32, 40), (torch.bfloat16, 40)],
    ids=str,
)
def test_inputs_of_its_own_for_each_branch(tokens, backend, form, near, dtype, width):
    """LLN attention has other features than softmax attention, of another width and in the accumulator's dtype."""
    near_query, near_key, value = (x.to(dtype) for x in tokens(N=90, D=16, Dv=24, H=4, Hk=2))
    far_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    query, key = (x.to(far_dtype) for x in tokens(N=90, D=width, H=4, Hk=2)[:2])
    weight = torch.randn(2, 4, 90, dtype=torch.float64) * 3
    options = state_options(form, near)
    state = LLNState.empty(2, 4, width, 24, key_heads=2, near_dim=16, dtype=dtype, alpha=0.8, beta=0.7, **options)
    more = {"near_query": near_query, "near_key": near_key, "key_weight": weight}
    exact = [x.double() for x in (query, key, value, near_query, near_key)]
    b = exact[1].repeat_interleave(2, 1) * 0.7 + weight[..., None]
    if form == "unbiased":
        b = b - torch.logsumexp(exact[1].repeat_interleave(2, 1) * 0.7, -1, keepdim=True)
    scores = torch.logsumexp(exact[0][:, :, :, None] * 0.8 + b[:, :, None], -1)
    scores = scores.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf)
    far = scores.softmax(-1) @ exact[2].repeat_interleave(2, 1)
    neighbours = {name: x for name, x in options.items() if name in ("block_size", "near")}
    with lln.backends.use("torch"):
        softmax = lln.block_diagonal_attention(*exact[3:], exact[2], is_causal=True, **neighbours)
    for places in CUTS.values():
        got, _ = feed(state._map(torch.clone), (query, key, value), places(90), in_place=True, **more)
        torch.testing.assert_close(got.double(), (far + softmax) / 2, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    apart = state.branches(query, key, value, **more)
    for x, y in zip(apart[:2], (far, softmax), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=CLOSE[dtype])


def test_a_window_drops_what_is_not_finite(tokens, backend):
    inputs = tokens(N=30, D=16, dtype=torch.float32)
    inputs[2][:, :, 5, 0] = torch.inf
    for cuts in ((0, 30), range(31), (0, 9, 30)):
        state = empty_for(*inputs, block_size=4, near="window")
        near = []
        for start, end in itertools.pairwise(cuts):
            _, part, _, state = state.branches(*(x[:, :, start:end] for x in inputs))
            near.append(part)
        bad = ~torch.cat(near, 2).isfinite().all(-1)[0, 0]
        assert bad.nonzero()[:, 0].tolist() == [5, 6, 7, 8]


def test_step_in_float32_stays_close_over_a_long_sequence(tokens, backend):
    inputs = tokens(B=1, H=2, N=1500, D=16, dtype=torch.float32)
    whole = lln.lln_diag_attention(*inputs, is_causal=True, block_size=32)
    state = empty_for(*inputs, block_size=32)
    output, _ = feed(state, inputs, (0, 1000, *range(1001, 1501)))
    torch.testing.assert_close(output, whole, rtol=1e-4, atol=1e-5)


def test_gradients_flow_through_a_state(tokens):
    inputs = tokens(B=1, H=2, N=6, D=2, Dv=2, grad=True)

    def run(*inputs):
        return feed(empty_for(*inputs, block_size=4, alpha=1.2, beta=0.8), inputs, (0, 2, 3, 6))[0]

    assert torch.autograd.gradcheck(run, inputs)


def test_gradients_through_a_window_and_a_form(tokens):
    inputs = [x.requires_grad_() for x in tokens(N=12, D=8, H=2)]
    options = state_options("decomposed", "window7", H=2, Hk=2, D=8)
    expected = torch.autograd.grad(attention(*inputs, **options).square().sum(), inputs)
    output, _ = feed(empty_for(*inputs, **options), inputs, (0, 5, 6, 12))
    got = torch.autograd.grad(output.square().sum(), inputs)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_autocast_leaves_a_state_alone(tokens, backend):
    q, k, v = tokens(N=9, D=8, dtype=torch.float32)
    expected, _ = empty_for(q, k, v, block_size=4).prefill(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = empty_for(q, k, v, block_size=4).prefill(q, k, v)
        alpha, _ = lln.match_moments(q * 1e3, k * 1e3)
    assert torch.equal(got, expected)
    assert torch.equal(alpha, lln.match_moments(q * 1e3, k * 1e3)[0])


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1)], ids=str)
def test_weights_of_keys_may_be_shared(backend, shape):
    q, k, v = torch.randn(2, 4, 12, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    weight = torch.randn(*shape, 12)
    output, _ = feed(empty_for(q, k, v), (q, k, v), [0, 5, 6, 12], key_weight=weight)
    expected = lln.lln_attention(q, k, v, key_weight=weight, is_causal=True)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
