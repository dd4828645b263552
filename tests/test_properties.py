"""Properties that hold for every input, looked for in inputs that nobody would think of."""

import functools
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lln
from lln import reference

SIZES = st.integers(1, 40)
settings.register_profile("lln", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("lln")


@st.composite
def problems(draw, *, self_attention=False):
    B, Hk, groups, D, Dv = (draw(st.integers(1, high)) for high in (3, 3, 3, 9, 5))
    N = draw(SIZES)
    M = N if self_attention else draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0, 30.0]))
    offset = draw(st.sampled_from([0.0, -2.0, 10.0]))

    def tensor(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset

    mask = torch.rand(B, M, generator=generator) < draw(st.sampled_from([0.2, 0.7, 1.1]))
    value = torch.randn(B, Hk, M, Dv, generator=generator, dtype=torch.float64)
    return tensor(B, Hk * groups, N, D), tensor(B, Hk, M, D), value, mask


@given(problems(), st.sampled_from(["linear", "variance", "entropy"]))
def test_lln_equals_the_reference(problem, matching):
    q, k, v, mask = problem
    options = {"key_padding_mask": mask, "matching": matching}
    got, expected = lln.lln_attention(q, k, v, **options), reference.lln_attention(q, k, v, **options)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@given(problems(self_attention=True), st.integers(1, 50), st.booleans())
def test_lln_diag_equals_the_reference(problem, block_size, is_causal):
    q, k, v, mask = problem
    options = {"key_padding_mask": mask, "block_size": block_size, "is_causal": is_causal}
    got, expected = lln.lln_diag_attention(q, k, v, **options), reference.lln_diag_attention(q, k, v, **options)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@given(problems())
def test_rows_are_convex_combinations_of_kept_values(problem):
    q, k, v, mask = problem
    groups = q.shape[1] // k.shape[1]
    output = lln.lln_attention(q, k, v, key_padding_mask=mask)
    for sample, keep in enumerate(mask):
        kept = v[sample, :, keep].repeat_interleave(groups, 0)
        if keep.any():
            assert (output[sample] <= kept.amax(1, keepdim=True) + 1e-9).all()
            assert (output[sample] >= kept.amin(1, keepdim=True) - 1e-9).all()
        else:
            assert (output[sample] == 0).all()


@given(problems(), st.integers(0, 2**32))
def test_the_order_of_keys_does_not_matter(problem, seed):
    q, k, v, mask = problem
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(seed))
    query_mask = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    attention = functools.partial(lln.lln_attention, query_padding_mask=query_mask)
    shuffled = attention(q, k[:, :, order], v[:, :, order], key_padding_mask=mask[:, order])
    torch.testing.assert_close(shuffled, attention(q, k, v, key_padding_mask=mask), rtol=1e-6, atol=1e-7)


@given(problems(self_attention=True), st.integers(1, 9), st.data())
def test_a_state_fed_in_pieces_is_the_whole(problem, block_size, data):
    q, k, v, mask = problem
    N = q.shape[2]
    cuts = sorted({0, N, *data.draw(st.lists(st.integers(0, N), max_size=5))})
    state = lln.LLNState.empty(
        *q.shape[:2], q.shape[3], v.shape[3], key_heads=k.shape[1], block_size=block_size, dtype=q.dtype
    )
    outputs = []
    for start, end in itertools.pairwise(cuts):
        piece = slice(start, end)
        output, state = state.prefill(q[:, :, piece], k[:, :, piece], v[:, :, piece], key_padding_mask=mask[:, piece])
        outputs.append(output)
    whole = lln.lln_diag_attention(q, k, v, key_padding_mask=mask, block_size=block_size, is_causal=True)
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=1e-6, atol=1e-7)
