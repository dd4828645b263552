"""The kernels compiled ahead of time, without a GPU: nothing spills, all fits, and the bounds that are promised."""

import os

import pytest

pytest.importorskip("triton", reason="triton is not installed, see make test-triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from lln.backends.triton.tuning import kernels
from lln.bench.kernel_calls import CASES, all_calls, record_calls
from lln.bench.kernels import GPUS, bound_of, compile_variant, variants_of

pytestmark = pytest.mark.compiled


def first_stages(dtype, head_dim, value_dim, cases=CASES):
    """Variants with the first choice of stages; `lln bench kernels` compiles the others as well."""
    calls = all_calls(dtype, head_dim, value_dim, cases)
    return dict.fromkeys(next(variants_of(call)) for call in calls)


def spills(which):
    """Of calls with all options at once; docs/gpu.md lists them."""
    return pytest.mark.xfail(strict=True, reason=f"spills: {which} a thread")


def test_every_kernel_is_compiled():
    assert {x.kernel for x in first_stages("float16", 64, 64)} == set(kernels())


# The case with all options, which takes the most registers, for each set of tiles. `lln bench kernels` compiles the
# other options, dtypes, widths and numbers of stages too: thousands, which take too long here.
@pytest.mark.parametrize(
    ("arch", "dtype", "width"),
    [
        pytest.param("sm_80", "float16", 64, marks=spills("near_kernel and near_queries_backward_kernel, 8 bytes")),
        pytest.param("sm_90", "float16", 64, marks=spills("match_kernel and near_queries_backward_kernel, 8 bytes")),
        ("sm_80", "float32", 64),
        ("sm_80", "float16", 128),
        ("sm_80", "float32", 128),
        pytest.param("sm_80", "float16", 256, marks=spills("keys_backward_kernel, 88 bytes; near kernels, 8 to 24")),
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
