"""Heads that are cut into chunks for several threads, with widths that leave a vector half empty."""

import pytest
import torch

import lln
from lln import reference
from lln.backends.cpu import binding, build, build_problem


@pytest.mark.skipif(build_problem() is not None, reason="no C compiler")
@pytest.mark.parametrize("D", [8, 24, 72], ids=lambda d: f"D{d}")
def test_threads_do_not_write_into_the_moments_of_each_other(tokens, D, monkeypatch):
    """Vectors of 16 floats on any CPU; several times, because it depends on which thread is first."""
    monkeypatch.setitem(build.FLAVOURS, "wide", (["-march=native", "-DLANES=16"], set()))
    library = build.open_library(build.build("wide"))
    monkeypatch.setattr(binding, "load", lambda: library)
    inputs = tokens(B=1, H=2, N=600, D=D, dtype=torch.float32)
    expected = reference.lln_attention(*(x.double() for x in inputs))
    torch.set_num_threads(4)
    try:
        outputs = [lln.lln_attention(*inputs) for _ in range(20)]
    finally:
        torch.set_num_threads(1)
    for output in outputs:
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
