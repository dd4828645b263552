"""torch.compile, torch.export and torch.func work on the functions; memory grows as promised."""

import functools
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

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
