"""Attention over several processes is that of one process: output, gradients, traffic."""

from functools import partial
from itertools import accumulate, islice, pairwise

import pytest
import torch
import torch.distributed as dist
from distributed_world import report, run_world

import lln
from lln import distributed
from test_fuzz import FLOOR, WHAT, Case

FUNCTIONS = ("lln_attention", "lln_diag_attention", "block_diagonal_attention")
OUTPUT, GRADIENT = 2e-6, 1e-5  # of the largest entry, float32


def make(B=2, H=4, N=203, D=16, Hk=None, M=None, Dv=None, dtype=torch.float32, seed=0):
    chance = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, D), (B, Hk or H, M or N, D), (B, Hk or H, M or N, Dv or D)
    draw = partial(torch.randn, generator=chance, dtype=torch.float64)
    return [(draw(shape) + offset).to(dtype) for shape, offset in zip(shapes, (0.1, -0.3, 0.2), strict=True)]


def bounds(parts):
    return [slice(*x) for x in pairwise([0, *accumulate(parts)])]


def uneven(tokens, size, seed=1):
    chance = torch.Generator().manual_seed(seed)
    cuts = sorted(torch.randint(0, tokens + 1, (size - 1,), generator=chance).tolist())
    return [b - a for a, b in pairwise([0, *cuts, tokens])]


def close(name, found, expected, tolerance, whole):
    found, expected = found.detach(), expected.detach()
    error = float((found - expected).abs().max()) if found.numel() else 0.0
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    largest = float(whole.detach().abs().max())
    assert error <= tolerance * max(largest, 1e-3), f"{name}: {error:.2e} of {largest:.2e}"


def compare(group, function, parts, *, tokens=None, key_parts=None, part_options=(), **options):
    """The parts of this process against those of one process that has all."""
    rank = dist.get_rank(group)
    whole = tokens or make()
    tensors = {name: x for name, x in options.items() if name in part_options}
    mine, own_keys = bounds(parts)[rank], bounds(key_parts or parts)[rank]
    reference = [x.clone().requires_grad_() for x in whole]
    extra = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    expected = getattr(lln, function)(*reference, **options | extra)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = weights.to(expected.dtype)
    (expected * weights).sum().backward()

    local = [x[:, :, part].clone().requires_grad_() for x, part in zip(whole, (mine, own_keys, own_keys), strict=True)]
    own = {}
    for name, x in tensors.items():
        place = mine if name in ("alpha", "query_padding_mask") else own_keys
        cut = x[..., place] if x.dim() != 4 else x[:, :, place]
        own[name] = cut.clone().requires_grad_(x.is_floating_point())
    found = getattr(distributed, function)(*local, group=group, **options | own)
    (found * weights[:, :, mine]).sum().backward()
    assert found.dtype == expected.dtype
    close("output", found, expected[:, :, mine], OUTPUT, expected)
    for name, x, y, place in zip("qkv", local, reference, (mine, own_keys, own_keys), strict=True):
        close(f"gradient of {name}", x.grad, y.grad[:, :, place], GRADIENT, y.grad)
    for name, x in own.items():
        if x.is_floating_point():
            place = mine if name == "alpha" else own_keys
            whole_gradient = extra[name].grad
            close(f"gradient of {name}", x.grad, whole_gradient[..., place], GRADIENT, whole_gradient)


def some_gradients(group, function, wanted, **options):
    """Gradients of some inputs alone are those beside all others; of one tensor in all three places, their sum."""
    whole = [x[:, :, bounds([5, 11, 4])[dist.get_rank(group)]] for x in make(N=20)]

    def gradients(inputs):
        output = getattr(distributed, function)(*inputs, group=group, **options)
        of = list(dict.fromkeys(x for x in inputs if x.requires_grad))
        return torch.autograd.grad(output.square().sum(), of, retain_graph=True), torch.autograd.grad(
            output.square().sum(), of
        )

    alone, again = gradients([x.clone().requires_grad_(name in wanted) for name, x in zip("qkv", whole, strict=True)])
    every = dict(zip("qkv", gradients([x.clone().requires_grad_() for x in whole])[0], strict=True))
    for name, x, y in zip(wanted, alone, again, strict=True):
        close(name, x, every[name], GRADIENT, every[name])
        assert torch.equal(x, y)
    same = gradients([whole[0].clone().requires_grad_()] * 3)[0][0]
    apart = sum(gradients([whole[0].clone().requires_grad_() for _ in range(3)])[0])
    close("one tensor", same, apart, GRADIENT, apart)


def padding(B, N, seed=5):
    """Padding everywhere, one sample without any kept token."""
    keep = torch.rand(B, N, generator=torch.Generator().manual_seed(seed)) < 0.8
    keep[-1] = False
    return keep


def attention_cases(size):
    N = 203
    parts = {
        "uneven": uneven(N, size),
        "empty first": [0, *uneven(N, size - 1)],
        "empty last": [*uneven(N, size - 1), 0],
        "all in one": [0] * (size - 1) + [N],
    }
    even = [N // size] * (size - 1) + [N - N // size * (size - 1)]
    for causal in (False, True):
        for function in FUNCTIONS:
            for where, split in parts.items():
                yield (
                    f"{function} {where} causal={causal}",
                    partial(compare, function=function, parts=split, is_causal=causal),
                )
            yield (
                f"{function} one token each causal={causal}",
                partial(compare, function=function, parts=[1] * size, tokens=make(N=size), is_causal=causal),
            )
        for form in ("unbiased", "decomposed"):
            centers = (torch.randn(4, 16), torch.randn(2, 16)) if causal and form == "decomposed" else None
            yield (
                f"{form} GQA causal={causal}",
                partial(
                    compare,
                    function="lln_diag_attention",
                    parts=uneven(N, size, 7),
                    tokens=make(Hk=2, Dv=24),
                    form=form,
                    centers=centers,
                    is_causal=causal,
                ),
            )
        for near in ("blocks", "window"):
            for block_size in (1, 7, 64, 300):
                yield (
                    f"{near} {block_size} causal={causal}",
                    partial(
                        compare,
                        function="lln_diag_attention",
                        parts=uneven(N, size, 11),
                        near=near,
                        block_size=block_size,
                        is_causal=causal,
                    ),
                )
        for form in ("paper", "unbiased", "decomposed"):
            keep = padding(3, N)
            centers = (torch.randn(4, 16), torch.randn(4, 16)) if causal and form == "decomposed" else None
            for near in ("blocks", "window"):
                yield (
                    f"padding {form} {near} causal={causal}",
                    partial(
                        compare,
                        function="lln_diag_attention",
                        parts=even,
                        tokens=make(B=3),
                        key_padding_mask=keep,
                        part_options=("key_padding_mask",),
                        form=form,
                        centers=centers,
                        near=near,
                        block_size=9,
                        is_causal=causal,
                    ),
                )
        yield (
            f"lengths causal={causal}",
            partial(
                compare,
                function="lln_diag_attention",
                parts=even,
                key_padding_mask=torch.tensor([150, N]),
                is_causal=causal,
            ),
        )
        starts = [0, 10, 10, 60, 61, 140, 150, 203]
        for where, split in ("uneven", uneven(N, size, 13)), ("at borders", [*[10, 50, 0, 143][: size - 1], 0]):
            split = [*split[:-1], N - sum(split[:-1])]
            for form, near in ("paper", "blocks"), ("decomposed", "window"):
                centers = (torch.randn(4, 16), torch.randn(2, 16)) if causal and form == "decomposed" else None
                yield (
                    f"packed {where} {form} causal={causal}",
                    partial(
                        compare,
                        function="lln_diag_attention",
                        parts=split,
                        tokens=make(B=1, Hk=2),
                        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
                        form=form,
                        near=near,
                        block_size=8,
                        centers=centers,
                        is_causal=causal,
                    ),
                )
        yield (
            f"one packed sequence causal={causal}",
            partial(
                compare,
                function="lln_attention",
                parts=even,
                tokens=make(B=1),
                cu_seqlens=torch.tensor([0, N]),
                is_causal=causal,
            ),
        )
        yield (
            f"scales of tokens causal={causal}",
            partial(
                compare,
                function="lln_attention",
                parts=uneven(N, size, 17),
                alpha=torch.rand(2, 4, N) + 0.5,
                beta=torch.rand(2, 4, N) + 0.5,
                key_weight=torch.randn(2, 4, N),
                part_options=("alpha", "beta", "key_weight"),
                is_causal=causal,
            ),
        )
    equal = make()
    equal[0] = equal[0][:, :, :1].expand_as(equal[0])  # all queries, which have no content then
    yield "equal queries", partial(compare, function="lln_attention", parts=even, tokens=equal, form="decomposed")
    yield "scope of the batch", partial(compare, function="lln_attention", parts=even, scope="batch")
    for matching in ("linear", "entropy"):
        yield matching, partial(compare, function="lln_attention", parts=even, matching=matching)
    yield (
        "cross attention",
        partial(
            compare,
            function="lln_attention",
            parts=uneven(N, size),
            key_parts=uneven(91, size, 19),
            tokens=make(M=91),
            form="decomposed",
        ),
    )


def gradient_cases():
    for wanted in ("q", "k", "qv"):
        for name, (function, options) in {
            "blocks": ("lln_diag_attention", {"form": "unbiased", "is_causal": True, "block_size": 6}),
            "window": ("lln_diag_attention", {"form": "decomposed", "near": "window", "block_size": 9}),
            "window alone": ("block_diagonal_attention", {"near": "window", "block_size": 7}),
        }.items():
            yield f"{name}, gradients of {wanted}", partial(some_gradients, function=function, wanted=wanted, **options)


def some_cases(size):
    """Every third of them, others for each number of processes."""
    return islice(attention_cases(size), size, None, 3)


class Parts:
    """The functions of `lln` on whole sequences, each process computing the outputs of its part and zeros elsewhere.

    Outputs and gradients of all processes add up to the whole ones.
    """

    def __init__(self, group, seed):
        self.group, self.seed = group, seed

    def __getattr__(self, name):
        return partial(self.attend, getattr(distributed, name))

    def attend(self, function, query, key, value, *, key_padding_mask=None, key_weight=None, **options):
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        mine, own = (bounds(uneven(x.shape[2], size, self.seed))[rank] for x in (query, key))
        if key_padding_mask is not None:
            options["key_padding_mask"] = key_padding_mask[:, own] if key_padding_mask.dim() == 2 else key_padding_mask
        if key_weight is not None:
            options["key_weight"] = key_weight[..., own]
        output = function(query[:, :, mine], key[:, :, own], value[:, :, own], group=self.group, **options)
        return torch.nn.functional.pad(output, (0, 0, mine.start, query.shape[2] - mine.stop))


def random_problem(group, number):
    """A problem of tests/test_fuzz.py: as near to one process as is promised, or else to float64 as one process is.

    Gradients that vanish by cancellation, as those of the queries where all values are equal, are judged by the largest
    of all gradients. And a key ten thousand times as large as others leaves float32 few digits: where one process, or
    plain torch in it, is further from float64 than is promised, four times its error is allowed.
    """
    case = Case(number)
    found = [x.double().contiguous() for x in case.run(Parts(group, number), case.dtype)]
    for x in found:
        dist.all_reduce(x, group=group)
    one = case.run(lln, case.dtype)
    limits = (OUTPUT, *[GRADIENT] * 3) if case.dtype is torch.float32 else [FLOOR[case.dtype]] * 4
    units = [float(one[0].abs().max()), *[max([float(x.abs().max()) for x in one[1:]], default=0.0)] * 3]
    far = [
        i
        for i, (x, y, limit, unit) in enumerate(zip(found, one, limits, units, strict=False))
        if not (x - y).abs().max() <= limit * unit
    ]
    if far:
        exact = case.reference()
        with lln.backends.use("torch"):
            plain = case.run(lln, case.dtype)
        for i in far:
            error, *allowed = (float((x[i].double() - exact[i]).abs().max()) for x in (found, one, plain))
            assert error <= 4 * max(allowed), f"{WHAT[i]}: {error:.1e} instead of {max(allowed):.1e}: {case}"


def random_cases(size):
    for number in range(25 * (size - 2), 25 * (size - 1)):
        yield f"random problem {number}", partial(random_problem, number=number)


def cases(size):
    yield from attention_cases(size) if size == 3 else some_cases(size)
    yield from random_cases(size)
    if size == 3:
        yield from gradient_cases()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, 4])
def test_parts_give_what_one_process_gives(size):
    failed = run_world(size, cases, size)
    assert not failed, report(failed)
