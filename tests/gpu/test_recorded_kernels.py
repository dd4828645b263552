"""What `lln bench kernels` recorded: every kernel, without a spill."""

from pathlib import Path

import pytest

from lln.results import read_results

pytest.importorskip("triton", reason="triton is not installed, see make test-triton")


def test_every_kernel_is_recorded_without_a_problem():
    from lln.backends.triton.tuning import kernels

    file = Path(__file__).resolve().parents[2] / "results/kernels.jsonl"
    found = read_results(file, made_by=f"lln bench kernels --out {file}")
    assert {row["kernel"] for row in found["kernels"].rows} == set(kernels())
    assert not [row for row in found["kernels"].rows if row["problem"] is not None]
    # On GPUs of compute capability 8.6 and 8.9 a program has less than on those that are compiled for: 99 KB.
    assert max(row["shared"] for row in found["kernels"].rows) <= 99 << 10
    at_8192 = [row["of_once"] for row in found["bounds"].rows if (row["gpu"], row["tokens"]) == ("A100 40 GB", 8192)]
    assert len(at_8192) == 2  # float16 and float32
    assert max(at_8192) <= 1.6
