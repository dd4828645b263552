"""Drawn cases of test_fuzz.py, others than there, in the kernels alone: their outputs are full of NaN before."""

import pytest

from test_fuzz import Case, check

# All functions, forms, dtypes and layouts, masks of all kinds, tokens that are not finite, groups of heads.
CASES = range(2000, 2016)


@pytest.mark.parametrize("number", CASES)
def test_drawn_case(full_of_nan, monkeypatch, number):
    monkeypatch.setattr("test_fuzz.BACKENDS", ["triton"])
    case = Case(number)
    if not check(case, compile=False):
        pytest.skip(f"the kernels do not take it: {case}")
