"""The mechanism on every backend against the explicit reference, over awkward sizes, masks, heads and layouts."""

import functools
import itertools

import pytest
import torch

import lln
from helpers import (
    FUNCTIONS,
    MATCHINGS,
    all_calls,
    all_functions,
    assert_as_exact,
    both,
    causal_or_full,
    compare_call,
    options_of,
    relative,
    run,
)
from lln import reference
from lln.matching import moments
from lln.matching.curves import PUBLISHED_A, PUBLISHED_B

LENGTHS = [(N, mask) for N in (1, 2, 63, 64, 65, 130) for mask in ("none", "lengths", "holes", "left")]
LENGTHS += [(500, "holes"), pytest.param(500, "none", marks=pytest.mark.slow)]
# Tokens, and whether some of them are padding.
SIZES = [(N, "all") for N in (1, 17, 64, 65, 150)] + [(N, "padded") for N in (1, 17, 64, 101)]
SIZES += [pytest.param(N, "all", marks=pytest.mark.slow) for N in (2, 63, 101)]


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


@pytest.mark.parametrize(("N", "mask"), LENGTHS)
@causal_or_full
@all_functions
def test_equals_the_reference(tokens, backend, wide, name, N, is_causal, mask):
    ours, theirs = both(name, key_padding_mask=mask_of(mask, 2, N), is_causal=is_causal)
    inputs = tokens(N=N, H=2, D=8, dtype=wide)
    assert_as_exact(ours(*inputs), theirs(*(x.double() for x in inputs)))


@causal_or_full
@pytest.mark.parametrize(("N", "padded"), SIZES)
@all_calls
def test_values_and_gradients_equal_the_reference(tokens, backend, call, N, padded, is_causal):
    B = 2 if padded == "padded" else 1
    inputs = tokens(B=B, H=2, Hk=1, N=N, D=24, Dv=16, dtype=torch.float32)
    name, options = options_of(call, is_causal, inputs)
    compare_call(name, inputs, key_padding_mask=torch.rand(2, N) < 0.7 if B == 2 else None, **options)


@causal_or_full
@all_calls
def test_padding_shared_keys_and_layouts(tokens, backend, call, is_causal):
    """Padding with holes and on the left, fewer key heads, values of another width, heads beside tokens in memory."""
    inputs = tokens(B=2, H=4, Hk=2, N=90, D=16, Dv=40, dtype=torch.float32)
    keep = torch.rand(2, 90) > 0.3
    keep[1] = torch.arange(90) >= 30
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
    name, options = options_of(call, is_causal, inputs)
    options |= {"key_padding_mask": keep}
    output, *_ = compare_call(name, (q, k, v), **options)
    if backend == "cpu":
        assert output.transpose(1, 2).is_contiguous()
    dirty = [x.masked_fill(~keep[:, None, :, None], torch.nan) for x in (k, v)]
    attention = functools.partial(getattr(lln, name), **options)
    assert torch.equal(attention(q, *dirty), attention(q, k, v))


@pytest.mark.parametrize("D", [8, 64, 72, 256], ids=lambda d: f"D{d}")
@causal_or_full
def test_every_width(tokens, backend, D, is_causal):
    compare_call("lln_diag_attention", tokens(B=1, H=1, N=70, D=D, dtype=torch.float32), is_causal=is_causal)


@pytest.mark.parametrize("matching", MATCHINGS)
@causal_or_full
def test_every_matching(tokens, backend, wide, matching, is_causal):
    compare_call("lln_attention", tokens(H=2, N=70, D=40, dtype=torch.float32), matching=matching, is_causal=is_causal)
    lengths = torch.tensor([70, 41])
    ours, theirs = both("lln_attention", matching=matching, is_causal=is_causal, key_padding_mask=lengths)
    inputs = tokens(N=70, H=3, D=40, dtype=wide)
    assert_as_exact(ours(*inputs), theirs(*(x.double() for x in inputs)))


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (5, 5)], ids=str)
@all_functions
@causal_or_full
def test_grouped_heads_are_repeated_heads(tokens, backend, wide, name, heads, is_causal):
    H, Hk = heads
    q, k, v = tokens(H=H, Hk=Hk, N=37, D=8, Dv=24, dtype=wide)
    attention = functools.partial(getattr(lln, name), is_causal=is_causal)
    repeated = attention(q, k.repeat_interleave(H // Hk, 1), v.repeat_interleave(H // Hk, 1))
    assert_as_exact(attention(q, k, v), repeated, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("N", "M"), [(1, 9), (9, 1), (33, 100), (1, 90), (90, 1)])
def test_cross_attention(tokens, backend, wide, N, M):
    compare_call("lln_attention", tokens(N=N, M=M, H=4, Hk=2, D=16, dtype=torch.float32))
    inputs = tokens(N=N, M=M, D=8, Dv=24, dtype=wide)
    keep = torch.rand(2, M) > 0.3
    keep[:, 0] = True
    ours, theirs = both("lln_attention", key_padding_mask=keep)
    assert_as_exact(ours(*inputs), theirs(*(x.double() for x in inputs)))


def test_query_padding_does_not_count_in_cross_attention(tokens, backend, wide):
    q, k, v = tokens(N=20, M=33, dtype=wide)
    keep = torch.arange(20) < torch.tensor([[20], [11]])
    padded = lln.lln_attention(q, k, v, query_padding_mask=keep)
    alone = lln.lln_attention(q[1:, :, :11], k[1:], v[1:])
    assert_as_exact(padded[1:, :, :11], alone, rtol=1e-12, atol=1e-12)


@all_functions
def test_strided_input(tokens, backend, wide, name):
    q, k, v = tokens(N=50, H=3, dtype=wide)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    sliced = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in (q, k, v)]
    attention = getattr(lln, name)
    for changed in (strided, sliced):
        assert_as_exact(attention(*changed), attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_it_is_the_papers_formula(tokens, backend, wide):
    """Eq. 8 with eq. 10, written out, and the statistics of the paper's code: over the whole batch."""
    q, k, v = tokens(B=3, H=2, N=48, D=64, scale=1.3)
    sigma_q, sigma_k = q.std(), k.std()
    spread = (sigma_q**2 * sigma_k**2 - PUBLISHED_B) / PUBLISHED_A
    alpha, beta = (spread / 2).sqrt() / sigma_q, (spread / 2).sqrt() / sigma_k
    kernel = torch.exp(alpha * q) @ torch.exp(beta * k).mT
    expected = kernel / kernel.sum(-1, keepdim=True) @ v
    assert (PUBLISHED_A, PUBLISHED_B) == (0.14855178144710912, -0.35487039130661086)
    got = lln.lln_attention(*(x.to(wide) for x in (q, k, v)), scope="batch", matching="linear")
    assert_as_exact(got, expected, rtol=1e-10, atol=1e-12)
    found = lln.match_moments(q, k, scope="batch", matching="linear")
    torch.testing.assert_close(found[0], alpha.expand(3, 2), rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], beta.expand(3, 2), rtol=1e-12, atol=0)


def test_batch_scope_counts_kept_tokens_only(tokens, backend, wide):
    inputs = tokens(N=30, D=8, dtype=wide)
    ours, theirs = both("lln_attention", scope="batch", key_padding_mask=torch.tensor([30, 12]))
    assert_as_exact(ours(*inputs), theirs(*(x.double() for x in inputs)), rtol=1e-10, atol=1e-12)


@causal_or_full
@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 3), (1, 3), (2, 1), (2, 3, 9), (1, 1, 9)], ids=str)
def test_given_scales_of_every_shape(tokens, backend, wide, shape, is_causal):
    inputs = tokens(B=2, H=3, N=9, D=8, dtype=wide)
    expected = reference.lln_attention(*(x.double() for x in inputs), alpha=1.5, beta=0.5, is_causal=is_causal)
    alpha, beta = torch.full(shape, 1.5), torch.full(shape, 0.5)
    got = lln.lln_attention(*inputs, alpha=alpha, beta=beta, is_causal=is_causal)
    assert_as_exact(got, expected)


def test_a_scale_that_is_not_given_is_matched(tokens, backend, wide):
    q, k, v = tokens(B=2, H=3, N=9, D=8, dtype=wide)
    matched = lln.match_moments(q, k)[1]
    got = lln.lln_attention(q, k, v, alpha=1.5)
    assert_as_exact(got, lln.lln_attention(q, k, v, alpha=1.5, beta=matched))


@pytest.mark.parametrize("kind", ["lln", "lln_diag", "block_diagonal", "softmax"])
@causal_or_full
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


@pytest.mark.parametrize("N", [32, 33, 100])
def test_long_sequences_pass_in_pieces(tokens, backend, wide, monkeypatch, N):
    """Nothing changes where a sequence is cut into pieces, also at whole pieces and one token more."""
    inputs = tokens(N=N, H=2, dtype=wide)
    keep = torch.arange(N) < torch.tensor([[N], [N - 9]])
    calls = [
        functools.partial(getattr(lln, name), key_padding_mask=mask, is_causal=is_causal)
        for name, mask, is_causal in itertools.product(FUNCTIONS, (None, keep), (False, True))
    ]
    calls.append(functools.partial(lln.block_diagonal_attention, block_size=16))
    whole = [call(*inputs) for call in calls]
    monkeypatch.setattr(moments, "CHUNK_TOKENS", 16)
    for x, call in zip(whole, calls, strict=True):
        assert_as_exact(call(*inputs), x, rtol=1e-10, atol=1e-11)


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


@pytest.mark.parametrize("factor", [1e3, 1e4, 1e5])
def test_gradients_of_values_with_an_outlier_among_the_keys(backend, factor):
    q, k, v, gradient = (torch.randn(1, 1, 4096, 64) for _ in range(4))
    k[:, :, 7] *= factor
    ours = run(lln.lln_attention, (q, k, v), gradient)[3]
    with lln.backends.use("torch"):
        theirs = run(lln.lln_attention, (q, k, v), gradient, torch.float64)[3]
    assert relative(ours, theirs) < 1e-5
