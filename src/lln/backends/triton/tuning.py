"""Kernels by name, and which of their configs runs."""

import functools
from typing import Any

import torch
from torch import Tensor

from lln.backends.triton.configs import config_of
from lln.backends.triton.kernels import causal, causal_backward, full_backward, gradients, moments, near, prefix, step, summary

MODULES = (moments, prefix, step, summary, full_backward, gradients, causal, causal_backward, near, step)


@functools.cache
def kernels() -> dict[str, Any]:
    return {name: kernel for module in MODULES for name, kernel in vars(module).items() if name.endswith("_kernel")}


def run(kernel: str, grid: tuple[int, ...], widths: tuple[int, int], dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    config = config_of(kernel, *widths, is_float32=dtype == torch.float32)
    function = kernels()[kernel]
    tiles = {name: config.tile for name in ("BLOCK_N", "BLOCK_M") if name in function.arg_names}
    function[grid](**arguments, **tiles, num_warps=config.warps, num_stages=config.stages)
