"""The C code and its binding fit together, or the library is refused."""

import ctypes

import pytest

from helpers import needs_cpu
from lln.backends.cpu import binding, build, layout

pytestmark = needs_cpu


@pytest.mark.parametrize("change", [{"MAX_WIDTH": 128}, {"TILE": 64}], ids=["another value", "missing in C"])
def test_a_library_that_does_not_fit_is_refused(monkeypatch, change):
    library = build.build(build.choose_flavour())
    monkeypatch.setattr(layout, "CONSTANTS", layout.CONSTANTS | change)
    with pytest.raises(build.BuildError, match=r"do not fit together: \w+ is (256|None) in C"):
        build.open_library(library)


def test_structs_are_compared_field_by_field(monkeypatch):
    class State(layout.State):
        _fields_ = (("further", ctypes.c_int64),)

    monkeypatch.setattr(layout, "STRUCTS", (*layout.STRUCTS[:-2], State))
    with pytest.raises(build.BuildError, match=r"State is 56 in C and 64 in Python; .*State\.further is None in C"):
        build.open_library(build.build(build.choose_flavour()))


def test_an_unknown_matching_is_refused_in_the_binding():
    with pytest.raises(ValueError, match="matching must be one of"):
        binding.curve_of(16, "median")
