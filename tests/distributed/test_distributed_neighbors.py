"""How much lies near and what lies beyond, over several processes, is what one process finds."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed_world import report, run_world
from test_distributed_attention import GRADIENT, OUTPUT, bounds, close, make, padding, uneven

from lln import distributed, neighbors


def mass_ratio(group, parts, is_weighted, B=2, Hk=2, key_padding_mask=None, **options):
    """ln(far / near) and softmax attention, with their gradients, of parts and of whole sequences."""
    size = sum(parts)
    whole = make(B=B, Hk=Hk, N=size)
    whole.append(torch.randn(B, 4, size) * 3)
    mine = bounds(parts)[dist.get_rank(group)]
    keep = torch.ones(B, size, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    slopes = torch.randn(whole[0].shape), torch.randn(B, 4, size)
    found, masks = [], {} if key_padding_mask is None else {"key_padding_mask": key_padding_mask}
    for function, place in ((neighbors.near_with_mass_ratio, slice(None)), (distributed.near_with_mass_ratio, mine)):
        inputs = [x[:, :, place].clone().requires_grad_() for x in whole]
        own = {name: x[:, place] for name, x in masks.items()} | ({} if place == slice(None) else {"group": group})
        *tokens, weight = inputs
        output, ratio = function(*tokens, weight if is_weighted else None, **own, **options)
        share = ratio.sigmoid().masked_fill(~keep[:, None, place], 0.0)
        total = (output * slopes[0][:, :, place]).sum() + (share * slopes[1][:, :, place]).sum()
        wanted = inputs if is_weighted else tokens
        found.append((output, share, *torch.autograd.grad(total, wanted)))
    names = ("output", "share", *(f"gradient of {x}" for x in ("q", "k", "v", "weight")))
    for name, x, y in zip(names, found[1], found[0], strict=False):
        close(name, x, y[:, :, mine], OUTPUT if name in ("output", "share") else GRADIENT, y)


def beyond(group, parts, B=2, key_padding_mask=None, **options):
    """Attention to what is not near and its ln(far / near), with their gradients, of parts and of whole sequences."""
    size, heads = sum(parts), 4
    a, b = (3 * torch.randn(B, heads, size, 6) for _ in range(2))
    whole = [a, b, torch.randn(B, 2, size, 5)]
    mine = bounds(parts)[dist.get_rank(group)]
    keep = torch.ones(B, size, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    slopes = torch.randn(B, heads, size, 5) * keep[:, None, :, None], torch.randn(B, heads, size)
    found = []
    for function, place in ((neighbors.beyond_neighbors, slice(None)), (distributed.beyond_neighbors, mine)):
        inputs = [x[:, :, place].clone().requires_grad_() for x in whole]
        own = {} if key_padding_mask is None else {"key_padding_mask": key_padding_mask[:, place]}
        own |= {} if place == slice(None) else {"group": group}
        output, ratio = function(*inputs, **own, **options)
        share = ratio.sigmoid().masked_fill(~keep[:, None, place], 0.0)
        output = output.masked_fill(~keep[:, None, place, None], 0.0)
        total = (output * slopes[0][:, :, place]).sum() + (share * slopes[1][:, :, place]).sum()
        found.append((output, share, *torch.autograd.grad(total, inputs)))
    names = ("output", "share", *(f"gradient of {x}" for x in ("a", "b", "value")))
    for name, x, y in zip(names, found[1], found[0], strict=True):
        close(name, x, y[:, :, mine], OUTPUT if name in ("output", "share") else GRADIENT, y)


def not_finite_beyond(group, which, entry, **options):
    """What is not finite in the part of one process shows in the same outputs as in one process."""
    whole = [torch.randn(1, 2, 20, 6) for _ in range(3)]
    whole[which][0, 1, 8, 3] = entry
    mine = bounds([5, 11, 4])[dist.get_rank(group)]
    expected = neighbors.beyond_neighbors(*whole, **options)
    found = distributed.beyond_neighbors(*(x[:, :, mine] for x in whole), group=group, **options)
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y[:, :, mine], rtol=1e-5, atol=OUTPUT, equal_nan=True)


def mass_ratio_cases(size):
    for is_weighted in (False, True):
        for causal in (False, True):
            for near, block_size in ("blocks", 6), ("window", 9), ("window", 40), ("blocks", 60):
                options = {"near": near, "block_size": block_size, "is_causal": causal, "is_weighted": is_weighted}
                name = f"ratio, {near} {block_size} weighted={is_weighted} causal={causal}"
                yield name, partial(mass_ratio, parts=uneven(50, size, block_size), **options)
                keep = padding(3, 50, block_size)
                yield (
                    f"{name}, padding",
                    partial(mass_ratio, parts=[0, *uneven(50, size - 1)], B=3, key_padding_mask=keep, **options),
                )
                starts = torch.tensor([0, 4, 4, 30, 31, 50], dtype=torch.int32)
                yield (
                    f"{name}, packed",
                    partial(mass_ratio, parts=uneven(50, size, 3), B=1, cu_seqlens=starts, **options),
                )


def beyond_cases(size):
    for near, block_size in ("blocks", 1), ("blocks", 6), ("window", 9), ("window", 40), ("blocks", 60):
        name, options = f"beyond {near} {block_size}", {"near": near, "block_size": block_size}
        for where in ([50 // size] * (size - 1) + [50 - 50 // size * (size - 1)], uneven(50, size, block_size)):
            yield f"{name}, parts {where}", partial(beyond, parts=where, **options)
        keep = padding(3, 50, block_size)
        yield (
            f"{name}, padding",
            partial(beyond, parts=[0, *uneven(50, size - 1)], B=3, key_padding_mask=keep, **options),
        )
        for starts in ([0, 4, 4, 30, 31, 50], [0, 50]):
            packed = {"cu_seqlens": torch.tensor(starts, dtype=torch.int32), "B": 1}
            yield f"{name}, packed {starts}", partial(beyond, parts=uneven(50, size, 3), **packed, **options)


def cases(size):
    yield from beyond_cases(size)
    if size == 3:
        yield from mass_ratio_cases(size)
        for which in range(3):
            for entry in (torch.nan, torch.inf, -torch.inf):
                for options in {"near": "window", "block_size": 4}, {"near": "blocks", "block_size": 3}:
                    name = f"{entry} in {('a', 'b', 'value')[which]}, {options['near']}"
                    yield name, partial(not_finite_beyond, which=which, entry=entry, **options)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_have_the_neighbours_of_whole_sequences(size):
    failed = run_world(size, cases, size)
    assert not failed, report(failed)
