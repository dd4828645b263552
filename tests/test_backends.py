"""Which backend computes a problem, and that each of them gives the reference's numbers."""

import functools

import pytest
import torch

import lln
from lln import backends, reference
from lln.backends import BACKENDS, Backend, explain
from lln.problem import Problem

CALLS = {
    "lln": ("lln_attention", {}),
    "given": ("lln_attention", {"alpha": 1.3, "beta": 0.7}),
    "unbiased": ("lln_attention", {"form": "unbiased"}),
    "decomposed": ("lln_attention", {"form": "decomposed"}),
    "diag": ("lln_diag_attention", {"block_size": 16}),
    "diag-window": ("lln_diag_attention", {"block_size": 16, "near": "window"}),
    "decomposed-window": ("lln_diag_attention", {"block_size": 16, "near": "window", "form": "decomposed"}),
    "blocks": ("block_diagonal_attention", {"block_size": 16}),
    "window": ("block_diagonal_attention", {"block_size": 17, "near": "window"}),
}
NAMES = [backend.name for backend in BACKENDS]


@pytest.fixture(params=NAMES)
def backend(request, monkeypatch):
    """Each backend in turn, with the reason where this machine has not got it."""
    reason = explain(*torch.zeros(3, 1, 1, 4, 16)).split("; ")[NAMES.index(request.param)]
    if not reason.endswith("yes"):
        pytest.skip(reason)
    monkeypatch.setenv("LLN_BACKEND", request.param)
    return request.param


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("N", [1, 17, 64, 101])
@pytest.mark.parametrize("call", CALLS)
def test_every_backend_equals_the_reference(tokens, backend, call, N, padded, is_causal):
    name, options = CALLS[call]
    options = {**options, "is_causal": is_causal}
    if is_causal and options.get("form") == "decomposed":
        options["centers"] = torch.randn(4, 16) / 2, torch.randn(2, 16) / 2
    keep = torch.rand(2, N) < 0.7 if padded else torch.ones(2, N, dtype=torch.bool)
    inputs = tokens(H=4, Hk=2, N=N, D=16, Dv=24, dtype=torch.float32)
    gradient = torch.randn(2, 4, N, 24).masked_fill(~keep[:, None, :, None], 0.0)
    results = []
    for module, dtype in ((lln, torch.float32), (reference, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        more = {"centers": tuple(x.to(dtype) for x in options["centers"])} if "centers" in options else {}
        attention = functools.partial(getattr(module, name), key_padding_mask=keep if padded else None)
        output = attention(*leaves, **{**options, **more}).masked_fill(~keep[:, None, :, None], 0.0)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))])
    unit = max(float(x.abs().max()) for x in results[1][1:]) or 1.0
    assert (results[0][0] - results[1][0]).abs().max() < 5e-6
    for ours, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * unit


def test_explain_takes_the_options_of_the_functions(tokens):
    q, k, v = tokens(B=1, N=8, D=12, dtype=torch.float32)
    assert explain(q, k, v) == "cpu: no, head dimension 12 is not a multiple of 8 up to 256; torch: yes"
    with pytest.raises(ValueError, match="form must be one of"):
        explain(q, k, v, form="papr")
    with pytest.raises(ValueError, match="near must be one of"):
        explain(q, k, v, near="windows")
    assert explain(*tokens(B=1, N=8, D=16, dtype=torch.float32), near="window") == "cpu: yes; torch: yes"
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


def test_a_problem_is_validated_once_and_frozen(tokens):
    problem = Problem.make(*tokens(N=8), far=True)
    with pytest.raises(AttributeError):
        problem.is_causal = True
    with pytest.raises(TypeError, match="unexpected keyword"):
        Problem.make(*tokens(N=8), far=True, blok=3)
    for wrong in ({"matching": "moments"}, {"form": "papr"}, {"near": "windows"}, {"scope": "head"}):
        with pytest.raises(ValueError, match="must be one of"):
            Problem.make(*tokens(N=8), far=True, **wrong)


def test_forms_in_low_precision_do_not_overflow():
    q = (torch.randn(1, 1, 64, 16) * 3e4).clamp(-6e4, 6e4).half()
    center = torch.full((1, 16), -3e4)
    options = {"form": "decomposed", "alpha": 1e-4, "beta": 1e-4, "centers": (center, center)}
    output = lln.lln_attention(q, q, torch.randn(1, 1, 64, 16).half(), **options)
    assert output.dtype is torch.float16
    assert output.isfinite().all()
