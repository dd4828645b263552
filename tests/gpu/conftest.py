"""Kernels run on a GPU if there is one, or in Triton's interpreter; what they are to fill is full of NaN before."""

import pytest
import torch

import helpers

CAN_RUN = helpers.IS_INTERPRETED or helpers.GPU is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in str(item.path) and "compiled" not in item.keywords and not CAN_RUN:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, or triton and TRITON_INTERPRET=1: make test-triton"))


@pytest.fixture(autouse=True)
def _device():
    """Tensors of the tests are made on the GPU if there is one."""
    before = torch.get_default_device()
    torch.set_default_device(helpers.GPU or before)
    yield
    torch.set_default_device(before)


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
