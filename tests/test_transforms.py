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
    from torch._inductor import config

    inputs = tokens(B=1, H=2, N=40, D=8, dtype=torch.float32)
    results = []
    for attention in (lln.lln_diag_attention, torch.compile(lln.lln_diag_attention, fullgraph=True)):
        x = [t.clone().requires_grad_() for t in inputs]
        with config.patch(compile_threads=1):  # processes that compile would have to import torch first
            output = attention(*x, block_size=16)
            output.square().sum().backward()
        results.append([output, *(t.grad for t in x)])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [
        pytest.param("lln_attention", False, id="lln"),
        pytest.param("lln_diag_attention", False, id="lln_diag"),
        # Its many operations take long to trace with a symbolic length; `test_export_without_a_mask` has one length.
        pytest.param("lln_diag_attention", True, id="lln_diag-causal", marks=pytest.mark.slow),
    ],
)
def test_an_exported_program_has_any_length_and_can_be_saved(tokens, name, is_causal):
    """Full attention for any length; what works in blocks or chunks for lengths with the same number of them."""

    class Model(torch.nn.Module):
        def forward(self, query, key, value, keep):
            return getattr(lln, name)(query, key, value, key_padding_mask=keep, is_causal=is_causal)

    def make(N):
        return (*tokens(N=N, D=8, dtype=torch.float32), torch.rand(2, N) > 0.3)

    length = torch.export.Dim("length", min=65, max=4096 if name == "lln_attention" and not is_causal else 128)
    program = torch.export.export(Model(), make(100), dynamic_shapes=(*({2: length},) * 3, {1: length}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for N in (70, 100, 128):
        inputs = make(N)
        torch.testing.assert_close(loaded(*inputs), Model()(*inputs), rtol=1e-4, atol=1e-5)


def test_export_without_a_mask(tokens):
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return lln.lln_diag_attention(query, key, value, is_causal=True)

    program = torch.export.export(Model(), tuple(tokens(N=40, D=8, dtype=torch.float32)))
    others = tokens(N=40, D=8, dtype=torch.float32)
    torch.testing.assert_close(program.module()(*others), Model()(*others), rtol=1e-4, atol=1e-5)


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
def test_a_dispatch_mode_records_every_operation(tokens, name, is_causal):
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


@pytest.mark.skipif(sys.platform != "linux", reason="resets the peak of the process, which Linux can")
def test_a_million_tokens_need_little_memory():
    script = """
import torch, lln
from lln.bench.measure import peak_bytes, reset_peak
few, many = ([torch.randn(1, 1, tokens, 32) for _ in range(3)] for tokens in (64, 1_000_000))
for attention in (lln.lln_attention, lln.lln_diag_attention):
    attention(*few)
    reset_peak()
    before = peak_bytes()
    with torch.no_grad():
        output = attention(*many)
    print(peak_bytes() - before - output.nbytes)
    del output
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(int(line) < 200e6 for line in done.stdout.split())
