"""The kernels compiled ahead of time, without a GPU: nothing spills, all fits, and the bounds that are promised."""

import os

import pytest

pytest.importorskip("triton", reason="triton is not installed, see make test-triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from lln.bench.kernels import GPUS, bound_of, compile_all, record_calls

pytestmark = pytest.mark.compiled


# Widths and dtypes with the most registers of each set of tiles.
@pytest.mark.parametrize(
    ("archs", "dtype", "head_dim"),
    [
        (("sm_80", "sm_90"), "float16", 64),
        (("sm_80",), "float32", 64),
        (("sm_80",), "float16", 128),
        (("sm_80",), "float32", 128),
        (("sm_80",), "float16", 256),
    ],
    ids=["half-64", "float32-64", "half-128", "float32-128", "half-256"],
)
def test_no_kernel_spills_and_all_fit_into_shared_memory(archs, dtype, head_dim):
    problems = [x.problem for x in compile_all(archs, dtype=dtype, head_dim=head_dim) if x.problem is not None]
    assert not problems


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_forward_reads_tokens_twice_and_its_bound_is_near_one_pass(dtype):
    tokens, heads, width = 8192, 12, 64
    calls = record_calls(tokens, dtype=dtype, near=False)["LLN forward"]
    shape = (1, heads, tokens, width)
    times = {}
    for call in calls:
        for name, x in call.arguments.items():
            if getattr(x, "shape", None) == shape:
                times.setdefault(id(x), set()).add((call.kernel, call.grid, name))
    assert sorted(len({kernel for kernel, _, _ in x}) for x in times.values()) == [1, 1, 2, 2]
    bound = bound_of(calls, GPUS["sm_80"], tokens=tokens, heads=heads, head_dim=width, dtype=dtype)
    assert bound.seconds <= 1.6 * bound.once_seconds
