"""In which dtype things are computed, and autocast, which must not change it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Sums run in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Sums over whole sequences run in float64, where there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def autocast_is_on(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def in_full_precision(function: Function) -> Function:
    """Run a function of tensors in the dtypes chosen there, also where autocast is on."""

    @wraps(function)
    def wrapped(query: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(query, Tensor) or not autocast_is_on(query.device.type):
            return function(query, *args, **options)
        with torch.autocast(query.device.type, enabled=False):
            return function(query, *args, **options)

    return cast(Function, wrapped)
