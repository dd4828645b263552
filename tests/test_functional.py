"""The mechanism against the explicit reference, over awkward sizes, dtypes, layouts and transformations."""

import functools
import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import lln
from lln import reference
from lln.matching.curves import PUBLISHED_A, PUBLISHED_B

FUNCTIONS = ["lln_attention", "block_diagonal_attention", "lln_diag_attention"]
LENGTHS = [1, 2, 63, 64, 65, 130, 500]


def both(name, **options):
    return (functools.partial(getattr(module, name), **options) for module in (lln, reference))


def mask_of(kind, batch, tokens):
    if kind == "none":
        return None
    if kind == "lengths":
        return torch.tensor([tokens, tokens // 2][:batch])
    keep = torch.rand(batch, tokens) > 0.4
    keep[0] = True
    if kind == "left":
        keep[-1] = torch.arange(tokens) >= tokens // 3
    return keep


@pytest.mark.parametrize("mask", ["none", "lengths", "holes", "left"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("N", LENGTHS, ids=lambda n: f"N{n}")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_reference(tokens, name, N, is_causal, mask):
    ours, theirs = both(name, key_padding_mask=mask_of(mask, 2, N), is_causal=is_causal)
    inputs = tokens(N=N, H=2, D=8)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_matching_equals_the_reference(tokens, matching, is_causal):
    ours, theirs = both(
        "lln_attention", matching=matching, is_causal=is_causal, key_padding_mask=torch.tensor([70, 41])
    )
    inputs = tokens(N=70, H=3, D=40)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_grouped_heads_are_repeated_heads(tokens, name, heads, is_causal):
    H, Hk = heads
    q, k, v = tokens(H=H, Hk=Hk, N=37, D=8, Dv=5)
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    repeated = attention(q, k.repeat_interleave(H // Hk, 1), v.repeat_interleave(H // Hk, 1))
    torch.testing.assert_close(attention(q, k, v), repeated, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("N", "M"), [(1, 9), (9, 1), (33, 100)])
def test_cross_attention(tokens, N, M):
    inputs = tokens(N=N, M=M, D=8, Dv=3)
    keep = torch.rand(2, M) > 0.3
    keep[:, 0] = True
    ours, theirs = both("lln_attention", key_padding_mask=keep)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs), rtol=1e-9, atol=1e-10)


def test_query_padding_does_not_count_in_cross_attention(tokens):
    q, k, v = tokens(N=20, M=33)
    keep = torch.arange(20) < torch.tensor([[20], [11]])
    padded = lln.lln_attention(q, k, v, query_padding_mask=keep)
    alone = lln.lln_attention(q[1:, :, :11], k[1:], v[1:])
    torch.testing.assert_close(padded[1:, :, :11], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strided_input(tokens, name):
    q, k, v = tokens(N=50, H=3)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    sliced = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in (q, k, v)]
    attention = getattr(lln, name)
    for changed in (strided, sliced):
        torch.testing.assert_close(attention(*changed), attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_it_is_the_papers_formula(tokens):
    """Eq. 8 with eq. 10, written out, and the statistics of the paper's code: over the whole batch."""
    q, k, v = tokens(B=3, H=2, N=48, D=64, scale=1.3)
    sigma_q, sigma_k = q.std(), k.std()
    spread = (sigma_q**2 * sigma_k**2 - PUBLISHED_B) / PUBLISHED_A
    alpha, beta = (spread / 2).sqrt() / sigma_q, (spread / 2).sqrt() / sigma_k
    kernel = torch.exp(alpha * q) @ torch.exp(beta * k).mT
    expected = kernel / kernel.sum(-1, keepdim=True) @ v
    assert (PUBLISHED_A, PUBLISHED_B) == (0.14855178144710912, -0.35487039130661086)
    torch.testing.assert_close(
        lln.lln_attention(q, k, v, scope="batch", matching="linear"), expected, rtol=1e-10, atol=1e-12
    )
    found = lln.match_moments(q, k, scope="batch", matching="linear")
    torch.testing.assert_close(found[0], alpha.expand(3, 2), rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], beta.expand(3, 2), rtol=1e-12, atol=0)


def test_batch_scope_counts_kept_tokens_only(tokens):
    q, k, v = tokens(N=30, D=8)
    ours, theirs = both("lln_attention", scope="batch", key_padding_mask=torch.tensor([30, 12]))
    torch.testing.assert_close(ours(q, k, v), theirs(q, k, v), rtol=1e-10, atol=1e-12)


def test_given_scales_of_every_shape(tokens):
    q, k, v = tokens(B=2, H=3, N=9, D=8)
    expected = reference.lln_attention(q, k, v, alpha=1.5, beta=0.5)
    for shape in [(), (3,), (1,), (2, 3), (1, 3), (2, 1), (2, 3, 9), (1, 1, 9)]:
        alpha, beta = torch.full(shape, 1.5), torch.full(shape, 0.5)
        for is_causal in (False, True):
            want = expected if not is_causal else reference.lln_attention(q, k, v, alpha=1.5, beta=0.5, is_causal=True)
            torch.testing.assert_close(lln.lln_attention(q, k, v, alpha=alpha, beta=beta, is_causal=is_causal), want)
    one = lln.lln_attention(q, k, v, alpha=1.5)  # the other one is matched
    matched = lln.match_moments(q, k)[1]
    torch.testing.assert_close(one, lln.lln_attention(q, k, v, alpha=1.5, beta=matched))


def test_scales_are_constants_unless_given_to_learn(tokens):
    q, k, v = tokens(N=12, grad=True)
    alpha, beta = lln.match_moments(q, k)
    assert not alpha.requires_grad
    assert not beta.requires_grad
    learned = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: lln.lln_attention(q.detach(), k.detach(), v.detach(), alpha=a, beta=a), learned)


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, True, False, True, True]])], ids=["all", "padded"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_first_and_second_order(tokens, name, is_causal, mask):
    options = {"key_padding_mask": mask, "is_causal": is_causal}
    options |= {} if name == "lln_attention" else {"block_size": 2}
    options |= {} if name == "block_diagonal_attention" else {"alpha": 1.3, "beta": 0.7}
    attention = functools.partial(getattr(lln, name), **options)
    inputs = tokens(B=1, H=2, N=5, D=3, Dv=2, grad=True)
    assert gradcheck(attention, inputs)
    assert gradgradcheck(attention, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_low_precision_is_at_most_twice_as_wrong_as_the_plain_formula(tokens, name, is_causal, dtype):
    """Against float64; the plain formula in the same dtype is the reference (gradients: three times)."""
    inputs = tokens(B=1, H=2, N=96, D=32, dtype=dtype)
    ours, theirs = both(name, is_causal=is_causal)
    if name != "block_diagonal_attention":  # statistics aside: what is compared is the attention
        ours, theirs = (functools.partial(f, alpha=1.25, beta=1.25) for f in (ours, theirs))

    def run(attention, dtype):
        x = [t.detach().to(dtype).requires_grad_() for t in inputs]
        output = attention(*x)
        output.backward(torch.ones_like(output) * torch.linspace(-1, 1, output.shape[-1], dtype=dtype))
        return [output, *(t.grad for t in x)]

    exact = run(theirs, torch.float64)
    got, plain = run(ours, dtype), run(theirs, dtype)
    assert got[0].dtype == dtype
    for i, factor in enumerate((2, 3, 3, 3)):
        error, allowed = ((x[i].double() - exact[i]).abs().max() for x in (got, plain))
        assert error <= factor * allowed + 1e-12, f"{'oqkv'[i]}: {error:.2e} against {allowed:.2e}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_has_its_dtype_as_sdpa(tokens, name):
    q, k, v = tokens(N=40, dtype=torch.float32)
    attention = getattr(lln, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attention(q.bfloat16(), k, v)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q.bfloat16(), k, v)
    assert mixed.dtype == sdpa.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()), rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 1e4, 1e8])
def test_extreme_input_is_finite_and_so_are_gradients(tokens, name, scale, is_causal):
    q, k, v = (x.requires_grad_() for x in tokens(N=70, dtype=torch.float32))
    output = getattr(lln, name)(q * scale, k * scale, v, is_causal=is_causal)
    output.square().sum().backward()
    for x in (output, q.grad, k.grad, v.grad):
        assert x.isfinite().all()
    assert output.min() >= v.min() - 1e-5  # rows are convex combinations of values
    assert output.max() <= v.max() + 1e-5


@pytest.mark.parametrize("magnitude", [1e15, 1e19, 1e30, 3e38], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("matching", ["linear", "variance", "entropy"])
def test_lln_is_finite_for_any_finite_input(tokens, magnitude, is_causal, matching):
    q, k, v = tokens(N=33, dtype=torch.float32)
    q, k = (x / x.abs().max() * magnitude for x in (q, k))
    assert lln.lln_attention(q, k, v, is_causal=is_causal, matching=matching).isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_constant_input_gives_uniform_attention(tokens, name, is_causal):
    _, _, v = tokens(N=64, dtype=torch.float32)
    q, k = torch.full((2, 4, 64, 16), 0.1), torch.full((2, 4, 64, 16), -7.3)
    output = getattr(lln, name)(q, k, v, is_causal=is_causal)
    uniform = v.cumsum(2) / torch.arange(1, 65)[:, None] if is_causal else v.mean(2, keepdim=True).expand_as(v)
    torch.testing.assert_close(output, uniform, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_input_that_is_not_finite_shows(tokens, where, bad, is_causal):
    """As in SDPA, the rows that saw it are not finite (and, unlike with SDPA, causal rows before it are)."""
    inputs = tokens(N=20, dtype=torch.float32)
    inputs[where][0, 1, 7, 3] = bad
    sdpa = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    saw = ~sdpa.isfinite()
    saw[:, :, :7] &= not is_causal
    for name in FUNCTIONS:
        shown = ~getattr(lln, name)(*inputs, is_causal=is_causal).isfinite()
        assert shown[saw].all()
        assert shown[0, 1, 7].any() or name == "block_diagonal_attention"
        assert not shown[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    ("B", "N", "M", "V"), [(0, 5, 5, 8), (2, 0, 0, 8), (2, 5, 5, 0), (2, 5, 0, 8), (2, 0, 5, 8), (0, 0, 0, 0)], ids=str
)
def test_empty_input_gives_zeros_with_gradients(B, N, M, V, masked, dtype):
    """No sample, no query, no key or no value feature: shapes and zero gradients as SDPA has them."""
    shapes = (B, 4, N, 16), (B, 2, M, 16), (B, 2, M, V)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    keep = torch.ones(B, M, dtype=torch.bool) if masked else None
    for name, is_causal in itertools.product(FUNCTIONS if N == M else ["lln_attention"], (False, True)):
        if is_causal and N != M:
            continue
        output = getattr(lln, name)(*inputs, key_padding_mask=keep, is_causal=is_causal)
        assert output.shape == (B, 4, N, V)
        assert (output == 0).all()
        for x, gradient in zip(inputs, torch.autograd.grad(output.sum(), inputs), strict=True):
            assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("kind", ["lln", "lln_diag", "block_diagonal", "softmax"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_attention_matrix(tokens, kind, is_causal):
    q, k, v = tokens(N=37, Hk=2, Dv=5)
    keep = torch.arange(37) < torch.tensor([[37], [20]])
    options = {"kind": kind, "is_causal": is_causal, "key_padding_mask": keep}
    matrix = lln.attention_matrix(q, k, **options)
    torch.testing.assert_close(matrix, reference.attention_matrix(q, k, **options), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(matrix[0].sum(-1), torch.ones(4, 37, dtype=torch.float64))
    assert (matrix[1, :, :, 20:] == 0).all()
    if is_causal:
        assert (matrix.triu(1) == 0).all()
    if kind == "softmax":
        allowed = keep[:, None, None].expand(2, 1, 37, 37)
        mask = allowed.tril() if is_causal else allowed
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(matrix @ v.repeat_interleave(2, 1), sdpa)


def test_block_of_any_size_with_softmax_as_the_limit(tokens):
    q, k, v = tokens(N=50)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for block_size in (50, 51, 1000):
        torch.testing.assert_close(lln.block_diagonal_attention(q, k, v, block_size=block_size), sdpa(q, k, v))
        causal = lln.block_diagonal_attention(q, k, v, block_size=block_size, is_causal=True)
        torch.testing.assert_close(causal, sdpa(q, k, v, is_causal=True))
    torch.testing.assert_close(lln.block_diagonal_attention(q, k, v, block_size=1), v)


def test_long_sequences_pass_in_pieces(tokens, monkeypatch):
    """Nothing changes where a sequence is cut into pieces, also at whole pieces and one token more."""
    from lln.backends.torch.blocks import block_diagonal_attention
    from lln.matching import moments

    for N in (32, 33, 100):
        inputs = tokens(N=N, H=2)
        keep = torch.arange(N) < torch.tensor([[N], [N - 9]])
        calls = [
            functools.partial(getattr(lln, name), key_padding_mask=mask, is_causal=is_causal)
            for name in FUNCTIONS
            for mask in (None, keep)
            for is_causal in (False, True)
        ]
        whole = [call(*inputs) for call in calls]
        with monkeypatch.context() as patch:
            patch.setattr(moments, "CHUNK_TOKENS", 16)
            pieces = [call(*inputs) for call in calls]
            cut = block_diagonal_attention(*inputs, None, block_size=16, is_causal=False)
        torch.testing.assert_close(cut, lln.block_diagonal_attention(*inputs, block_size=16))
        for x, y in zip(whole, pieces, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["block_diagonal", "softmax", "lln_diag"])
def test_matrices_of_packed_sequences(tokens, kind):
    q, k, _ = tokens(B=1, H=2, N=9, D=4)
    matrix = lln.attention_matrix(q, k, kind=kind, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    assert not matrix[..., :4, 4:].any()
    assert not matrix[..., 4:, :4].any()
    part = lln.attention_matrix(q[:, :, 4:], k[:, :, 4:], kind=kind)
    torch.testing.assert_close(matrix[..., 4:, 4:], part)


def test_a_matrix_of_windows(tokens):
    q, k, _ = tokens(B=1, H=2, N=9, D=4)
    options = {"kind": "block_diagonal", "near": "window", "block_size": 3}
    matrix = lln.attention_matrix(q, k, **options)
    torch.testing.assert_close(matrix, reference.attention_matrix(q, k, **options))
    torch.testing.assert_close(matrix.ne(0), torch.ones(9, 9).tril(1).triu(-1).bool().expand_as(matrix))
