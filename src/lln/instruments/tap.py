"""Observes the attentions of a model while it runs, without changing a bit of what it computes.

Modules get a `forward` that reads its arguments and then calls the module's own; Hugging Face models are observed
where they look up their attention function. Hooks would be simpler, but torch's fused encoder is not used with them,
which rounds differently. What is read is copied without gradients, without random numbers, and outside autocast,
so that its cache of cast weights is never touched and values are not rounded more than the model's own.
"""

import copy
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lln.instruments.capture import Capture, Choose, UnreadableError, from_hugging_face, from_ours
from lln.instruments.capture_torch import from_encoder_layer, from_torch
from lln.nn import LLNAttention

Reader = Callable[..., Capture]


class _Watched:
    """A module's forward whose arguments are read first. Copies and pickles of the module have its own forward."""

    def __init__(self, module: nn.Module, observe: Callable[..., None]) -> None:
        self.module, self.observe = module, observe
        self.previous, self.forward = module.__dict__.get("forward"), module.forward
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.observe(self.module, *args, **kwargs)
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.previous is not None:
            return copy.deepcopy(self.previous, memo)
        return MethodType(type(self.module).forward, copy.deepcopy(self.module, memo))  # the memo holds it by now

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (self.previous,)) if self.previous is not None else (_own_forward, (self.module,))

    def restore(self) -> None:
        if self.previous is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.previous


def _same(forward: Any) -> Any:
    return forward


def _own_forward(module: nn.Module) -> Any:
    return MethodType(type(module).forward, module)


class Tap(AbstractContextManager["Tap"]):
    """Captures the first call of each attention in `model` while it is open; `seconds` is what that took.

    `refused` has the reason for each attention that cannot be read, `calls` how often each was called.
    """

    def __init__(self, model: nn.Module, choose: Choose) -> None:
        self.captures: dict[str, Capture] = {}
        self.refused: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.seconds = 0.0
        self._choose = choose
        self._stack = ExitStack()
        for name, module, reader in attentions(model):
            self._wrap(name, module, reader)
        if "transformers.modeling_utils" in sys.modules:
            names = {id(module): name for name, module in model.named_modules()}
            self._stack.callback(_remove_listener, _add_listener(names, self._capture))

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give every module its own forward back."""
        self._stack.close()

    def _wrap(self, name: str, module: nn.Module, reader: Reader) -> None:
        self._stack.callback(_Watched(module, partial(self._capture, name, reader)).restore)

    def _capture(self, name: str, reader: Reader, *args: Any, **kwargs: Any) -> None:
        self.calls[name] += 1
        if name in self.captures or name in self.refused:  # gradient checkpointing and accumulation call again
            return
        start = time.perf_counter()
        device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        try:
            with torch.no_grad(), torch.autocast(device, enabled=False):
                self.captures[name] = reader(self._choose, *args, **kwargs)
        except UnreadableError as reason:
            self.refused[name] = str(reason)
            warnings.warn(f"{name} is not recorded: {reason}", stacklevel=2)
        self.seconds += time.perf_counter() - start


def attentions(model: nn.Module) -> list[tuple[str, nn.Module, Reader]]:
    """The modules of a model whose arguments are what they attend to, with their names."""
    found: list[tuple[str, nn.Module, Reader]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(mechanism := getattr(module, "mechanism", None), nn.Module):
            inside.add(id(mechanism))  # of a converted model, which is read where transformers calls it
        if isinstance(module, LLNAttention) and id(module) not in inside:
            found.append((name, module, from_ours))
        elif isinstance(module, nn.TransformerEncoderLayer) and _is_torch(module.self_attn):
            found.append((f"{name}.self_attn".removeprefix("."), module, from_encoder_layer))
            inside.add(id(module.self_attn))
        elif _is_torch(module) and id(module) not in inside:
            found.append((name, module, from_torch))
    return found


def _is_torch(module: nn.Module) -> bool:
    """Whether this is torch's MultiheadAttention, and not a subclass that computes something else."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def hugging_face_models(model: nn.Module) -> list[str]:
    """The names of the transformers models inside `model`."""
    if "transformers.modeling_utils" not in sys.modules:
        return []
    kind = sys.modules["transformers.modeling_utils"].PreTrainedModel
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


_listeners: list[tuple[dict[int, str], Callable[..., None]]] = []


def _add_listener(names: dict[int, str], observe: Callable[..., None]) -> tuple[dict[int, str], Callable[..., None]]:
    """Call `observe` with every call of an attention function by a module in `names`, until `_remove_listener`."""
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    if not _listeners:
        find = functions.get_interface

        def get_interface(implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = find(implementation, default)
            name = getattr(function, "kind", implementation or "eager")

            def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                for modules, observer in _listeners:
                    if id(module) in modules:
                        observer(modules[id(module)], from_hugging_face, name, module, *args, **kwargs)
                return function(module, *args, **kwargs)

            return observed

        functions.__dict__["get_interface"] = get_interface
    listener = (names, observe)
    _listeners.append(listener)
    return listener


def _remove_listener(listener: tuple[dict[int, str], Callable[..., None]]) -> None:
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    _listeners[:] = [other for other in _listeners if other is not listener]
    if not _listeners:
        del functions.__dict__["get_interface"]
