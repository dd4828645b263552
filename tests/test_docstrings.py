"""Public functions outside the core say what they take, return and raise; their examples run."""

import doctest
import inspect
import sys

import pytest
import torch

import lln.backends
import lln.instruments
import lln.zoo

transformers = pytest.importorskip("transformers")

import lln.hf  # noqa: E402

FUNCTIONS = [
    getattr(module, name)
    for module in (lln.instruments, lln.zoo, lln.hf, lln.backends)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_examples_run(function):
    sections = [part for part in ("Args:", "Returns:", "Raises:", "Example:") if part in function.__doc__]
    takes_something = bool(inspect.signature(function).parameters)
    assert sections[-1] == "Example:"
    assert ("Args:" in sections) == takes_something
    assert "Returns:" in sections
    names = vars(sys.modules[function.__module__]) | {"torch": torch, "transformers": transformers, "lln": lln}
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs=names)
    assert doctest.DocTestRunner().run(test).failed == 0
