"""States with windows, in other forms, and with inputs of their own for both branches, on both backends."""

import itertools

import pytest
import torch

import lln
from lln import LLNState
from lln.backends.cpu import binding

FORMS = ["paper", "unbiased", "decomposed"]
NEARS = {"far": {}, "blocks": {"block_size": 7}, "window1": {"block_size": 1}, "window7": {"block_size": 7}}
NEARS |= {"window64": {"block_size": 64}, "window200": {"block_size": 200}}
CUTS = {"whole": (0, 90), "steps": range(91), "mixed": (0, 1, 2, 12, 13, 80, 90)}
# Of the C code against float64; float64 runs in plain torch.
CLOSE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def calls(monkeypatch):
    """How often the C code was called for a state."""
    made = []
    advance = binding.advance
    monkeypatch.setattr(binding, "advance", lambda recurrence: made.append(1) or advance(recurrence))
    return made


def options_of(form, near, H=4, Hk=2, D=16):
    options = dict(NEARS[near])
    if "window" in near:
        options["near"] = "window"
    if form == "decomposed":
        generator = torch.Generator().manual_seed(5)
        options["centers"] = tuple(torch.randn(h, D, generator=generator) / 2 for h in (H, Hk))
    return options | {"form": form}


def empty_for(q, k, v, **options):
    return LLNState.empty(
        q.shape[0], q.shape[1], q.shape[3], v.shape[3], key_heads=k.shape[1], dtype=v.dtype, **options
    )


def feed(state, inputs, cuts, mask=None, **options):
    outputs = []
    for start, end in itertools.pairwise(cuts):
        keep = None if mask is None else mask[:, start:end]
        more = {name: x[:, :, start:end] for name, x in options.items()}
        output, state = state.prefill(
            *(x[:, :, start:end] for x in inputs), key_padding_mask=keep, in_place=True, **more
        )
        outputs.append(output)
    return torch.cat(outputs, 2), state


def attention(q, k, v, **options):
    function = lln.lln_diag_attention if "block_size" in options else lln.lln_attention
    return function(q, k, v, is_causal=True, **options)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("form", FORMS)
def test_every_split_is_causal_attention(tokens, calls, form, near, dtype, masked):
    inputs = [x.to(dtype) for x in tokens(N=90, D=16, Dv=24, H=4, Hk=2)]
    options = options_of(form, near)
    mask = None
    if masked:
        mask = torch.rand(2, 90, generator=torch.Generator().manual_seed(3)) > 0.3
        mask[0, :9], mask[1, -1] = False, False
        for x in inputs:
            x.transpose(1, 2)[~mask] = torch.nan
    real = torch.ones(2, 90, dtype=torch.bool) if mask is None else mask
    expected = attention(*(x.double() for x in inputs), key_padding_mask=mask, **options).transpose(1, 2)[real]
    for name, cuts in CUTS.items():
        if name == "steps" and (dtype not in (torch.float64, torch.float32) or near in ("window64", "window200")):
            continue
        got, state = feed(empty_for(*inputs, **options), inputs, cuts, mask)
        got = got.transpose(1, 2)[real]
        torch.testing.assert_close(got.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype], msg=name)
        assert torch.equal(state.count, real.sum(1))
    assert bool(calls) == (dtype != torch.float64)


@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0])  # variances below, in and above the tabulated ones
def test_matching_of_the_unbiased_form(tokens, calls, matching, scale):
    inputs = [(x * y).float() for x, y in zip(tokens(N=40, D=24, H=2), (scale, scale, 1.0), strict=True)]
    got, _ = feed(empty_for(*inputs, form="unbiased", matching=matching), inputs, (0, 30, 31, 40))
    assert calls
    expected = attention(*(x.double() for x in inputs), form="unbiased", matching=matching)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", ["paper", "unbiased"])
@pytest.mark.parametrize("near", ["blocks", "window7"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 40])
def test_inputs_of_its_own_for_each_branch(tokens, calls, form, near, dtype, width):
    """LLN attention sees other features than softmax attention, of another width and in the accumulator's dtype."""
    near_query, near_key, value = (x.to(dtype) for x in tokens(N=90, D=16, Dv=24, H=4, Hk=2))
    far_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    query, key = (x.to(far_dtype) for x in tokens(N=90, D=width, H=4, Hk=2)[:2])
    weight = torch.randn(2, 4, 90, dtype=torch.float64) * 3
    options = options_of(form, near)
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
    softmax = lln.block_diagonal_attention(*exact[3:], exact[2], is_causal=True, **neighbours)
    for cuts in CUTS.values():
        got, _ = feed(state._map(torch.clone), (query, key, value), cuts, **more)
        torch.testing.assert_close(got.double(), (far + softmax) / 2, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    apart = state.branches(query, key, value, **more)
    for x, y in zip(apart[:2], (far, softmax), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=CLOSE[dtype])
    assert bool(calls) == (dtype != torch.float64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("near", ["blocks", "window7"])
def test_saving_reordering_and_merging(tokens, form, near):
    inputs = tokens(N=40, D=16, H=4, Hk=2, dtype=torch.float32)
    options = options_of(form, near) | {"alpha": 1.1, "beta": 0.9}
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


def test_a_window_forgets_what_is_not_finite(tokens, calls):
    inputs = tokens(N=30, D=16, dtype=torch.float32)
    inputs[2][:, :, 5, 0] = torch.inf
    for cuts in ((0, 30), range(31), (0, 9, 30)):
        state = empty_for(*inputs, block_size=4, near="window")
        near = []
        for start, end in itertools.pairwise(cuts):
            _, part, state = state.branches(*(x[:, :, start:end] for x in inputs))
            near.append(part)
        bad = ~torch.cat(near, 2).isfinite().all(-1)[0, 0]
        assert bad.nonzero()[:, 0].tolist() == [5, 6, 7, 8]
    assert calls


def test_gradients_through_a_window_and_a_form(tokens):
    inputs = [x.requires_grad_() for x in tokens(N=12, D=8, H=2)]
    options = options_of("decomposed", "window7", H=2, Hk=2, D=8)
    expected = torch.autograd.grad(attention(*inputs, **options).square().sum(), inputs)
    state = empty_for(*inputs, **options)
    outputs = []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        output, state = state.prefill(*(x[:, :, start:end] for x in inputs))
        outputs.append(output)
    got = torch.autograd.grad(torch.cat(outputs, 2).square().sum(), inputs)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


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
    with pytest.raises(ValueError, match="key_weight must be"):
        LLNState.empty(2, 4, 16).prefill(q, k, v, key_weight=torch.zeros(2, 4, 2))
    with pytest.raises(TypeError, match="key_weight must be a floating point"):
        LLNState.empty(2, 4, 16).prefill(q, k, v, key_weight=torch.zeros(2, 4, 3, dtype=torch.int64))
    tensors = LLNState.empty(2, 4, 16, **options_of("decomposed", "far", H=4, Hk=4)).to_dict()
    with pytest.raises(ValueError, match="two centres"):
        LLNState.from_dict({name: x for name, x in tensors.items() if name != "center_k"})


def test_states_of_modules(tokens):
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
