"""The kernels compiled ahead of time, without a GPU: nothing spills, all fits, and the bounds that are promised."""

import os

import pytest

pytest.importorskip("triton", reason="triton is not installed, see make test-triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from lln.backends.triton.tuning import kernels
from lln.bench.kernel_calls import CASES, all_calls, record_calls
from lln.bench.kernels import GPUS, WIDTHS, bound_of, compile_variant, variants_of, widest

pytestmark = pytest.mark.compiled


def first_stages(dtype, head_dim, value_dim, cases=CASES):
    """Variants with the first choice of stages; `lln bench kernels` compiles the others as well."""
    calls = all_calls(dtype, head_dim, value_dim, cases)
    return dict.fromkeys(next(variants_of(call)) for call in calls)


def problems(variants, arch):
    return [x.problem for x in (compile_variant(variant, arch) for variant in variants) if x.problem is not None]


def test_every_kernel_is_compiled():
    assert {x.kernel for x in first_stages("float16", 64, 64)} == set(kernels())


@pytest.mark.parametrize("kernel", sorted(kernels()))
def test_no_option_makes_a_kernel_spill(kernel):
    """All forms, padding, fewer key heads, windows, given scales and gradients of them, at the usual width."""
    assert not problems([x for x in first_stages("float16", 64, 64) if x.kernel == kernel], "sm_80")


# The case with all options, which takes the most registers.
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize(("dtype", "arch"), [("float32", "sm_80"), ("float16", "sm_90"), ("bfloat16", "sm_80")])
def test_no_width_makes_a_kernel_spill(dtype, arch, widths):
    if max(widths) > widest(dtype):
        pytest.skip("plain torch runs it")
    assert not problems(first_stages(dtype, *widths, CASES[-1:]), arch)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_forward_reads_tokens_twice_and_its_bound_is_near_one_pass(dtype):
    tokens, heads, width = 8192, 12, 64
    calls = record_calls(tokens, dtype=dtype)["LLN forward"]
    shape = (1, heads, tokens, width)
    times = {}
    for call in calls:
        for name, x in call.arguments.items():
            if getattr(x, "shape", None) == shape:
                times.setdefault(id(x), set()).add((call.kernel, call.grid, name))
    assert sorted(len({kernel for kernel, _, _ in x}) for x in times.values()) == [1, 1, 2, 2]
    bound = bound_of(calls, GPUS["sm_80"], tokens=tokens, heads=heads, head_dim=width, dtype=dtype)
    assert bound.seconds <= 1.6 * bound.once_seconds
