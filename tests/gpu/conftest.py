"""Kernels run in Triton's interpreter on CPU tensors, with all that they are to fill full of NaN."""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in str(item.path) and "compiled" not in item.keywords and not IS_INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 and triton, see make test-triton"))


@pytest.fixture
def triton_backend(monkeypatch):
    """Only the Triton backend and plain torch; says which kernels ran."""
    from lln.backends.triton import tuning

    ran = []
    run = tuning.run

    def record(kernel, *arguments):
        ran.append(kernel)
        run(kernel, *arguments)

    monkeypatch.setattr(tuning, "run", record)
    monkeypatch.setenv("LLN_BACKEND", "triton")
    return ran


@pytest.fixture
def full_of_nan(monkeypatch):
    """Tensors that are allocated without a value hold NaN, so that what a kernel does not write shows."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def filled(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: filled(new_empty(x, *a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **k: filled(empty_like(x, **k)))
