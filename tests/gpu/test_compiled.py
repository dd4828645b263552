"""The kernels compiled ahead of time, without a GPU: nothing spills, all fits, and the bounds that are promised."""

import math
import os
import re
from itertools import combinations

import pytest

pytest.importorskip("triton", reason="triton is not installed, see make test-triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from lln.backends.triton.tuning import kernels, tensors_of
from lln.bench.kernel_calls import CASES, all_calls, record_calls
from lln.bench.kernels import GPUS, _choices, all_variants, bound_of, build, compile_variant, cover, variants_of

pytestmark = pytest.mark.compiled


def first_stages(dtype, head_dim, value_dim, cases=CASES):
    """Variants with the first choice of stages; `lln bench kernels` compiles the others as well."""
    calls = all_calls(dtype, head_dim, value_dim, cases)
    return dict.fromkeys(next(variants_of(call)) for call in calls)


def test_every_kernel_is_compiled():
    assert {x.kernel for x in first_stages("float16", 64, 64)} == set(kernels())


def test_any_two_choices_are_compiled_together():
    variants = [x for x in all_variants(("float16", "float32"), [(16, 16), (64, 64)]) if x.kernel == "summarize_kernel"]
    archs = ("sm_80", "sm_90")
    every = [(variant, arch) for variant in variants for arch in archs]
    pairs = {pair for job in every for pair in combinations(_choices(*job), 2)}
    chosen = cover(variants, archs)
    assert {pair for job in chosen for pair in combinations(_choices(*job), 2)} == pairs
    assert len(chosen) < len(every) / 4


def test_kernels_are_told_apart_as_triton_does():
    """What is compiled here is what a launch on a GPU would compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(GPUTarget("cuda", 80, 32))
    seen = set()
    for call in all_calls("float16", 64, 64):
        variant = next(variants_of(call))
        if variant.arguments in seen:
            continue
        seen.add(variant.arguments)
        given = call.arguments | call.tiles()
        for parameter, ours in zip(kernels()[call.kernel].params, variant.arguments, strict=True):
            if parameter.is_constexpr:
                continue
            options = False, not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
            kind, key = native_specialize_impl(type(backend), given[parameter.name], *options)
            assert described(ours) == (kind, without_empty(key)), (call.kernel, parameter.name)


def without_empty(key):
    return tuple(map(without_empty, key)) if isinstance(key, tuple) else None if key == "" else key


def described(argument):
    """An argument as Triton describes it: its type, and a constant or "D" for what is divisible by 16."""
    if len(argument) == 2:
        kinds, keys = zip(*map(described, argument[1]), strict=True)
        return tuple(kinds), tuple(keys)
    kind, constant, is_aligned = argument
    return kind, constant if kind == "constexpr" else "D" if is_aligned else None


# The case with all options, which takes the most registers, for each set of tiles. `lln bench kernels` compiles the
# other options, dtypes, widths and numbers of stages too, which takes too long here.
@pytest.mark.parametrize(
    ("arch", "dtype", "width"),
    [
        ("sm_80", "float16", 64),
        ("sm_90", "float16", 64),
        ("sm_80", "float32", 64),
        ("sm_80", "float16", 128),
        ("sm_80", "float32", 128),
        ("sm_80", "float16", 256),
    ],
)
def test_no_kernel_spills_and_all_fit_into_shared_memory(arch, dtype, width):
    compiled = [compile_variant(x, arch) for x in first_stages(dtype, width, width, CASES[-1:])]
    assert not [x.problem for x in compiled if x.problem is not None]


@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_keys_of_all_forms_have_gradients(case):
    """In the interpreter all types fit each other; these kernels have the most that depends on options."""
    variants = [x for x in first_stages("float16", 64, 64, (case,)) if x.kernel == "keys_backward_kernel"]
    assert not [x.problem for x in (compile_variant(x, "sm_80") for x in variants) if x.problem is not None]


def accesses(ir):
    """Loads, stores and barriers of a kernel in Triton's own code, in order: kind, argument of the kernel, and type."""
    roots = {name: name for name in re.findall(r"(%[\w.]+): !tt\.ptr", ir.partition("tt.func")[2].partition("{\n")[0])}
    for line in ir.splitlines():
        if "ttg.barrier" in line:
            yield "barrier", None, None
            continue
        for name, start in re.findall(r"(%[\w.]+) = (%[\w.#]+)", line):  # what a loop begins with
            roots |= {name: roots[start]} if start in roots else {}
        made = re.match(r"\s*(%[\w.]+)(?::\d+)? = ([\w.]+) (.*?)(?: loc\(.*)?$", line)
        given = re.findall(r"%[\w.#]+", made[3] if made else line)
        if given and given[0] in roots:
            kind = made[2] if made else line.split()[0]
            if kind in ("tt.load", "tt.store"):
                yield kind, roots[given[0]], line.partition(" : ")[2].partition(" loc(")[0]
            elif made and "tt.ptr" in made[3]:
                roots[made[1]] = roots[given[0]]


@pytest.mark.parametrize(("dtype", "width"), [("float16", 16), ("float16", 64), ("float32", 64)])
def test_no_thread_overwrites_what_another_has_yet_to_read(width, dtype):
    """What a program reads and then writes: all threads meet in between, or each number belongs to one thread."""
    both = set()
    for variant in first_stages(dtype, width, width, CASES[-1:]):
        loads = []
        for kind, argument, type_ in accesses(build(variant, "sm_80").asm["ttgir"]):
            if kind == "barrier":
                loads = []
            elif kind == "tt.load":
                loads.append((argument, type_))
            else:
                # A program never reads the slot of the ring that it writes.
                for read in [x for x in loads if x[0] == argument and not argument.startswith("%recent")]:
                    both.add(variant.kernel)
                    sizes = re.search(r"tensor<([\dx]+)x!", type_)
                    elements = math.prod(map(int, sizes[1].split("x"))) if sizes else 1
                    assert read[1] == type_, (variant, read)
                    assert elements >= 32 * variant.warps, (variant, read)
    assert both == {"step_kernel", "causal_queries_backward_kernel", "causal_keys_backward_kernel"}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_forward_reads_tokens_twice_and_its_bound_is_near_one_pass(dtype):
    tokens, heads, width = 8192, 12, 64
    calls = record_calls(tokens, dtype=dtype)["LLN forward"]
    shape = (1, heads, tokens, width)
    times = {}
    for call in calls:
        for name, x in tensors_of(call.arguments).items():
            if x.shape == shape:
                times.setdefault(id(x), set()).add((call.kernel, call.grid, name))
    assert sorted(len({kernel for kernel, _, _ in x}) for x in times.values()) == [1, 1, 2, 2]
    bound = bound_of(calls, GPUS["sm_80"], tokens=tokens, heads=heads, head_dim=width, dtype=dtype)
    assert bound.seconds <= 1.6 * bound.once_seconds
