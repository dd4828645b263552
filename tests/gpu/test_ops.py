"""The torch.library ops: fake implementations, gradients, torch.compile, and the decode step of a state."""

import pytest
import torch
import torch.utils.checkpoint

import lln
from lln.backends import BACKENDS
from lln.state import LLNState


def check_ops(q, k, v, *, is_causal, **options):
    """All four ops: attention with gradients of a scale, or of log-weights and beside centres; neighbours."""
    from lln.backends.triton import ops

    keep = torch.tensor([[True, True, False, True, True]])
    scale = torch.ones(1, 4, 5 if is_causal else 1, requires_grad=True)
    weight, centers = torch.randn(1, 4, 5, requires_grad=True), (torch.randn(1, 4, 8), torch.randn(1, 2, 8))
    for given in ((scale, None, None, None, None, "unbiased"), (None, None, weight, *centers, "decomposed")):
        alpha, beta, *others, form = given
        far = q, k, v, keep, keep, alpha, beta, *others, "variance", form, is_causal
        torch.library.opcheck(ops.far_op, far, **options)
        output, alpha, beta, *kept = (x.detach() for x in ops.far_op(*far))
        saved = q, k, v, keep, keep, alpha, beta, *others, output, *kept
        wanted = True, others[0] is not None, False
        backward = [None if x is None else x.detach() for x in (output, *saved)]
        torch.library.opcheck(ops.far_backward_op, (*backward, form, is_causal, *wanted), **options)
    near = 2, False, is_causal
    torch.library.opcheck(ops.near_op, (q, k, v, keep, *near), **options)
    output, logs = ops.near_op(q, k, v, keep, *near)
    backward = [x.detach() for x in (output, q, k, v, keep, logs)]
    for d_logs in (None, torch.ones_like(logs)):
        torch.library.opcheck(ops.near_backward_op, (*backward, d_logs, *near), **options)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_registered_ops_pass_opcheck(tokens, is_causal):
    check_ops(*tokens(B=1, H=4, Hk=2, N=5, D=8, dtype=torch.float32, grad=True), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_fakes_have_the_strides_of_results_where_features_are_apart(tokens, is_causal):
    """Heads are innermost here: kernels read a copy, and torch.compile expects the strides of the fake result."""
    inputs = tokens(B=1, H=4, Hk=2, N=5, D=8, dtype=torch.float32)
    apart = (x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1) for x in inputs)
    check_ops(*apart, is_causal=is_causal, test_utils="test_faketensor")


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_compile_keeps_one_graph_with_gradients(tokens, triton_backend, is_causal):
    inputs = tokens(B=1, H=1, N=9, D=8, dtype=torch.float32, grad=True)

    def loss(q, k, v):
        return lln.lln_diag_attention(q, k, v, block_size=4, is_causal=is_causal).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*inputs), inputs)
    assert "queries_backward_kernel" in triton_backend or "causal_queries_backward_kernel" in triton_backend
    for x, y in zip(ours, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_activation_checkpointing(tokens, triton_backend, is_causal):
    """Tensors that are computed again may be read once."""
    inputs = tokens(B=1, H=1, N=9, D=8, dtype=torch.float32, grad=True)

    def attention(*inputs):
        return lln.lln_diag_attention(*inputs, block_size=4, is_causal=is_causal).square().sum()

    again = torch.utils.checkpoint.checkpoint(attention, *inputs, use_reentrant=False)
    ours = torch.autograd.grad(again, inputs)
    for x, y in zip(ours, torch.autograd.grad(attention(*inputs), inputs), strict=True):
        assert torch.equal(x, y)


def test_export_gives_a_graph_that_runs_anywhere(tokens, triton_backend):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return lln.lln_attention(q, k, v)

    inputs = tuple(tokens(B=1, H=1, N=9, D=8, dtype=torch.float32))
    program = torch.export.export(Attention(), inputs)
    assert not triton_backend
    torch.testing.assert_close(program.module()(*inputs), lln.lln_attention(*inputs), rtol=1e-5, atol=1e-6)


def test_gradients_of_gradients_are_those_of_the_plain_formula(tokens, triton_backend, monkeypatch):
    inputs = tokens(B=1, H=1, N=6, D=8, dtype=torch.float32, grad=True)

    def second():
        output = lln.lln_diag_attention(*inputs, block_size=4, alpha=1.3, beta=0.7)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    ours = second()
    monkeypatch.setenv("LLN_BACKEND", "torch")
    for x, y in zip(ours, second(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


STATES = {
    "lln": {},
    "given": {"alpha": 1.2, "beta": 0.7},
    "unbiased": {"form": "unbiased"},
    "decomposed": {"form": "decomposed"},
    "blocks": {"block_size": 3},
    "window": {"block_size": 3, "near": "window", "form": "decomposed"},
}


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in_place"])
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("name", STATES)
def test_a_step_is_the_next_row_of_causal_attention(
    tokens, triton_backend, full_of_nan, monkeypatch, name, padded, in_place
):
    q, k, v = tokens(B=2, H=2, Hk=1, N=6, D=12, Dv=20, dtype=torch.float32)
    keep = torch.rand(2, 6) < 0.6 if padded else torch.ones(2, 6, dtype=torch.bool)
    options = dict(STATES[name])
    if options.get("form") == "decomposed":
        options["centers"] = torch.randn(2, 12) / 3, torch.randn(1, 12) / 3
    state = LLNState.empty(2, 2, 12, 20, key_heads=1, **options)
    rows, before = [], None
    for t in range(6):
        mask = {"key_padding_mask": keep[:, t : t + 1]} if padded else {}
        row, after = state.step(*(x[:, :, t : t + 1] for x in (q, k, v)), in_place=in_place, **mask)
        if not in_place and before is not None:
            assert torch.equal(state.values, before)
        state, before = after, after.values.clone()
        rows.append(row)
    assert triton_backend == ["step_kernel"] * 6
    assert torch.equal(state.count, keep.sum(dim=1))
    monkeypatch.setenv("LLN_BACKEND", "torch")
    attention = lln.lln_diag_attention if "block_size" in options else lln.lln_attention
    if "centers" in options:
        options["centers"] = tuple(x.double() for x in options["centers"])
    expected = attention(q.double(), k.double(), v.double(), is_causal=True, key_padding_mask=keep, **options)
    difference = (torch.cat(rows, dim=2) - expected).masked_fill(~keep[:, None, :, None], 0.0)
    assert difference.abs().max() < 5e-6


def test_states_that_take_plain_torch(tokens):
    backend = next(x for x in BACKENDS if x.name == "triton")
    reasons = []

    class Recorder(type(backend)):
        def why_not_advance(self, recurrence):
            reasons.append(super().why_not_advance(recurrence))
            return reasons[-1]

    from lln import backends

    q, k, v = tokens(B=1, H=1, N=3, D=8, dtype=torch.float32)
    state = LLNState.empty(1, 1, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BACKENDS", (Recorder(), BACKENDS[-1]))
        state.prefill(q, k, v)
        state.step(*(x[:, :, :1].clone().requires_grad_() for x in (q, k, v)))
    assert reasons == [
        "several tokens at once advance a state in plain torch",
        "gradients flow through a state in plain torch",
    ]
