"""`lln.hf.convert`: finds the attention modules of a transformers model and gives each its mechanism."""

import inspect
import math
import re
import warnings
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lln import zoo
from lln.hf.attention import implementation, lend_state, refuse_weights, sees_only_the_past
from lln.hf.cache import has_state

# Attention of transformers itself: "softmax" stands for the one that a model has by default.
PLAIN = ("softmax", "sdpa", "eager")
CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
HEAD_DIMS = ("head_dim", "attention_head_size", "head_size")

Model = TypeVar("Model", bound=PreTrainedModel)


def convert(model: Model, attention: str = "lln_diag", *, max_len: int | None = None, **options: Any) -> Model:
    """Make every self-attention of a transformers model `attention`, in place; returns the model.

    `attention` is one of `lln.zoo.names()` and `options` are its options, see `lln.zoo.build`. Learned parameters of
    the mechanism become parameters of the model. `max_len` is for mechanisms that need it; left out, it is the number
    of positions that the model has. A converted model can be converted again; "softmax" gives it back the attention
    of transformers, and so do "sdpa" and "eager".

    The attention of a decoder to its encoder stays softmax attention.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"a transformers model is needed, got {type(model).__name__}; for torch there is lln.MultiheadAttention"
        )
    modules = attention_modules(model)
    if attention in PLAIN:
        if max_len is not None or options:
            raise ValueError(f"{attention!r} is the attention of transformers, which takes no options here")
        _clean(model, modules)
        model.set_attn_implementation(
            model.get_correct_attn_implementation(None) if attention == "softmax" else attention
        )
        return model
    record = zoo.describe(attention)
    _check_model(model, modules)
    elsewhere = {name for name, module in modules.items() if _attends_elsewhere(name, module)}
    mechanisms = {}
    for name in [name for name in modules if name not in elsewhere]:
        _check_module(name, modules[name], record)
        mechanisms[name] = _build(model, modules[name], attention, max_len, options)
    _clean(model, modules)
    for name, module in modules.items():
        module.attends_elsewhere = name in elsewhere
        if name in elsewhere:
            continue
        module.mechanism = mechanisms[name]
        if has_state(mechanisms[name]) and sees_only_the_past(module):
            module.register_forward_pre_hook(lend_state, with_kwargs=True)
            model._is_stateful = True  # refuses to decode with an assistant, whose tokens may have to be taken back
    model.register_forward_pre_hook(refuse_weights, with_kwargs=True)
    model.set_attn_implementation(implementation(attention))
    for config in _configs(model, modules):
        # Both are saved with the model. The second one makes transformers refuse the folder where lln is not known.
        config.lln_attention = {"attention": attention, "max_len": max_len, "options": options}
        config.attn_implementation = implementation(attention)
    if elsewhere:
        warnings.warn(
            f"the attention of the decoder of {type(model).__name__} to its encoder stays softmax attention; "
            f"self-attention is {attention} now",
            stacklevel=2,
        )
    return model


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that ask transformers for their attention function, by name."""
    return {name: module for name, module in model.named_modules() if INTERFACE in _source(type(module))}


def _source(kind: Any) -> str:
    """The source of a module's class and its bases; reading it is also how transformers finds out what they do."""
    return _read_source(kind)


@cache
def _read_source(kind: type) -> str:
    if issubclass(kind, PreTrainedModel):
        return ""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    with suppress(OSError, TypeError):  # a class without source, such as one typed into a console
        return "".join(inspect.getsource(base) for base in bases)
    return ""


def _check_model(model: PreTrainedModel, modules: dict[str, Any]) -> None:
    kinds = {type(module) for module in model.modules() if "Attention" in type(module).__name__}
    past = {kind.__name__ for kind in kinds if "softmax(" in (code := _source(kind)) and INTERFACE not in code}
    if past or not modules or not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} computes attention past the attention interface of transformers"
            f"{' in ' if past else ''}{', '.join(sorted(past))}, so it cannot be converted; take a model type that "
            "goes through it, such as bert or roberta, or convert the part of the model that does"
        )
    if model.config.output_attentions:
        raise ValueError(
            "the configuration asks for output_attentions, and there will be no weights to give out; "
            "set model.config.output_attentions = False"
        )


def _check_module(name: str, module: Any, record: zoo.Record) -> None:
    """Refuse at once what would be refused when the module runs."""
    config = module.config
    reason = None
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        reason = f"has layers of types {sorted(set(config.layer_types))}, and only full_attention can be converted"
    elif getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        reason = (
            f"looks through a sliding window of {config.sliding_window} tokens; if your inputs are shorter, load it "
            "with sliding_window=None"
        )
    elif getattr(config, "attn_logit_softcapping", None) is not None:
        reason = "puts a cap on its scores (attn_logit_softcapping)"
    elif hasattr(module, "sinks"):
        reason = "has attention sinks"
    elif hasattr(module, "has_relative_attention_bias"):
        reason = "adds a bias for relative positions to its scores"
    elif sees_only_the_past(module) and not record.causal:
        causal = ", ".join(other for other in zoo.names() if zoo.describe(other).causal)
        reason = f"is causal, which {record.name} cannot be; these can: {causal}"
    if reason is not None:
        raise ValueError(f"{name} cannot be {record.name}: it {reason}")


def _build(
    model: PreTrainedModel, module: Any, attention: str, max_len: int | None, options: dict[str, Any]
) -> zoo.Mechanism:
    config = module.config
    heads = next((n for n in (getattr(module, x, None) for x in HEADS) if n), None) or config.num_attention_heads
    width = next((d for d in (getattr(module, x, None) for x in HEAD_DIMS) if d), None)
    width = width or getattr(config, "head_dim", None) or config.hidden_size // heads
    if max_len is None and (zoo.describe(attention).needs_max_len or sees_only_the_past(module)):
        max_len = _positions(config)
    mechanism = zoo.build(attention, num_heads=heads, head_dim=width, max_len=max_len, **options)
    with torch.random.fork_rng(devices=[]):  # a first run, so that options that cannot be honoured are refused here
        mechanism(*torch.ones(3, 1, heads, 2, width), is_causal=sees_only_the_past(module))
    device = next(module.parameters()).device
    return mechanism.train(module.training).to(model.dtype).to("cpu" if device.type == "meta" else device)


def _positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a model can see: its positions, or its patches and two tokens beside them."""
    if getattr(config, "max_position_embeddings", None):
        return int(config.max_position_embeddings)
    if not getattr(config, "image_size", None) or not getattr(config, "patch_size", None):
        return None
    sides = zip(_pair(config.image_size), _pair(config.patch_size), strict=True)
    return math.prod(size // patch for size, patch in sides) + 2


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _attends_elsewhere(name: str, module: Any) -> bool:
    flag = getattr(module, "is_cross_attention", False)
    return bool(flag) or bool(CROSS.search(f"{name}.{type(module).__name__}"))


def _clean(model: PreTrainedModel, modules: dict[str, Any]) -> None:
    """Take away all that an earlier conversion left."""
    for module in modules.values():
        for attribute in ("mechanism", "attends_elsewhere", "lent_state"):
            if hasattr(module, attribute):
                delattr(module, attribute)
    for module in (model, *modules.values()):
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook in (lend_state, refuse_weights)]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    model.__dict__.pop("_is_stateful", None)
    for config in _configs(model, modules):
        for setting in ("lln_attention", "attn_implementation"):
            config.__dict__.pop(setting, None)


def _configs(model: PreTrainedModel, modules: dict[str, Any]) -> list[Any]:
    """The configuration of the model and those of its parts, such as the two of a model of images and text."""
    return list({id(config): config for config in (model.config, *(m.config for m in modules.values()))}.values())
