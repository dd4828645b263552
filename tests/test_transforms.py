"""torch.compile, torch.export and torch.func work on the functions; memory grows as promised."""

import functools
import io
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lln

# LLN+Diag runs all of the code; LLN alone has no blocks that would constrain its length.
CASES = [("lln_attention", False), ("lln_diag_attention", False), ("lln_diag_attention", True)]
CASES = pytest.mark.parametrize(("name", "is_causal"), CASES, ids=["lln", "lln_diag", "lln_diag-causal"])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@CASES
def test_compile_makes_one_graph(tokens, name, is_causal):
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    counter = CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    inputs = tokens(N=70, D=8, dtype=torch.float32)
    torch.testing.assert_close(compiled(*inputs), attention(*inputs))
    assert counter.frame_count == 1


@CASES
def test_compile_with_dynamic_lengths(tokens, name, is_causal):
    """One graph serves all lengths of full attention; causal attention has one for each power of two of chunks."""
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    counter = CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for N in (100, 97, 128, 70, 101):
        inputs = tokens(N=N, D=8, dtype=torch.float32)
        keep = torch.arange(N) < torch.tensor([[N], [N // 2]])
        torch.testing.assert_close(
            compiled(*inputs, key_padding_mask=keep), attention(*inputs, key_padding_mask=keep), rtol=1e-4, atol=1e-5
        )
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the compiler's own making
def test_compile_with_the_default_backend_forward_and_backward(tokens):
    inputs = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32)
    results = []
    for attention in (lln.lln_diag_attention, torch.compile(lln.lln_diag_attention, fullgraph=True)):
        x = [t.clone().requires_grad_() for t in inputs]
        output = attention(*x, block_size=16)
        output.square().sum().backward()
        results.append([output, *(t.grad for t in x)])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=1e-4, atol=1e-5)


@CASES
def test_export_with_dynamic_length(tokens, name, is_causal):
    """Full attention for any length; what works in blocks or chunks for lengths with the same number of them."""

    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return getattr(lln, name)(query, key, value, is_causal=is_causal)

    inputs = tokens(N=100, D=8, dtype=torch.float32)
    length = torch.export.Dim("length", min=65, max=4096 if name == "lln_attention" and not is_causal else 128)
    program = torch.export.export(Model(), tuple(inputs), dynamic_shapes=({2: length},) * 3)
    for N in (70, 100, 128):
        others = tokens(N=N, D=8, dtype=torch.float32)
        torch.testing.assert_close(program.module()(*others), Model()(*others), rtol=1e-4, atol=1e-5)


@CASES
def test_an_exported_program_can_be_saved_and_loaded(tokens, name, is_causal):
    class Model(torch.nn.Module):
        def forward(self, query, key, value, keep):
            return getattr(lln, name)(query, key, value, key_padding_mask=keep, is_causal=is_causal)

    keep = torch.rand(2, 40) > 0.3
    inputs = (*tokens(N=40, D=8, dtype=torch.float32), keep)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), inputs), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    others = (*tokens(N=40, D=8, dtype=torch.float32), torch.rand(2, 40) > 0.3)
    torch.testing.assert_close(loaded(*others), Model()(*others), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])
@CASES
def test_jit_trace_records_the_plain_operations(tokens, name, is_causal, with_grad):
    def attention(query, key, value):
        return getattr(lln, name)(query, key, value, is_causal=is_causal)

    others = tokens(N=40, D=8, dtype=torch.float32)
    with torch.set_grad_enabled(with_grad):
        traced = torch.jit.trace(attention, tuple(tokens(N=40, D=8, dtype=torch.float32, grad=with_grad)))
        torch.testing.assert_close(traced(*others), attention(*others), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_refuses_what_it_would_not_check(tokens):
    lengths = torch.tensor([40, 20])
    with pytest.raises(ValueError, match=r"torch.jit.trace cannot record"):
        torch.jit.trace(
            lambda *x: lln.lln_attention(*x, key_padding_mask=lengths), tuple(tokens(N=40, dtype=torch.float32))
        )


@CASES
def test_a_dispatch_mode_sees_every_operation(tokens, name, is_causal):
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    graph = make_fx(attention)(*tokens(N=40, D=8, dtype=torch.float32))
    others = tokens(N=40, D=8, dtype=torch.float32)
    torch.testing.assert_close(graph(*others), attention(*others), rtol=1e-4, atol=1e-5)

    def masked(query, key, value, keep):
        return attention(query, key, value, key_padding_mask=keep)

    graph = make_fx(masked)(*others, torch.rand(2, 40) < 0.7)
    keep = torch.rand(2, 40) < 0.5
    torch.testing.assert_close(graph(*others, keep), masked(*others, keep), rtol=1e-4, atol=1e-5)
    with FakeTensorMode():
        fake = [torch.empty(2, 4, 40, 8) for _ in range(3)]
        assert masked(*fake, torch.ones(2, 40, dtype=torch.bool)).shape == (2, 4, 40, 8)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["lln_attention", "lln_diag_attention", "block_diagonal_attention"])
def test_batches_of_gradients(tokens, name, is_causal):
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    inputs = tuple(tokens(B=1, H=1, N=5, D=8, dtype=torch.float32))
    jacobian = torch.autograd.functional.jacobian
    for one, many in zip(jacobian(attention, inputs), jacobian(attention, inputs, vectorize=True), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-6)
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = attention(*leaves)
    gradients = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, leaves, gradients, is_grads_batched=True, retain_graph=True)
    for i, gradient in enumerate(gradients):
        for one, many in zip(torch.autograd.grad(output, leaves, gradient, retain_graph=True), batched, strict=True):
            torch.testing.assert_close(one, many[i], rtol=1e-4, atol=1e-6)


WRONG_VALUES = {
    "long lengths": {"key_padding_mask": torch.tensor([40, 41])},
    "negative lengths": {"key_padding_mask": torch.tensor([40, -5])},
    "alpha": {"alpha": torch.tensor(-1.0)},
    "beta": {"beta": torch.tensor([1.0, 1.0, torch.nan, 1.0])},
}


@pytest.mark.parametrize("wrong", WRONG_VALUES)
def test_a_compiled_function_refuses_wrong_values_when_it_runs(tokens, wrong):
    right = {name: x.clamp(1, 40) for name, x in WRONG_VALUES[wrong].items()}
    right = {name: x.nan_to_num(1.0) if x.is_floating_point() else x for name, x in right.items()}
    compiled = torch.compile(lln.lln_attention, fullgraph=True, backend="aot_eager")
    inputs = tokens(N=40, D=8, dtype=torch.float32)
    torch.testing.assert_close(compiled(*inputs, **right), lln.lln_attention(*inputs, **right))
    with pytest.raises(RuntimeError, match=r"must (be positive and finite|hold lengths between 0)"):
        compiled(*inputs, **WRONG_VALUES[wrong])
    with pytest.raises(ValueError, match=r"must (be positive and finite|hold lengths between 0)"):
        lln.lln_attention(*inputs, **WRONG_VALUES[wrong])


def test_wrong_values_are_refused_under_vmap(tokens):
    inputs = tokens(B=2, N=10, D=8)
    with pytest.raises(ValueError, match="alpha must be positive"):
        torch.func.vmap(lambda q, k, v, a: lln.lln_attention(q[None], k[None], v[None], alpha=a))(
            *inputs, torch.tensor([1.0, -1.0])
        )


@CASES
def test_vmap_and_grad(tokens, name, is_causal):
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    inputs = tokens(B=3, N=20, D=8)
    keep = torch.arange(20) < torch.tensor([[20], [11], [4]])
    mapped = torch.func.vmap(lambda q, k, v, m: attention(q, k, v, key_padding_mask=m))(
        *(x[:, None] for x in inputs), keep[:, None]
    )
    torch.testing.assert_close(mapped[:, 0], attention(*inputs, key_padding_mask=keep))

    def loss(query, key, value):
        return attention(query, key, value).square().sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss(*leaves).backward()
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad)
    single = torch.func.vmap(torch.func.grad(lambda q, k, v: loss(q[None], k[None], v[None])))(*inputs)
    torch.testing.assert_close(single, leaves[0].grad)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["lln_attention", "lln_diag_attention"])
def test_backward_allocates_in_proportion_to_the_tokens(tokens, name, is_causal):
    """The gradient of each piece of a long sequence must not be as large as the sequence."""

    def allocated(N):
        inputs = tokens(B=1, H=1, N=N, D=8, dtype=torch.float32, grad=True)
        output = getattr(lln, name)(*inputs, is_causal=is_causal)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            output.sum().backward()
        return sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())

    assert allocated(2**15) < 4.4 * allocated(2**13)


@pytest.mark.skipif(sys.platform != "linux", reason="resets the peak of the process, which Linux can")
@pytest.mark.parametrize("call", ["lln.lln_attention(q, k, v)", "lln.lln_diag_attention(q, k, v)"])
def test_a_million_tokens_need_little_memory(call):
    script = f"""
import torch, lln
from lln.bench.measure import peak_bytes, reset_peak
q, k, v = (torch.randn(1, 1, 64, 32) for _ in range(3))
{call}
q, k, v = (torch.randn(1, 1, 1_000_000, 32) for _ in range(3))
reset_peak()
before = peak_bytes()
with torch.no_grad():
    output = {call}
print(peak_bytes() - before - output.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["paper", "unbiased", "decomposed"])
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "apart"])
def test_gradients_with_a_graph_are_those_without(form, dtype, is_shared):
    """Also where inputs are one tensor, or depend on each other, as the weights of keys do on keys in some forms."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 2, 10, 8, dtype=dtype)
    x.requires_grad_()
    inputs = (x, x, x * x) if is_shared else (y, x, y)
    loss = lln.lln_diag_attention(*inputs, form=form, key_weight=x.mean(dim=-1), block_size=4).pow(3).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (batched,) = torch.autograd.grad(loss, x, torch.ones(1, dtype=dtype), is_grads_batched=True)
    torch.testing.assert_close(batched[0], expected, rtol=1e-4, atol=1e-5)
