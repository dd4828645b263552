"""Calls like an earlier one, which need not be validated and planned again.

What a call on a CPU computes, and how, follows from the shapes, strides and dtypes of its tensors and from its options.
The first call with such a signature is validated and prepared (`lln.backends.Backend.prepare`); the next ones only
bring other addresses.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lln.checks import is_recorded

Signature = tuple[Hashable, ...]
# What decides a call by its value; a tensor does not.
PLAIN = (type(None), bool, int, float, str)


def signature_of(query: Tensor, key: Tensor, value: Tensor, *others: Hashable) -> Signature | None:
    """What a call has in common with those like it; None where it may not be repeated.

    Autocast, subclasses of tensors, and whatever records or transforms operations take the usual way.
    """
    if torch.compiler.is_compiling() or not (type(query) is type(key) is type(value) is Tensor):
        return None
    if not (query.is_cpu and key.is_cpu and value.is_cpu):
        return None
    tracked = (query.requires_grad, key.requires_grad, value.requires_grad) if torch.is_grad_enabled() else None
    if torch.is_autocast_enabled("cpu") or is_recorded():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None
    return (
        *(query.shape, query.stride(), query.dtype, key.shape, key.stride(), key.dtype),
        *(value.shape, value.stride(), value.dtype, tracked, others),
    )


def options_signature(options: dict[str, Any]) -> Signature | None:
    """Options with their types, since True equals 1; None if one of them is a tensor.

    Centres, whose values are not read, count by their address: a prepared call holds a reference and reads them there.
    """
    if not options:
        return ()
    centers = options.get("centers")
    places: Signature = ()
    if centers is not None:
        options = {name: x for name, x in options.items() if name != "centers"}
        if type(centers) is not tuple or not all(type(x) is Tensor and x.is_contiguous() for x in centers):
            return None
        places = tuple([(x.data_ptr(), x.shape, x.dtype, x.is_cpu, x.requires_grad) for x in centers])
    types = tuple(map(type, options.values()))
    return (*options.items(), types, places) if all(x in PLAIN for x in types) else None
