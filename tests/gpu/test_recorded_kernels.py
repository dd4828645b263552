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
    (at_8192,) = [
        row["of_once"]
        for row in found["bounds"].rows
        if (row["gpu"], row["dtype"], row["tokens"]) == ("A100 40 GB", "float16", 8192)
    ]
    assert at_8192 <= 1.6
