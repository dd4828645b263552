"""Which backend computes a problem, and how to choose it."""

import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import lln
from helpers import ALL_BACKENDS, CALLS, causal_or_full, empty_for, needs_cpu, options_of, reason_against
from lln import LLNState, backends, reference
from lln.backends import BACKENDS, Backend, explain
from lln.backends.cpu import binding


@pytest.mark.parametrize("name", ALL_BACKENDS)
def test_the_tests_run_on_every_backend_of_this_machine(name):
    """Reports which backend is left out, and why."""
    reason = reason_against(name)
    if reason is not None:
        pytest.skip(reason)


@needs_cpu
@causal_or_full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_the_fused_code_takes_every_call(tokens, call, dtype, is_causal):
    """Where a test skips what a backend refuses, this one fails if it refuses what it should not."""
    inputs = tokens(H=4, Hk=2, N=90, D=16, Dv=40, dtype=dtype)
    name, options = options_of(call, is_causal, inputs)
    with backends.use("cpu"):
        getattr(lln, name)(*inputs, key_padding_mask=torch.rand(2, 90) > 0.3, **options)


def reasons(*inputs, **options):
    """What `explain` returns for the two backends that are always there."""
    found = dict(x.split(": ", 1) for x in explain(*inputs, **options).split("; "))
    return {name: found[name] for name in ("cpu", "torch")}


def test_use_leaves_one_backend(tokens, monkeypatch):
    inputs = tokens(N=9, D=16)
    monkeypatch.setenv("LLN_BACKEND", "cpu")
    with backends.use("torch"):
        assert reasons(*inputs) == {"cpu": "no, lln.backends.use('torch')", "torch": "yes"}
        lln.lln_attention(*inputs)
        with backends.use("cpu"), pytest.raises(backends.UnsupportedError, match="because dtype is float64"):
            lln.lln_attention(*inputs)
        with backends.use("cpu"), pytest.raises(backends.UnsupportedError, match="dtype is float64"):
            empty_for(*inputs).prefill(*inputs)
        assert reasons(*inputs)["torch"] == "yes"
        other = []
        thread = threading.Thread(target=lambda: other.append(reasons(*inputs)))
        thread.start()
        thread.join()
        assert other == [{"cpu": "no, dtype is float64", "torch": "yes"}]
    assert reasons(*inputs) == {"cpu": "no, dtype is float64", "torch": "yes"}
    with pytest.raises(ValueError, match=r"a backend must be one of .*torch, got 'cuda'"), backends.use("cuda"):
        pass


def test_use_ends_with_its_block_whatever_happens(tokens):
    inputs = tokens(N=9, D=16, dtype=torch.float32)
    with pytest.raises(KeyError), backends.use("torch"):
        raise KeyError
    assert "lln.backends.use" not in explain(*inputs)


def test_explain_takes_the_options_of_the_functions(tokens):
    q, k, v = tokens(B=1, N=8, D=12, dtype=torch.float32)
    assert reasons(q, k, v) == {"cpu": "no, head dimension 12 is not a multiple of 8 up to 256", "torch": "yes"}
    with pytest.raises(ValueError, match="form must be one of"):
        explain(q, k, v, form="papr")
    with pytest.raises(ValueError, match="near must be one of"):
        explain(q, k, v, near="windows")
    assert reasons(*tokens(B=1, N=8, D=16, dtype=torch.float32), near="window") == {"cpu": "yes", "torch": "yes"}
    with pytest.raises(TypeError, match="blok"):
        explain(q, k, v, blok=3)


def test_a_new_backend_is_a_subclass_and_an_entry(tokens, monkeypatch):
    """All that a backend needs: it computes what it can, the others do the rest."""

    class Explicit(Backend):
        name = "explicit"

        def why_not(self, problem):
            return "is_causal" if problem.is_causal else None

        def far(self, problem):
            alpha, beta = problem.scales()
            return reference.lln_attention(problem.query, problem.key, problem.value, alpha=alpha, beta=beta) + 1

        def near(self, problem):
            return reference.block_diagonal_attention(
                problem.query, problem.key, problem.value, block_size=problem.block_size
            )

    inputs = tokens(N=20)
    before = lln.lln_attention(*inputs), lln.lln_diag_attention(*inputs), lln.lln_attention(*inputs, is_causal=True)
    monkeypatch.setattr(backends, "BACKENDS", (Explicit(), *BACKENDS))
    after = lln.lln_attention(*inputs), lln.lln_diag_attention(*inputs), lln.lln_attention(*inputs, is_causal=True)
    for x, y, gained in zip(before, after, (1.0, 0.5, 0.0), strict=True):
        torch.testing.assert_close(x + gained, y)
    assert explain(*inputs, is_causal=True).startswith("explicit: no, is_causal; cpu: no, dtype is float64")


@pytest.fixture
def calls(monkeypatch):
    """How often the C code was called for a state."""
    made = []
    advance = binding.advance
    monkeypatch.setattr(binding, "advance", lambda recurrence: made.append(1) or advance(recurrence))
    return made


@needs_cpu
def test_states_that_are_left_to_plain_torch(tokens, calls):
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
    assert len(calls) == 1


def test_the_environment_leaves_only_one_backend(tokens, calls, monkeypatch):
    inputs = tokens(N=5, D=16, dtype=torch.float32)
    monkeypatch.setenv("LLN_BACKEND", "torch")
    empty_for(*inputs).prefill(*inputs)
    assert not calls


def test_reasons(tokens, monkeypatch):
    q, k, v = tokens(N=4, D=8, dtype=torch.float32)
    assert reasons(q.double(), k.double(), v.double()) == {"cpu": "no, dtype is float64", "torch": "yes"}
    assert "device is meta" in explain(q.to("meta"), k.to("meta"), v.to("meta"))
    assert "head dimension 12" in explain(*(torch.zeros(1, 1, 4, 12),) * 3)
    assert "value width 264" in explain(q, k, torch.zeros(2, 4, 4, 264))
    assert "alpha differs between tokens" in explain(q, k, v, alpha=torch.ones(2, 4, 4))
    long = torch.zeros(1, 1, 2000, 8)
    assert "blocks of 2000 tokens" in explain(long, long, long, block_size=4000)
    with torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in explain(q, k, v)
    torch.func.vmap(lambda x: (x, explain(x[None], k[:1], v[:1]).index("torch.func"))[0])(q)
    monkeypatch.setenv("LLN_BACKEND", "torch")
    assert reasons(q, k, v) == {"cpu": "no, LLN_BACKEND=torch", "torch": "yes"}
    monkeypatch.setenv("LLN_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"LLN_BACKEND must be .*torch or not set, got 'cuda'"):
        lln.lln_attention(q, k, v)
