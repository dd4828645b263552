"""The fused CPU kernel: the numbers of the reference, when it is taken, and how it is built."""

import functools
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

import lln
from lln import reference
from lln.backends import explain
from lln.backends.cpu import autograd, binding, build, build_problem

ATTENTIONS = {
    "lln": ("lln_attention", {}),
    "given": ("lln_attention", {"alpha": 1.3, "beta": 0.7}),
    "diag": ("lln_diag_attention", {"block_size": 16}),
    "odd-blocks": ("lln_diag_attention", {"block_size": 23}),
    "blocks": ("block_diagonal_attention", {"block_size": 70}),
}

needs_compiler = pytest.mark.skipif(build_problem() is not None, reason="no C compiler")


def relative(got, want):
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1e-2))


def run(function, inputs, gradient, dtype=None):
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


@contextmanager
def threads(count):
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def compare(name, options, inputs, mask=None, **more):
    """Output and gradients against the reference in float64; float32 within 2e-6, gradients within 1e-5."""
    q, k, v = inputs
    assert explain(q, k, v, **more, block_size=options.get("block_size")) == "cpu: yes; torch: yes"
    gradient = torch.randn(*q.shape[:3], v.shape[3])
    arguments = {**options, **more, "key_padding_mask": mask}
    ours = run(functools.partial(getattr(lln, name), **arguments), inputs, gradient)
    theirs = run(functools.partial(getattr(reference, name), **arguments), inputs, gradient, torch.float64)
    for x, y, limit in zip(ours, theirs, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
        assert relative(x, y) < limit


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("N", [2, 63, 64, 65, 150], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_equals_the_reference(tokens, kind, N, is_causal):
    compare(*ATTENTIONS[kind], tokens(B=1, H=2, N=N, D=24, dtype=torch.float32), is_causal=is_causal)


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_padding_shared_keys_and_layouts(tokens, kind, is_causal):
    """Padding with holes and on the left, fewer key heads, values of another width, heads beside tokens in memory."""
    q, k, v = tokens(B=2, H=4, Hk=2, N=90, D=16, Dv=40, dtype=torch.float32)
    keep = torch.rand(2, 90) > 0.3
    keep[1] = torch.arange(90) >= 30
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    compare(*ATTENTIONS[kind], (q, k, v), keep, is_causal=is_causal)
    name, options = ATTENTIONS[kind]
    attention = functools.partial(getattr(lln, name), **options, is_causal=is_causal, key_padding_mask=keep)
    output = attention(q, k, v)
    assert output.transpose(1, 2).is_contiguous()
    dirty = [x.masked_fill(~keep[:, None, :, None], torch.nan) for x in (k, v)]
    assert torch.equal(attention(q, *dirty), output)


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("gradient", ["features outside", "expanded"])
def test_gradients_of_features_that_are_not_contiguous(kind, is_causal, gradient):
    """Channels before tokens, as a convolution leaves them: what the C code writes must not follow those strides."""
    name, options = ATTENTIONS[kind]
    base = torch.randn(2, 96, 50)
    upstream = torch.randn(2, 2, 16, 50).mT if gradient == "features outside" else torch.randn(2, 2, 1, 1)

    def run(module, dtype):
        x = base.to(dtype).requires_grad_()
        q, k, v = x.view(2, 3, 2, 16, 50).transpose(3, 4).unbind(1)
        output = getattr(module, name)(q, k, v, is_causal=is_causal, **options)
        return torch.autograd.grad(output, x, upstream.to(dtype).expand_as(output))[0]

    assert relative(run(lln, torch.float32), run(reference, torch.float64)) < 1e-5


@needs_compiler
@pytest.mark.parametrize("factor", [1e3, 1e4, 1e5])
def test_gradients_of_values_with_an_outlier_among_the_keys(factor):
    q, k, v, gradient = (torch.randn(1, 1, 4096, 64) for _ in range(4))
    k[:, :, 7] *= factor
    ours = run(lln.lln_attention, (q, k, v), gradient)[3]
    theirs = run(lln.lln_attention, (q, k, v), gradient, torch.float64)[3]  # by plain torch
    assert relative(ours, theirs) < 1e-5


@needs_compiler
@pytest.mark.parametrize("D", [8, 64, 72, 256], ids=lambda d: f"D{d}")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_width(tokens, D, is_causal):
    compare("lln_diag_attention", {}, tokens(B=1, H=1, N=70, D=D, dtype=torch.float32), is_causal=is_causal)


@needs_compiler
@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_matching(tokens, matching, is_causal):
    options = {"matching": matching}
    compare("lln_attention", options, tokens(H=2, N=70, D=40, dtype=torch.float32), is_causal=is_causal)


@needs_compiler
@pytest.mark.parametrize(("N", "M"), [(1, 90), (90, 1), (33, 100)])
def test_cross_attention(tokens, N, M):
    compare("lln_attention", {}, tokens(N=N, M=M, H=4, Hk=2, D=16, dtype=torch.float32))


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(tokens, kind, is_causal, dtype):
    """Against float64 at most twice as wrong as the plain formula in that dtype, gradients three times."""
    name, options = ATTENTIONS[kind]
    if name != "block_diagonal_attention":  # statistics aside: what is compared is the attention
        options = {**options, "alpha": 1.25, "beta": 1.25}
    inputs = tokens(B=1, H=2, Hk=1, N=80, D=32, dtype=dtype)
    gradient = torch.randn(1, 2, 80, 32).to(dtype)
    ours, plain = (
        functools.partial(getattr(m, name), **options, is_causal=is_causal, key_padding_mask=torch.tensor([71]))
        for m in (lln, reference)
    )
    exact = run(plain, inputs, gradient, torch.float64)
    for x, y, z, factor in zip(
        run(ours, inputs, gradient), run(plain, inputs, gradient), exact, (2, 3, 3, 3), strict=True
    ):
        assert x.dtype == dtype
        assert relative(x, z) <= factor * relative(y, z) + 1e-12


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (2, 3)], ids=str)
def test_given_scales_learn(tokens, shape, is_causal):
    q, k, v = tokens(B=2, H=3, N=70, D=8, dtype=torch.float32)
    gradients = []
    for dtype, attention in ((torch.float32, lln.lln_attention), (torch.float64, reference.lln_attention)):
        scales = [torch.full(shape, x, dtype=dtype, requires_grad=True) for x in (1.2, 0.8)]
        output = attention(*(x.to(dtype) for x in (q, k, v)), alpha=scales[0], beta=scales[1], is_causal=is_causal)
        gradients.append(torch.autograd.grad((output * torch.linspace(-1, 1, 8, dtype=dtype)).sum(), scales))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_threads_and_chunks_give_the_same(tokens, is_causal):
    """One head is cut into chunks where there are threads to spare; the same job gives the same bits."""
    inputs = tokens(B=1, H=1, N=700, D=16, dtype=torch.float32)
    gradient = torch.randn(1, 1, 700, 16)
    attention = functools.partial(lln.lln_diag_attention, is_causal=is_causal)
    alone = run(attention, inputs, gradient)
    with threads(3):
        first, second = (run(attention, inputs, gradient) for _ in range(2))
    for x, y, z in zip(alone, first, second, strict=True):
        assert torch.equal(y, z)
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.fixture
def four_threads():
    with threads(4):
        yield


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
def test_chunks_equal_the_reference(tokens, four_threads, kind, is_causal, padded):
    q, k, v = tokens(B=1, H=2, Hk=1, N=600, D=16, Dv=24, dtype=torch.float32)
    keep = torch.rand(1, 600) > 0.3 if padded else None
    if padded:
        keep[0, :200] = False  # nothing at all before the second chunk
    compare(*ATTENTIONS[kind], (q, k, v), keep, is_causal=is_causal)


@needs_compiler
def test_causal_chunks_of_keys_that_grow_and_grow(tokens):
    """Or shrink. As one piece: both have the rounding of large keys."""
    q, k, v = tokens(B=1, H=1, N=530, D=16, dtype=torch.float32)
    attention = functools.partial(lln.lln_attention, alpha=1.0, beta=1.0, is_causal=True)
    for factor in (torch.linspace(1, 100, 530), torch.linspace(10, 1, 530)):
        key = k * factor[:, None]
        whole = run(attention, (q, key, v), v)
        with threads(4):
            chunks = run(attention, (q, key, v), v)
        for x, y, limit in zip(whole, chunks, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
            assert relative(y, x.double()) < limit


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_causal_chunks_in_low_precision_and_their_scales(tokens, dtype):
    """The same as alone, but for the order of sums in float32; the bits differ, or the head was not cut."""
    inputs = [x.to(dtype) for x in tokens(B=1, H=2, Hk=1, N=600, D=16, dtype=torch.float32)]
    scales = [torch.full((2,), x) for x in (1.2, 0.8)]

    def attention(q, k, v, alpha, beta):
        return lln.lln_attention(q, k, v, alpha=alpha.float(), beta=beta.float(), is_causal=True)

    gradient = torch.randn(1, 2, 600, 16).to(dtype)
    results = []
    for count in (1, 4):
        with threads(count):
            leaves = [x.detach().requires_grad_() for x in (*inputs, *scales)]
            output = attention(*leaves)
            results.append([output, *torch.autograd.grad(output, leaves, gradient)])
    assert not torch.equal(results[0][4], results[1][4])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@needs_compiler
def test_what_is_not_finite_shows_in_later_chunks_only(tokens, four_threads):
    inputs = tokens(B=1, H=1, N=600, D=8, dtype=torch.float32)
    clean = lln.lln_attention(*inputs, is_causal=True)
    inputs[1][0, 0, 320, 3] = torch.inf
    dirty = lln.lln_attention(*inputs, is_causal=True)
    torch.testing.assert_close(dirty[:, :, :320], clean[:, :, :320])
    assert not dirty[:, :, 320:].isfinite().all(dim=-1).any()


@needs_compiler
def test_whole_heads_give_the_same_bits_whoever_takes_them(tokens):
    inputs = tokens(B=2, H=7, N=130, D=16, dtype=torch.float32)
    gradient = torch.randn(2, 7, 130, 16)
    alone = run(lln.lln_diag_attention, inputs, gradient)
    with threads(2):
        together = run(lln.lln_diag_attention, inputs, gradient)
    assert all(torch.equal(x, y) for x, y in zip(alone, together, strict=True))


@needs_compiler
def test_results_in_large_pages(tokens, monkeypatch):
    """Results of 32 MB and more are asked for in large pages, whatever their layout."""
    q, k, v = tokens(B=1, H=4, N=33_000, D=64, dtype=torch.float32)
    spread = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    ours = [lln.lln_attention(*x) for x in ((q, k, v), spread)]
    assert ours[0].nbytes >= 32 << 20
    monkeypatch.setenv("LLN_BACKEND", "torch")
    plain = lln.lln_attention(q, k, v)
    for x in ours:
        torch.testing.assert_close(x, plain, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_keys_that_grow_and_grow(tokens):
    """Causal tiles are cut where a key exceeds all before it by far; nothing overflows, nothing is lost."""
    q, k, v = tokens(B=1, H=2, N=100, D=16, dtype=torch.float32)
    k = k * torch.linspace(1, 400, 100)[:, None]
    compare("lln_attention", {"alpha": 1.0, "beta": 1.0}, (q, k, v), is_causal=True)


@needs_compiler
def test_what_is_not_finite_shows_in_later_rows_only(tokens):
    for where in (1, 2):
        inputs = tokens(B=1, H=1, N=40, D=8, dtype=torch.float32)
        clean = lln.lln_attention(*inputs, is_causal=True)
        inputs[where][0, 0, 20, 3] = -torch.inf
        dirty = lln.lln_attention(*inputs, is_causal=True)
        torch.testing.assert_close(dirty[:, :, :20], clean[:, :, :20])
        assert not dirty[:, :, 20:].isfinite().all(dim=-1).any()


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_of_gradients_are_those_of_the_plain_formula(tokens, is_causal, monkeypatch):
    inputs = tokens(B=1, H=1, N=9, D=8, dtype=torch.float32, grad=True)

    def second():
        output = lln.lln_diag_attention(*inputs, block_size=4, alpha=1.3, beta=0.7, is_causal=is_causal)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    ours = second()
    monkeypatch.setenv("LLN_BACKEND", "torch")
    for x, y in zip(ours, second(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@needs_compiler
def test_the_compiled_op_refuses_gradients_of_gradients(tokens):
    inputs = tokens(B=1, H=1, N=9, D=8, dtype=torch.float32, grad=True)
    output = autograd.forward_op(*inputs, None, None, None, None, True, 0, False, "variance")[0]
    first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(first[0].sum(), inputs)


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_registered_ops_pass_opcheck(tokens, is_causal):
    inputs = tokens(B=1, H=2, N=20, D=8, dtype=torch.float32, grad=True)
    keep = torch.rand(1, 20) > 0.2
    alpha = torch.ones(1, 2, 1, requires_grad=True)
    for arguments in (
        (*inputs, None, None, None, None, True, 0, is_causal, "variance"),
        (*inputs, keep, keep, alpha, None, True, 8, is_causal, "entropy"),
        (*inputs, None, keep, None, None, False, 8, is_causal, "variance"),
    ):
        torch.library.opcheck(autograd.forward_op, arguments)
    q, k, v = (x.detach() for x in inputs)
    output, *kept = binding.forward(q, k, v, None, None, None, None, True, 0, is_causal, "variance")
    torch.library.opcheck(autograd.backward_op, (output, q, k, v, None, None, *kept, True, 0, is_causal, True))


@needs_compiler
def test_the_op_is_in_the_compiled_graph(tokens):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    inputs = tokens(N=70, D=8, dtype=torch.float32)
    compiled = torch.compile(lln.lln_attention, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), lln.lln_attention(*inputs))
    assert "lln.fused_forward" in graphs[0].code or "fused_forward" in str(graphs[0].graph)


@needs_compiler
@pytest.mark.parametrize("flavour", ["portable", "wide"])
def test_other_flavours_give_the_same(tokens, flavour, monkeypatch):
    """Vectors of 4 floats in plain C, and of 16, which the compiler makes of what the CPU has."""
    flags = ["-DLANES=4"] if flavour == "portable" else ["-march=native", "-DLANES=16"]
    monkeypatch.setitem(build.FLAVOURS, flavour, (flags, set()))
    library = build.open_library(build.build(flavour))
    monkeypatch.setattr(binding, "load", lambda: library)
    for dtype in (torch.float32, torch.float16):
        for is_causal in (False, True):
            inputs = tokens(B=1, H=2, N=70, D=24, dtype=dtype)
            gradient = torch.randn(1, 2, 70, 24).to(dtype)
            attention = functools.partial(lln.lln_diag_attention, is_causal=is_causal, block_size=20)
            other = run(attention, inputs, gradient)
            with monkeypatch.context() as patch:
                patch.setenv("LLN_BACKEND", "torch")
                plain = run(attention, inputs, gradient)
            limit = 1e-5 if dtype == torch.float32 else 5e-3
            for x, y in zip(other, plain, strict=True):
                assert relative(x, y.double()) < limit


def test_reasons(tokens, monkeypatch):
    q, k, v = tokens(N=4, D=8, dtype=torch.float32)
    assert explain(q.double(), k.double(), v.double()) == "cpu: no, dtype is float64; torch: yes"
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
    assert explain(q, k, v) == "cpu: no, LLN_BACKEND=torch; torch: yes"
    monkeypatch.setenv("LLN_BACKEND", "cuda")
    with pytest.raises(ValueError, match="LLN_BACKEND must be cpu, torch or not set, got 'cuda'"):
        lln.lln_attention(q, k, v)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for the compiler")
def test_without_a_compiler_it_warns_once_and_runs(tmp_path):
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit 0\necho no headers here >&2; exit 1\n')
    broken.chmod(0o755)
    script = """
import warnings, torch, lln
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(1, 1, 9, 8)
    lln.lln_attention(x, x, x); lln.lln_attention(x, x, x)
print(len(caught), caught[0].message)
print(lln.backends.explain(x, x, x))
"""
    settings = {**os.environ, "CC": str(broken), "LLN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=settings)
    first, *_, last = done.stdout.strip().splitlines()
    assert first.startswith("1 attention runs in plain torch, because")
    assert "no headers here" in done.stdout
    assert last.endswith("torch: yes")


@needs_compiler
def test_two_processes_build_at_once_and_a_child_of_fork_works(tmp_path):
    script = """
import os, torch, lln
torch.set_num_threads(2)
x = torch.randn(1, 4, 300, 8)
expected = lln.lln_attention(x, x, x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.allclose(lln.lln_attention(x, x, x), expected, atol=1e-5) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    settings = {**os.environ, "LLN_CACHE": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", script]
    both = [subprocess.Popen(command, env=settings) for _ in range(2)]
    assert [x.wait(timeout=200) for x in both] == [0, 0]
    assert len(list((tmp_path / "kernels").iterdir())) == 1
