"""Properties that hold on every backend for every input, searched for in generated inputs."""

import functools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lln
from helpers import MATCHINGS, empty_for, feed, relative, widest
from lln import reference

SIZES = st.integers(1, 40)
settings.register_profile(
    "lln",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the backend is the same for all examples
)
settings.load_profile("lln")


@st.composite
def problems(draw, backend, *, self_attention=False):
    B, Hk, groups = (draw(st.integers(1, 3)) for _ in range(3))
    dtype = widest(backend)
    D, Dv = (draw(st.integers(1, high)) for high in (9, 5))
    if backend != "torch":
        D, Dv = 8 * D, 8 * Dv
    N = draw(SIZES)
    M = N if self_attention else draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0, 30.0]))
    offset = draw(st.sampled_from([0.0, -2.0, 10.0]))

    def tensor(*shape):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset).to(dtype)

    mask = torch.rand(B, M, generator=generator) < draw(st.sampled_from([0.2, 0.7, 1.1]))
    value = torch.randn(B, Hk, M, Dv, generator=generator, dtype=torch.float64).to(dtype)
    return tensor(B, Hk * groups, N, D), tensor(B, Hk, M, D), value, mask


def assert_same(got, expected):
    if got.dtype == torch.float64:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    else:
        assert relative(got, expected.double()) < 1e-4


def in_double(*inputs):
    return (x.double() for x in inputs)


@given(st.data(), st.sampled_from(MATCHINGS))
def test_lln_equals_the_reference(backend, data, matching):
    q, k, v, mask = data.draw(problems(backend))
    options = {"key_padding_mask": mask, "matching": matching}
    assert_same(lln.lln_attention(q, k, v, **options), reference.lln_attention(*in_double(q, k, v), **options))


@given(st.data(), st.integers(1, 50), st.booleans())
def test_lln_diag_equals_the_reference(backend, data, block_size, is_causal):
    q, k, v, mask = data.draw(problems(backend, self_attention=True))
    options = {"key_padding_mask": mask, "block_size": block_size, "is_causal": is_causal}
    expected = reference.lln_diag_attention(*in_double(q, k, v), **options)
    assert_same(lln.lln_diag_attention(q, k, v, **options), expected)


@given(st.data())
def test_rows_are_convex_combinations_of_kept_values(backend, data):
    q, k, v, mask = data.draw(problems(backend))
    groups = q.shape[1] // k.shape[1]
    output = lln.lln_attention(q, k, v, key_padding_mask=mask)
    rounding = 1e-9 if v.dtype == torch.float64 else 1e-5
    for sample, keep in enumerate(mask):
        kept = v[sample, :, keep].repeat_interleave(groups, 0)
        if keep.any():
            assert (output[sample] <= kept.amax(1, keepdim=True) + rounding).all()
            assert (output[sample] >= kept.amin(1, keepdim=True) - rounding).all()
        else:
            assert (output[sample] == 0).all()


@given(st.data(), st.integers(0, 2**32))
def test_the_order_of_keys_does_not_matter(backend, data, seed):
    q, k, v, mask = data.draw(problems(backend))
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(seed))
    query_mask = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    attention = functools.partial(lln.lln_attention, query_padding_mask=query_mask)
    shuffled = attention(q, k[:, :, order], v[:, :, order], key_padding_mask=mask[:, order])
    assert_same(shuffled, attention(q, k, v, key_padding_mask=mask))


@given(st.data(), st.integers(1, 9))
def test_a_state_fed_in_pieces_is_the_whole(backend, data, block_size):
    q, k, v, mask = data.draw(problems(backend, self_attention=True))
    N = q.shape[2]
    cuts = sorted({0, N, *data.draw(st.lists(st.integers(0, N), max_size=5))})
    output, _ = feed(empty_for(q, k, v, block_size=block_size), (q, k, v), cuts, mask)
    whole = lln.lln_diag_attention(q, k, v, key_padding_mask=mask, block_size=block_size, is_causal=True)
    assert_same(output, whole)
