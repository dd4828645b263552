"""Packed sequences on every backend: each is computed as it is alone, and no value crosses a border."""

import functools

import pytest
import torch

import lln
from helpers import FORMS, only_cpu

CALLS = {
    "lln": ("lln_attention", {}),
    "lln-causal": ("lln_attention", {"is_causal": True}),
    "unbiased": ("lln_attention", {"form": "unbiased"}),
    "diag": ("lln_diag_attention", {"block_size": 8}),
    "window-causal": ("lln_diag_attention", {"block_size": 8, "near": "window", "is_causal": True}),
    "blocks": ("block_diagonal_attention", {"block_size": 8}),
}
LENGTHS = {"uneven": [5, 1, 0, 17, 40, 3], "equal": [16, 16, 16], "one": [30], "mostly empty": [0, 0, 7, 0]}
LENGTHS["long"] = [130, 130]  # several tiles of a window


def starts_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("call", CALLS)
def test_each_sequence_is_computed_as_alone(tokens, backend, wide, call, lengths):
    name, options = CALLS[call]
    starts = starts_of(LENGTHS[lengths])
    inputs = tokens(B=1, H=4, Hk=2, N=int(starts[-1]), D=16, dtype=wide, grad=True)
    output = getattr(lln, name)(*inputs, cu_seqlens=starts, **options)
    gradient = torch.randn_like(output)
    found = [output, *torch.autograd.grad(output, inputs, gradient)]
    parts = [x.split(LENGTHS[lengths], dim=2) for x in inputs]
    alone = torch.cat([getattr(lln, name)(*part, **options) for part in zip(*parts, strict=True)], dim=2)
    for x, y in zip(found, [alone, *torch.autograd.grad(alone, inputs, gradient)], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noise", [1e30, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("lengths", ["uneven", "equal", "long"])
@pytest.mark.parametrize("call", CALLS)
def test_no_value_crosses_a_border(tokens, backend, wide, call, lengths, noise):
    name, options = CALLS[call]
    starts = starts_of(LENGTHS[lengths])
    attention = functools.partial(getattr(lln, name), cu_seqlens=starts, **options)
    clean = tokens(B=1, N=int(starts[-1]), dtype=wide)
    own = slice(int(starts[-2]), None)  # the last sequence
    dirty = [torch.full_like(x, noise) for x in clean]
    for x, y in zip(dirty, clean, strict=True):
        x[:, :, own] = y[:, :, own]
    results = []
    for inputs in (clean, dirty):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attention(*leaves)[:, :, own]
        output.square().sum().backward()
        results.append([output, *(x.grad[:, :, own] for x in leaves)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [[5, 1, 0, 17, 3], [140, 200, 7], [8, 8, 8]], ids=str)
def test_forms_leave_nan_where_it_is(tokens, backend, form, lengths):
    starts = starts_of(lengths)
    clean = tokens(B=1, N=int(starts[-1]), dtype=torch.float32)
    own = slice(int(starts[1]), int(starts[2]))  # the second sequence
    results = []
    for noise in (0.5, torch.nan):
        leaves = [torch.full_like(x, noise) for x in clean]
        for x, y in zip(leaves, clean, strict=True):
            x[:, :, own] = y[:, :, own]
            x.requires_grad_()
        output = lln.lln_diag_attention(*leaves, cu_seqlens=starts, form=form, block_size=4)[:, :, own]
        output.square().sum().backward()
        results.append([output, *(x.grad[:, :, own] for x in leaves)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("token_first", [False, True], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("lengths", [[130, 5, 200, 6, 1], [16, 16]], ids=str)
@only_cpu
def test_memory_order_is_kept(tokens, backend, token_first, lengths):
    """As the layers of a model lay out heads, so that they are joined without a copy; and so are gradients."""
    starts = starts_of(lengths)
    inputs = [x.detach() for x in tokens(B=1, N=int(starts[-1]), dtype=torch.float32)]
    if token_first:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    leaves = [x.requires_grad_() for x in inputs]
    output = lln.lln_attention(*leaves, cu_seqlens=starts.long()[:, None].expand(-1, 2)[:, 0])
    expected = lln.lln_attention(*(x.contiguous() for x in leaves), cu_seqlens=starts)
    torch.testing.assert_close(output, expected)
    for x in (output, *torch.autograd.grad(output.sum(), leaves)):
        assert (x.stride(1) < x.stride(2)) == token_first


def test_a_graph_breaks_at_packed_sequences(tokens):
    inputs, starts = tokens(B=1, N=20, dtype=torch.float32), torch.tensor([0, 5, 20])

    def double(query, key, value, starts):
        return 2 * lln.lln_attention(query, key, value, cu_seqlens=starts)

    expected = double(*inputs, starts)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(double, backend="eager")(*inputs, starts), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without fullgraph=True"):
        torch.compile(double, backend="eager", fullgraph=True)(*inputs, starts)


def test_scales_and_centers_of_packed_sequences(tokens, backend, wide):
    q, k, v = tokens(B=1, H=2, N=30, D=8, dtype=wide)
    starts = starts_of([12, 18])
    alpha, beta = torch.rand(1, 2, 30) + 0.5, torch.rand(2) + 0.5
    centers = torch.randn(1, 2, 8, dtype=wide), torch.randn(2, 8, dtype=wide)
    options = {"beta": beta, "form": "decomposed", "centers": centers}
    packed = lln.lln_attention(q, k, v, cu_seqlens=starts, alpha=alpha, **options)
    for part in (slice(0, 12), slice(12, 30)):
        alone = lln.lln_attention(*(x[:, :, part] for x in (q, k, v)), alpha=alpha[..., part], **options)
        torch.testing.assert_close(packed[:, :, part], alone)


WRONG = {
    "float": (torch.tensor([0.0, 8.0]), TypeError, "int32 tensor"),
    "list": ([0, 8], TypeError, "int32 tensor"),
    "end": (torch.tensor([0, 7]), ValueError, r"from 0 to the 8 tokens, got \[0, 7\]"),
    "start": (torch.tensor([1, 8]), ValueError, "from 0 to the 8 tokens"),
    "falling": (torch.tensor([0, 6, 4, 8]), ValueError, "from 0 to the 8 tokens"),
    "empty": (torch.tensor([], dtype=torch.int32), ValueError, "from 0 to the 8 tokens"),
    "device": (torch.tensor([0, 8], device="meta"), ValueError, "cu_seqlens is on meta and query on cpu"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_sequences_are_refused(tokens, wrong):
    starts, kind, message = WRONG[wrong]
    with pytest.raises(kind, match=message):
        lln.lln_attention(*tokens(B=1, N=8), cu_seqlens=starts)


WRONG_OPTIONS = {
    "alpha of a batch": {"alpha": torch.ones(3, 4)},
    "alpha of other tokens": {"alpha": torch.ones(1, 4, 16)},
    "centers of a batch": {"form": "decomposed", "centers": (torch.zeros(3, 4, 16), torch.zeros(3, 4, 16))},
    "scope": {"scope": "batch"},
}


@pytest.mark.parametrize("wrong", WRONG_OPTIONS)
def test_options_that_are_not_for_one_sample_are_refused(tokens, wrong):
    with pytest.raises(ValueError, match=r"must have shape|use scope"):
        lln.lln_attention(*tokens(B=1, N=8), cu_seqlens=torch.tensor([0, 3, 8]), **WRONG_OPTIONS[wrong])


def test_no_tokens_at_all(tokens):
    inputs = tokens(B=1, N=8, grad=True)
    output = lln.lln_attention(*(x[:, :, :0] for x in inputs), cu_seqlens=torch.tensor([0, 0]))
    assert output.grad_fn is not None
    with pytest.raises(ValueError, match="matching must be one of"):
        lln.lln_attention(*(x[:, :, :0] for x in inputs), cu_seqlens=torch.tensor([0, 0]), matching="foo")


def test_masks_and_batches_beside_sequences_are_refused(tokens):
    starts = torch.tensor([0, 3, 8])
    with pytest.raises(ValueError, match="leave key_padding_mask out"):
        lln.lln_attention(*tokens(B=1, N=8), cu_seqlens=starts, key_padding_mask=torch.tensor([8]))
    with pytest.raises(ValueError, match="a batch of 1"):
        lln.lln_attention(*tokens(B=2, N=8), cu_seqlens=starts)
    with pytest.raises(ValueError, match="as many queries as keys"):
        lln.lln_attention(*tokens(B=1, N=8, M=5), cu_seqlens=starts)


def test_running_statistics_are_not_tracked_over_packed_sequences(tokens):
    module, inputs, starts = lln.LLNAttention(4, 16, statistics="running"), tokens(B=1, N=8), torch.tensor([0, 3, 8])
    with pytest.raises(ValueError, match='use statistics="live"'):
        module(*inputs, cu_seqlens=starts)
    module.eval()(*inputs, cu_seqlens=starts)
