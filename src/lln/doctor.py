"""`lln doctor`: what this machine has, for bug reports; `python -m lln.doctor` where only torch is installed."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from lln.backends import explain
from lln.backends.cpu.build import BuildError, choose_flavour, load
from lln.backends.triton import missing_reason
from lln.provenance import commit, processor

PACKAGES = ("lln-attention", "torch", "transformers", "triton", "numpy", "scipy")
NOT_TIMED = "compiled and checked in an interpreter, not timed; docs/gpu.md describes how to time them"
VARIABLES = ("LLN_BACKEND", "LLN_CACHE", "LLN_DATA", "OMP_NUM_THREADS", "CC")


def describe() -> list[tuple[str, str]]:
    """Names and values: versions, processor, threads, and which backends run, or why they do not.

    Backends are those for attention in float32 with heads of 64, on the CPU and, where there is one, on the GPU.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    found = [(name, _version(name)) for name in PACKAGES]
    found += [
        ("commit", commit() or "not a checkout"),
        ("python", platform.python_version()),
        ("system", platform.platform()),
        ("processor", processor()),
        ("cores", str(os.cpu_count())),
        ("threads of torch", str(torch.get_num_threads())),
        ("instruction set", choose_flavour()),
        ("fused C code", _fused()),
        ("kernels for GPUs", f"no, {reason}" if (reason := missing_reason()) else NOT_TIMED),
    ]
    for device in devices:
        if device == "cuda":
            found.append(("GPU", torch.cuda.get_device_name()))
        x = torch.zeros(1, 1, 16, 64, device=device)
        found.append((f"backends on {device}", _explained(x)))
    return found + [(name, os.environ[name]) for name in VARIABLES if name in os.environ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _explained(x: torch.Tensor) -> str:
    try:
        return explain(x, x, x)
    except ValueError as error:  # of LLN_BACKEND
        return f"error, {error}"


def _fused() -> str:
    try:
        return f"loaded from {load()._name}"
    except BuildError as error:
        return f"no, {error}"


if __name__ == "__main__":
    for name, value in describe():
        print(f"{name}: {value}")
