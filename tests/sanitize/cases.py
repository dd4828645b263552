"""What runs under the sanitizers, in the process that `run.py` starts: faults that must be found, then attention.

The cases are drawn with a fixed seed from all that the fused code takes, and reach every line of it but those for want
of memory. Whether results are right is for the tests; here they are only searched for NaN, which fresh memory is filled
with.
"""

import ctypes
import dataclasses
import itertools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lln
from lln.backends.cpu import CpuBackend, build
from lln.matching.curves import FORMS, Form
from lln.problem import Near, Problem

CASES = 300
WIDTHS = (8, 16, 24, 40, 64, 72, 128, 136, 256)
LENGTHS = (1, 2, 7, 63, 64, 65, 130, 200, 530, 700, 1500)
MOST_WORK = 4e7  # multiplications of a case: about 0.2 seconds


@dataclasses.dataclass(frozen=True)
class Case:
    threads: int
    dtype: torch.dtype
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    attention: str
    near: Near
    block_size: int
    weights: str  # of keys
    form: Form
    centers: str  # of the decomposed form
    is_causal: bool
    matching: str
    scales: str
    mask: str
    layouts: tuple[str, ...]  # of query, key, value and the gradient of the output
    values: str
    near_width: int  # of its softmax attention

    @property
    def work(self) -> float:
        size = self.batch * self.heads * max(self.queries, self.keys)
        near = 0 if self.attention == "lln_attention" else min(self.block_size, self.keys)
        if self.near == "window" and self.values == "infinite":
            near *= 16  # one query at a time
        return size * (self.width + self.value_width) * (64 + self.width + near)


def draw(choice: Callable[[Any], Any]) -> Case:
    attention = choice(("lln_attention", "lln_attention", "lln_diag_attention", "block_diagonal_attention"))
    is_causal = choice((False, True))
    cut = choice((False, False, True))  # few heads for many threads: the tokens of each are cut into chunks
    lengths = LENGTHS[-3:] if cut else LENGTHS
    queries = choice(lengths)
    crosses = attention == "lln_attention" and not is_causal and choice((False, True))
    heads, key_heads = choice(((1, 1), (2, 1)) if cut else ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (6, 1)))
    scales = ("matched", "matched", "numbers", "alpha", "one", "heads", "samples", *(("tokens",) if is_causal else ()))
    return Case(
        threads=choice((3, 4)) if cut else choice((1, 2)),
        dtype=choice((torch.float32, torch.bfloat16, torch.float16)),
        batch=1 if cut else choice((1, 2, 3)),
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=choice(lengths) if crosses else queries,
        width=choice(WIDTHS),
        value_width=choice(WIDTHS),
        attention=attention,
        near=choice(("blocks", "window")),
        block_size=choice((1, 7, 16, 64, 100, 1024)),
        weights=choice(("none", "none", "normal", "large", "one head", "infinite")),
        form=choice(("paper", *FORMS)),
        centers="frozen" if is_causal else choice(("means", "means", "frozen")),
        is_causal=is_causal,
        matching=choice(("variance", "entropy", "linear")),
        scales=choice(scales),
        mask=choice(("none", "none", "left", "right", "holes", "empty sample")),
        layouts=tuple(choice(("plain", "tokens first", "wide rows", "features first", "one head")) for _ in range(4)),
        values=choice(("normal", "normal", "outliers", "growing", "constant", "infinite")),
        near_width=choice(WIDTHS),
    )


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same shape in another memory layout; the last element is the last of the allocation."""
    match layout:
        case "tokens first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "wide rows":
            return torch.cat((x.new_zeros(*x.shape[:3], 3), x), dim=3)[..., 3:]
        case "features first":
            return x.mT.contiguous().mT
        case "one head":
            return x[:, :1].clone().expand_as(x)
    return x.clone()


def make_mask(kind: str, batch: int, tokens: int) -> Tensor | None:
    places = torch.arange(tokens).expand(batch, tokens)
    match kind:
        case "left":
            return places >= tokens // 3
        case "right":
            return places < (tokens + 1) // 2
        case "holes":
            return torch.rand(batch, tokens) > 0.3
        case "empty sample":
            return (torch.arange(batch) > 0)[:, None].expand(batch, tokens)
    return None


def make_inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and the gradient of the output."""
    B, N, M = case.batch, case.queries, case.keys
    query, key = torch.randn(B, case.heads, N, case.width), torch.randn(B, case.key_heads, M, case.width) - 0.3
    value, gradient = (torch.randn(B, h, n, case.value_width) for h, n in ((case.key_heads, M), (case.heads, N)))
    match case.values:
        case "outliers":
            for x in (query, key, value):
                x[torch.rand(x.shape) < 0.01] *= 3e4
        case "growing":
            key *= torch.linspace(1, 400, M)[:, None]
        case "constant":
            query, key = torch.full_like(query, 0.5), torch.zeros_like(key)
        case "infinite":
            for x, bad in ((query, torch.inf), (key, -torch.inf), (value, torch.nan)):
                x[torch.rand(x.shape[:3]) < 0.02] = bad
    tensors = (lay_out(x.to(case.dtype), to) for x, to in zip((query, key, value, gradient), case.layouts, strict=True))
    *inputs, gradient = tensors
    return [x.requires_grad_() for x in inputs], gradient


def make_scales(case: Case) -> dict[str, Any]:
    shapes = {"one": (), "heads": (case.heads,), "samples": (case.batch, case.heads)}
    shapes["tokens"] = (case.batch, case.heads, case.queries)
    match case.scales:
        case "matched":
            return {"matching": case.matching}
        case "numbers":
            return {"alpha": 1.3, "beta": 0.7}
        case "alpha":
            return {"alpha": 1.3, "matching": case.matching}
    return {name: torch.rand(shapes[case.scales]).add(0.5).requires_grad_() for name in ("alpha", "beta")}


def make_weights(case: Case) -> Tensor | None:
    weights = torch.randn(case.batch, case.heads, case.keys)
    match case.weights:
        case "none":
            return None
        case "large":
            weights *= 1e4
        case "one head":
            weights = weights[:, :1].expand_as(weights)
        case "infinite":
            weights[torch.rand(weights.shape) < 0.02] = torch.inf
    return weights.requires_grad_()


def make_form(case: Case) -> dict[str, Any]:
    centers = None
    if case.form == "decomposed" and case.centers == "frozen":
        centers = (torch.randn(case.heads, case.width), torch.randn(case.key_heads, case.width))
    return {"form": case.form, "centers": centers, "key_weight": make_weights(case)}


def run(case: Case) -> None:
    torch.set_num_threads(case.threads)
    inputs, gradient = make_inputs(case)
    options: dict[str, Any] = {"is_causal": case.is_causal}
    options["key_padding_mask"] = make_mask(case.mask, case.batch, case.keys)
    if case.attention == "lln_attention" and case.mask == "holes" and not case.is_causal:
        options["query_padding_mask"] = make_mask("right", case.batch, case.queries)
    far = case.attention != "block_diagonal_attention"
    scales = make_scales(case) if far else {}
    near = None if case.attention == "lln_attention" else case.near
    form = make_form(case) if far else {}
    problem = Problem.make(*inputs, far=far, near=near, block_size=case.block_size, **options, **scales, **form)
    backend = CpuBackend()
    assert backend.why_not(problem) is None, backend.why_not(problem)
    with torch.no_grad():
        results = [backend.attention(problem)]
    leaves = [*inputs, *(x for x in (*scales.values(), form.get("key_weight")) if isinstance(x, Tensor))]
    output = backend.attention(problem)
    results += [output, *torch.autograd.grad(output, leaves, gradient)]
    if not far:
        outputs = backend.near_with_lse(problem)
        results += [*outputs, *torch.autograd.grad(outputs, leaves, (gradient, torch.randn_like(outputs[1])))]
    if case.is_causal and far and case.scales != "tokens":
        results += run_state(case, inputs, options["key_padding_mask"], scales, problem.key_weight)
    if case.values == "normal" and (problem.key_weight is None or problem.key_weight.isfinite().all()):
        assert all(x.isfinite().all() for x in results), "NaN in results: memory is read before it is written"


def run_state(
    case: Case, inputs: list[Tensor], mask: Tensor | None, scales: dict[str, Any], weight: Tensor | None
) -> list[Tensor]:
    """The same tokens as the next ones of a state: a few, one, and the rest."""
    with_near = case.attention != "lln_attention"
    centers = {"centers": (torch.randn(case.heads, case.width), torch.randn(case.key_heads, case.width))}
    state = lln.LLNState.empty(
        case.batch,
        case.heads,
        case.width,
        case.value_width,
        key_heads=case.key_heads,
        block_size=case.block_size if with_near else None,
        near=case.near if with_near else "blocks",
        near_dim=case.near_width if with_near else None,
        form=case.form,
        dtype=case.dtype,
        **scales,
        **(centers if case.form == "decomposed" else {}),
    )
    others: dict[str, Tensor] = {} if weight is None else {"key_weight": weight}
    if with_near:
        shapes = {"near_query": case.heads, "near_key": case.key_heads}
        others |= {
            name: lay_out(torch.randn(case.batch, heads, case.keys, case.near_width).to(case.dtype), layout)
            for (name, heads), layout in zip(shapes.items(), case.layouts, strict=False)
        }
    results: list[Tensor] = []
    with torch.no_grad():
        cuts = sorted({0, case.keys // 3, min(case.keys // 3 + 1, case.keys), case.keys})
        for start, end in itertools.pairwise(cuts):
            tokens = [x[:, :, start:end] for x in inputs]
            keep = None if mask is None else mask[:, start:end]
            more: Any = {name: x[:, :, start:end] for name, x in others.items()}
            far, near, lse, _ = state.branches(*tokens, key_padding_mask=keep, **more)
            output, state = state.prefill(*tokens, key_padding_mask=keep, in_place=start % 2 == 0, **more)
            results += [far, output] if near is None or lse is None else [far, near, lse, output]
    return results


def find_fault(fault: Callable[[], object], *found: str) -> None:
    """Commit a fault in a child of this process, which must end with a report about it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        fault()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        report = stream.read()
    status = os.waitpid(child, 0)[1]
    missing = [x for x in found if x not in report]
    assert status != 0, f"{fault.__name__} was not found"
    assert not missing, f"{fault.__name__}: {missing} is not in the report\n{report}"


def overrun_an_input() -> None:
    x = torch.randn(1, 1, 64, 16)
    x.untyped_storage().resize_(x.nbytes - 64)  # the shape stays, the last row is gone
    lln.lln_attention(x, torch.randn(1, 1, 64, 16), torch.randn(1, 1, 64, 16))


def find_faults(library: ctypes.CDLL) -> None:
    find_fault(library.vector_behind_a_part, "use-after-poison", "vector_behind_a_part")
    find_fault(library.vector_before_a_part, "use-after-poison", "vector_before_a_part")
    find_fault(library.part_of_a_function_that_returned, "use-after-poison", "part_of_a_function_that_returned")
    find_fault(library.more_than_the_scratch_has, "scratch_floats()", "more_than_the_scratch_has")
    find_fault(library.signed_overflow, "signed integer overflow", "signed_overflow")
    find_fault(overrun_an_input, "heap-buffer-overflow", "lln_forward")


def main(flavour: str, library: str, faults: str, *only: str) -> None:
    build.build = lambda _: Path(library)
    print("faults.c", flush=True)
    find_faults(ctypes.CDLL(faults))
    drawn = random.Random(flavour)
    cases = []
    while len(cases) < CASES:
        case = draw(drawn.choice)
        if case.work <= MOST_WORK:
            cases.append(case)
    for index in [int(x) for x in only] or range(CASES):
        print(f"case {index}: {cases[index]}", flush=True)
        torch.manual_seed(index)
        run(cases[index])
    print(f"{len(only) or CASES} cases, nothing found")


if __name__ == "__main__":
    main(*sys.argv[1:])
