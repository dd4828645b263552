"""The Triton kernels against the float64 reference, on a GPU or in the interpreter."""

import functools

import pytest
import torch

import lln
from lln import reference
from lln.backends import explain
from lln.backends.triton import configs

pytestmark = pytest.mark.usefixtures("full_of_nan")


def run(module, name, inputs, gradient, dtype, keep=None, **options):
    """Output and gradients; scales and log-weights that are tensors have gradients too."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
    if keep is not None and module is reference:
        leaves = [x.detach().nan_to_num().requires_grad_() for x in leaves]
    if "centers" in options:
        options["centers"] = tuple(x.to(dtype) for x in options["centers"])
    options = {n: x.to(dtype).requires_grad_() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    leaves += [x for x in options.values() if isinstance(x, torch.Tensor)]
    output = getattr(module, name)(*leaves[:3], key_padding_mask=keep, **options)
    if keep is not None and keep.shape[1] == output.shape[2]:
        output = output.masked_fill(~keep[:, None, :, None], 0.0)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))]


def compare(name, inputs, keep=None, **options):
    """float32 within 5e-6, gradients within 1e-5 of the largest."""
    q, _, v = inputs
    gradient = torch.randn(*q.shape[:3], v.shape[3])
    if keep is not None and keep.shape[1] == q.shape[2]:
        gradient = gradient.masked_fill(~keep[:, None, :, None], 0.0)
    ours = run(lln, name, inputs, gradient, torch.float32, keep, **options)
    theirs = run(reference, name, inputs, gradient, torch.float64, keep, **options)
    unit = max(float(x.abs().max()) for x in theirs[1:4])
    assert (ours[0] - theirs[0]).abs().max() < 5e-6
    for x, y in zip(ours[1:4], theirs[1:4], strict=True):
        assert (x - y).abs().max() < 1e-5 * unit
    for x, y in zip(ours[4:], theirs[4:], strict=True):
        assert (x - y).abs().max() < 1e-5 * y.abs().max()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("N", [1, 2, 3, 63, 65, 129], ids=lambda n: f"N{n}")
def test_awkward_lengths(tokens, triton_backend, N, is_causal):
    inputs = tokens(B=1, H=2, Hk=1, N=N, D=12, Dv=20, dtype=torch.float32)
    compare("lln_attention", inputs, is_causal=is_causal)
    compare("block_diagonal_attention", inputs, is_causal=is_causal, block_size=50, near="window")
    assert {"summarize_kernel", "near_kernel", "causal_kernel" if is_causal else "recall_kernel"} <= set(triton_backend)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["paper", "unbiased", "decomposed"])
def test_padding_that_is_nan_and_samples_without_tokens(tokens, triton_backend, form, is_causal):
    inputs = tokens(B=3, H=2, Hk=1, N=20, D=16, dtype=torch.float32)
    keep = torch.rand(3, 20) < 0.6
    keep[1], keep[2] = False, torch.arange(20) >= 7
    for x in inputs:
        x.masked_fill_(~keep[:, None, :, None], torch.nan)
    more = {}
    if is_causal and form == "decomposed":
        more["centers"] = (torch.zeros(2, 16, dtype=torch.float64).add(0.2), torch.zeros(1, 16).double().sub(0.1))
    compare("lln_diag_attention", inputs, keep, is_causal=is_causal, form=form, block_size=6, **more)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["tokens", "strided"])
def test_layouts_of_inputs_and_gradients(tokens, triton_backend, layout, is_causal):
    inputs = tokens(B=2, H=2, N=20, D=16, dtype=torch.float32)
    attention = functools.partial(lln.lln_diag_attention, is_causal=is_causal, block_size=7)
    gradient = torch.randn(2, 2, 20, 16)
    plain = [x.requires_grad_() for x in inputs]
    expected = torch.autograd.grad(attention(*plain), plain, gradient)
    if layout == "tokens":
        others = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        others = [torch.stack((x, x + 1), dim=-1)[..., 0].detach() for x in inputs]
        gradient = torch.stack((gradient, gradient + 1), dim=-1)[..., 0]
    others = [x.requires_grad_() for x in others]
    output = attention(*others)
    assert (output.stride(1) < output.stride(2)) == (layout == "tokens")
    for x, y in zip(torch.autograd.grad(output, others, gradient), expected, strict=True):
        assert torch.equal(x, y)


def test_gradients_whose_rows_overlap(tokens, triton_backend):
    """torch.empty_like gives a tensor like this one whose features are apart."""
    inputs = tokens(B=1, H=2, N=9, D=16, dtype=torch.float32)
    gradient = torch.randn(1, 2, 24).unfold(2, 16, 1)
    gradients = gradient, gradient.contiguous()
    both = [run(lln, "lln_attention", inputs, x, torch.float32, is_causal=True) for x in gradients]
    for x, y in zip(*both, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["paper", "unbiased"])
def test_scales_of_tokens_and_weights_of_keys_have_gradients(tokens, triton_backend, form, is_causal):
    options = {name: torch.rand(2, 2, 20) + 0.5 for name in ("alpha", "beta")} | {"key_weight": torch.randn(2, 2, 20)}
    inputs = tokens(B=2, H=2, Hk=1, N=20, D=16, dtype=torch.float32)
    compare("lln_attention", inputs, form=form, is_causal=is_causal, **options)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["paper", "unbiased"])
def test_keys_that_grow_and_grow(tokens, triton_backend, form, is_causal):
    """Inside a causal chunk the product of exponentials would overflow: one feature at a time does not."""
    q, k, v = tokens(B=1, H=1, N=40, D=16, dtype=torch.float32)
    inputs = q, k * torch.linspace(1, 400, 40)[:, None], v
    compare("lln_attention", inputs, alpha=1.0, beta=1.0, form=form, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["paper", "unbiased"])
@pytest.mark.parametrize("N", [1, 20], ids=lambda n: f"N{n}")
def test_gradients_beside_a_key_with_all_weight(tokens, triton_backend, N, form, is_causal):
    """alpha is in the thousands then, and gradients of queries vanish but for rounding, which it multiplies."""
    q, k, v = tokens(B=1, H=2, N=N, D=24, Dv=40, dtype=torch.float32)
    k[0, 0, N // 2] *= 5000
    compare("lln_attention", (q, k, v), form=form, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_are_finite_beside_a_huge_key(tokens, triton_backend, is_causal):
    """Rounding leaves no digit of its weight."""
    q, k, v = (x.requires_grad_() for x in tokens(B=1, H=1, N=20, D=16, dtype=torch.float32))
    scale = torch.ones(20)
    scale[10] = 1e12
    output = lln.lln_attention(q, k * scale[:, None], v, alpha=1.0, beta=1.0, is_causal=is_causal)
    for x in (output, *torch.autograd.grad(output.square().sum(), (q, k, v))):
        assert x.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("matching", ["variance", "entropy", "linear"])
def test_matching_of_large_tokens(tokens, triton_backend, matching, is_causal):
    inputs = tokens(B=1, H=2, Hk=1, N=30, D=16, scale=4.0, dtype=torch.float32)
    inputs[2] /= 4.0
    compare("lln_attention", inputs, matching=matching, is_causal=is_causal, form="unbiased")


def test_more_splits_than_one(tokens, triton_backend):
    """Summaries of splits are merged in order; 600 tokens are three splits."""
    assert configs.split_of(600, is_float32=True) == (3, 256)
    inputs = tokens(B=1, H=1, N=600, D=16, dtype=torch.float32)
    compare("lln_attention", inputs)
    compare("lln_attention", inputs, is_causal=True)


def test_splits_cover_every_length():
    for tokens in (1, 255, 256, 257, 1024, 8192, 10_000, 100_000, 1_000_000):
        for is_float32 in (False, True):
            number, size = configs.split_of(tokens, is_float32=is_float32)
            assert (number - 1) * size < tokens <= number * size
            assert size % configs.ALIGNMENT == 0


def test_cross_attention(tokens, triton_backend):
    for N, M in ((20, 37), (37, 9)):
        inputs = tokens(B=2, H=2, Hk=1, N=N, M=M, D=16, dtype=torch.float32)
        keep = torch.rand(2, M) < 0.6
        keep[:, 0] = True
        compare("lln_attention", inputs, keep, form="decomposed")


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_wide_heads_have_blocks_of_values(tokens, triton_backend, is_causal):
    width, value_width = (60, 100) if is_causal else (100, 128)
    inputs = tokens(B=1, H=1, N=20, D=width, Dv=value_width, dtype=torch.float32)
    compare("lln_attention", inputs, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_packed_sequences(tokens, triton_backend, is_causal):
    inputs = tokens(B=1, H=2, Hk=1, N=30, D=16, dtype=torch.float32)
    starts = torch.tensor([0, 0, 13, 14, 14, 30], dtype=torch.int32)
    options = {"is_causal": is_causal, "block_size": 4}
    ours = lln.lln_diag_attention(*inputs, cu_seqlens=starts, **options)
    for first, last in ((0, 13), (13, 14), (14, 30)):
        part = [x[:, :, first:last].double() for x in inputs]
        theirs = reference.lln_diag_attention(*part, **options)
        assert (ours[:, :, first:last] - theirs).abs().max() < 5e-6


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_no_worse_than_twice_the_plain_formula(tokens, triton_backend, dtype, is_causal):
    """Products are rounded here as tensor cores round them; three times for gradients."""
    inputs = tokens(B=1, H=2, Hk=1, N=40, D=16, dtype=dtype)
    gradient = torch.randn(1, 2, 40, 16).to(dtype)
    options = {"is_causal": is_causal, "block_size": 8, "alpha": 1.3, "beta": 0.7}
    exact = run(reference, "lln_diag_attention", inputs, gradient, torch.float64, **options)
    ours = run(lln, "lln_diag_attention", inputs, gradient, dtype, **options)
    plain = run(reference, "lln_diag_attention", inputs, gradient, dtype, **options)
    for x, y, z, factor in zip(ours, plain, exact, (2, 3, 3, 3), strict=True):
        assert (x - z).abs().max() <= factor * (y - z).abs().max()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_what_is_not_finite_shows_in_later_rows_only(tokens, triton_backend, is_causal):
    for where in (1, 2):
        inputs = tokens(B=1, H=1, N=40, D=16, dtype=torch.float32)
        attention = functools.partial(lln.lln_diag_attention, is_causal=is_causal, block_size=8)
        clean = attention(*inputs)
        inputs[where][0, 0, 20, 3] = -torch.inf
        dirty = attention(*inputs)
        assert not dirty[:, :, 20:].isfinite().all(dim=-1).any()
        if is_causal:
            torch.testing.assert_close(dirty[:, :, :20], clean[:, :, :20])


def test_the_same_bits_every_time_and_whatever_the_batch(tokens, triton_backend):
    inputs = tokens(B=2, H=2, N=20, D=16, dtype=torch.float32)
    gradient = torch.randn(2, 2, 20, 16)
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "block_size": 6}
        both = [run(lln, "lln_diag_attention", inputs, gradient, torch.float32, **options) for _ in range(2)]
        alone = run(lln, "lln_diag_attention", [x[:1] for x in inputs], gradient[:1], torch.float32, **options)
        for x, y, z in zip(*both, alone, strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x[:1], z)


def test_reasons(tokens, monkeypatch):
    monkeypatch.setenv("LLN_BACKEND", "triton")
    q, k, v = tokens(B=1, N=4, D=8, dtype=torch.float32)
    assert "triton: yes" in explain(q, k, v)
    assert "triton: no, dtype is float64" in explain(q.double(), k.double(), v.double())
    assert "triton: no, value width 300 is larger than 128" in explain(q, k, torch.zeros(1, 4, 4, 300))
    wide = torch.zeros(1, 1, 4, 256, dtype=torch.float16)
    assert "triton: yes" in explain(wide, wide, wide)
    assert "triton: no, causal attention of head dimension 256 is wider than 64" in explain(
        wide, wide, wide, is_causal=True
    )
    assert "triton: no, width 256 is larger than 128, the most for attention among neighbours" in explain(
        wide, wide, wide, block_size=4
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "triton: no, device is cpu" in explain(q.cpu(), k.cpu(), v.cpu())
