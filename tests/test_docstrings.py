"""Public functions outside the core document what they take, return and raise; their examples run."""

import doctest
import inspect
import sys

import pytest
import torch

import lln.backends
import lln.distributed
import lln.instruments
import lln.paper
import lln.report.page
import lln.results
import lln.zoo

transformers = pytest.importorskip("transformers")

import lln.hf  # noqa: E402

FUNCTIONS = [
    getattr(module, name)
    for module in (lln.instruments, lln.zoo, lln.hf, lln.backends, lln.distributed)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]
FUNCTIONS += [
    x
    for place in (lln.paper, lln.report.page, lln.results, lln.results.Result, lln.backends.Backend, lln.LLNState)
    for name, x in inspect.getmembers(place, inspect.isroutine)
    if not name.startswith("_") and x.__module__ == (place.__name__ if inspect.ismodule(place) else place.__module__)
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_examples_run(function):
    sections = [part for part in ("Args:", "Returns:", "Raises:", "Example:") if part in function.__doc__]
    signature = inspect.signature(function)
    assert sections[-1] == "Example:"
    assert ("Args:" in sections) == any(name != "self" for name in signature.parameters)
    assert ("Returns:" in sections) == (signature.return_annotation is not None)
    names = vars(sys.modules[function.__module__]) | {"torch": torch, "transformers": transformers, "lln": lln}
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs=names)
    assert doctest.DocTestRunner().run(test).failed == 0
