"""`lln.hf.convert`: finds the attention modules of a transformers model and gives each its mechanism."""

import ast
import inspect
import math
import re
import warnings
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lln import zoo
from lln.checks import check_at_least
from lln.hf import source
from lln.hf.attention import KNOWN, UNSUPPORTED, implementation, refuse_weights, set_state_layer
from lln.hf.state_cache import MAX_ROLLBACK, has_state

# Attention of transformers itself: "softmax" stands for the one that a model has by default.
PLAIN = ("softmax", "sdpa", "eager")
CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
OTHER_SEQUENCE = {"key", "keys", "context"}
COMPUTED = re.compile(r"softmax\(|scaled_dot_product_attention\(")
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")

Model = TypeVar("Model", bound=PreTrainedModel)


def convert(
    model: Model,
    attention: str = "lln_diag",
    *,
    max_len: int | None = None,
    max_rollback: int | None = None,
    **options: Any,
) -> Model:
    """Replace every self-attention of a transformers model by another mechanism, in place.

    The attention of a decoder to its encoder stays softmax attention. Learned parameters of the mechanism become
    parameters of the model. A converted model can be converted again.

    Args:
        model: a model of transformers.
        attention: one of `lln.zoo.names()`; "softmax" restores the attention of transformers, and so do "sdpa" and
            "eager".
        max_len: the largest number of tokens, for mechanisms that need it; by default the positions of the model.
        max_rollback: the number of tokens that assisted decoding can take back at once, where the cache is a state: at
            least as many as an assistant proposes.
        options: those of the mechanism, see `lln.zoo.build`.

    Returns:
        The same model.

    Raises:
        TypeError: the model is not one of transformers, or the mechanism has no such option.
        ValueError: the mechanism cannot do what a layer needs, which is named with the reason.

    Example:
        >>> config = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
        >>> model = convert(transformers.BertModel(config), "lln_diag", block_size=16)
        >>> model(torch.randint(100, (1, 40))).last_hidden_state.shape
        torch.Size([1, 40, 32])
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"a transformers model is needed, got {type(model).__name__}; for torch there is lln.MultiheadAttention"
        )
    if max_rollback is not None:
        check_at_least(1, max_rollback=max_rollback)
    modules = attention_modules(model)
    if attention in PLAIN:
        if max_len is not None or max_rollback is not None or options:
            raise ValueError(f"{attention!r} is the attention of transformers, which takes no options here")
        _clean(model, modules)
        model.set_attn_implementation(
            model.get_correct_attn_implementation(None) if attention == "softmax" else attention
        )
        return model
    description = zoo.describe(attention)
    _check_model(model, modules)
    elsewhere = {name for name, module in modules.items() if _is_cross_attention(name, module)}
    mechanisms, causal = {}, {}
    for name in [name for name in modules if name not in elsewhere]:
        causal[name] = _check_module(model, name, modules[name], description)
        mechanisms[name] = _build(model, modules[name], attention, causal[name], max_len, options)
    if not mechanisms:
        raise ValueError(
            f"{type(model).__name__} has no self-attention, and attention to another sequence stays as it is"
        )
    if max_rollback is not None and not any(has_state(x) and causal[name] for name, x in mechanisms.items()):
        raise ValueError(
            f"{attention} in {type(model).__name__} keeps no state that could go back; leave max_rollback out"
        )
    _clean(model, modules)
    for name, module in modules.items():
        module.stays_softmax = name in elsewhere
        if name in elsewhere:
            continue
        module.mechanism, module.attends_causally = mechanisms[name], causal[name]
        if has_state(mechanisms[name]) and causal[name]:
            module.max_rollback = max_rollback or MAX_ROLLBACK
            module.register_forward_pre_hook(set_state_layer, with_kwargs=True)
    for part in _models(model):
        part.register_forward_pre_hook(refuse_weights, with_kwargs=True)
    model.set_attn_implementation(implementation(attention))
    for config in _configs(model, modules):
        # Both are saved with the model. The second one makes transformers refuse the folder where lln is not known.
        config.lln_attention = {"attention": attention, "max_len": max_len, "options": options}
        config.lln_attention |= {} if max_rollback is None else {"max_rollback": max_rollback}
        config.attn_implementation = implementation(attention)
    if elsewhere:
        warnings.warn(
            f"the attention of the decoder of {type(model).__name__} to its encoder stays softmax attention; "
            f"self-attention is {attention} now",
            stacklevel=2,
        )
    torchs = [name for name, module in model.named_modules() if type(module) is nn.MultiheadAttention]
    if torchs:
        warnings.warn(
            f"torch.nn.MultiheadAttention stays softmax attention, in {', '.join(torchs)}; the rest is {attention} now",
            stacklevel=2,
        )
    return model


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that look up their attention function in transformers, by name."""
    return {name: module for name, module in model.named_modules() if source.calls_interface(type(module))}


def _check_model(model: PreTrainedModel, modules: dict[str, Any]) -> None:
    kinds: set[Any] = {type(module) for module in model.modules() if "Attention" in type(module).__name__}
    past = {
        kind.__name__
        for kind in kinds - {nn.MultiheadAttention}
        if not source.calls_interface(kind) and COMPUTED.search(source.read(kind))
    }
    if past or not modules or not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} computes attention past the attention interface of transformers"
            f"{' in ' if past else ''}{', '.join(sorted(past))}, so it cannot be converted; take a model type that "
            "goes through it, such as bert or roberta, or convert the part of the model that does"
        )
    if any(config.output_attentions for config in _configs(model, modules)):
        raise ValueError(
            "the configuration sets output_attentions, and there will be no weights to give out; "
            "set model.config.output_attentions = False"
        )


def _check_module(model: PreTrainedModel, name: str, module: Any, description: zoo.Description) -> bool:
    """Refuse at once what would be refused when the module runs. Returns whether the module is causal."""
    calls, masks = source.attention_calls(module), source.masks(_around(model, name))
    causal = _is_causal(module, calls, masks)
    reason = (
        _refused_setting(module.config)
        or _refused_argument(module, calls)
        or _refused_mask(module, calls, masks)
        or _refused_by_mechanism(module, calls, causal, description)
    )
    if reason is not None:
        raise ValueError(f"{name} cannot be {description.name}: it {reason}")
    return bool(causal)


def _refused_setting(config: PreTrainedConfig) -> str | None:
    types = set(getattr(config, "layer_types", None) or [])
    if types - {"full_attention"}:
        return f"has layers of types {sorted(types)}, and only full_attention can be converted"
    if (
        not types
        and getattr(config, "sliding_window", None) is not None
        and getattr(config, "use_sliding_window", True)
    ):
        return (
            f"attends within a sliding window of {config.sliding_window} tokens; if your inputs are shorter, load it "
            "with sliding_window=None"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "puts a cap on its scores (attn_logit_softcapping)"
    return None


def _refused_argument(module: Any, calls: list[dict[str, ast.expr]]) -> str | None:
    """What the module passes to its attention function that this attention cannot honour."""
    if not calls:
        return "calls its attention function in a way that cannot be read"
    for call in calls:
        for argument in sorted(call.keys() - KNOWN):
            value = source.value_of(call[argument], module)
            if value is not None and value is not False:
                what = UNSUPPORTED.get(argument, f"the argument {argument}")
                return f"needs {what}" + ("" if value is source.UNKNOWN else f" ({argument}={_brief(value)})")
    return None


def _refused_mask(module: Any, calls: list[dict[str, ast.expr]], masks: source.Masks) -> str | None:
    """A mask that is not made by the functions of transformers, which would call ours."""
    names = {_mask(call) for call in calls} - {"None"}
    if names - {"attention_mask"}:
        return f"makes a mask itself, {', '.join(sorted(names))}"
    changed = source.changes_its_mask(module)
    if changed is not None:
        return f"changes its mask: {changed}"
    if names and masks.own and not masks.are_of_keys:
        return f"is given a mask that the model makes itself: {masks.own[-1]}"
    return None


def _refused_by_mechanism(
    module: Any, calls: list[dict[str, ast.expr]], causal: bool | None, description: zoo.Description
) -> str | None:
    if causal is None:
        return "has no attribute is_causal"
    if causal and not description.causal:
        return f"is causal, which {description.name} cannot be; these can: {_with('causal')}"
    if getattr(module, "sequence_reduction_ratio", 1) > 1 and not description.cross:
        return f"has fewer keys than queries, which {description.name} cannot have; these can: {_with('cross')}"
    if causal and (len(calls) > 1 or source.cache_places(module) - {"self.layer_idx"}):
        return "keeps more in a cache than one sequence of keys and values"
    return None


def _with(ability: str) -> str:
    return ", ".join(name for name in zoo.names() if getattr(zoo.describe(name), ability))


def _is_causal(module: Any, calls: list[dict[str, ast.expr]], masks: source.Masks) -> bool | None:
    """Whether tokens attend only to those before them: by the mask, as in transformers, or by `module.is_causal`."""
    if getattr(module.config, "is_causal", True) is False:  # makes a decoder bidirectional
        return False
    has_mask = any(_mask(call) != "None" for call in calls)
    if has_mask and masks.causal != masks.bidirectional:
        return masks.causal
    given = {source.value_of(call["is_causal"], module) for call in calls if "is_causal" in call} - {source.UNKNOWN}
    if len(given) == 1:
        return bool(given.pop())
    if hasattr(module, "is_causal"):
        return bool(module.is_causal)
    return False if masks.are_of_keys else None


def _around(model: PreTrainedModel, name: str) -> list[nn.Module]:
    """The modules around one, up to the innermost model, which makes its masks."""
    around: list[nn.Module] = []
    while name and not (around and isinstance(around[-1], PreTrainedModel)):
        name = name.rpartition(".")[0]
        around.append(model.get_submodule(name))
    return around


def _mask(call: dict[str, ast.expr]) -> str:
    return ast.unparse(call.get("attention_mask", ast.Constant(None)))


def _brief(value: object) -> str:
    return type(value).__name__ if isinstance(value, torch.Tensor) else str(value)


def _build(
    model: PreTrainedModel, module: Any, attention: str, causal: bool, max_len: int | None, options: dict[str, Any]
) -> zoo.Mechanism:
    config = module.config
    heads = _first(module, HEADS) or config.num_attention_heads
    width = _first(module, HEAD_DIMS) or getattr(config, "head_dim", None) or config.hidden_size // heads
    value_width = getattr(module, "v_head_dim", None) or width
    if max_len is None and (zoo.describe(attention).needs_max_len or causal):
        max_len = _positions(config)

    def build(**shape: int) -> zoo.Mechanism:
        return zoo.build(attention, num_heads=heads, head_dim=width, max_len=max_len, **options, **shape)

    mechanism = build()
    shape = {"value_dim": value_width, "num_key_heads": heads // (getattr(module, "num_key_value_groups", 1) or 1)}
    taken = inspect.signature(type(mechanism)).parameters.keys() - options.keys()
    mechanism = build(**{name: size for name, size in shape.items() if name in taken}).eval()
    key_heads = getattr(mechanism, "num_key_heads", heads)
    query, key = torch.ones(1, heads, 2, width), torch.ones(1, key_heads, 2, width)
    with torch.random.fork_rng(devices=[]):  # a first run, so that options that cannot be honoured are refused here
        mechanism(query, key, torch.ones(1, key_heads, 2, value_width), is_causal=causal)
    device = next(module.parameters()).device
    return mechanism.train(module.training).to(model.dtype).to("cpu" if device.type == "meta" else device)


def _first(module: Any, names: tuple[str, ...]) -> Any:
    """The first of several attributes that a module has, and that is not 0."""
    return next((value for value in (getattr(module, name, None) for name in names) if value), None)


def _positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a model takes: its positions, or its patches and two tokens beside them."""
    if getattr(config, "max_position_embeddings", None):
        return int(config.max_position_embeddings)
    if not getattr(config, "image_size", None) or not getattr(config, "patch_size", None):
        return None
    sides = zip(_pair(config.image_size), _pair(config.patch_size), strict=True)
    return math.prod(size // patch for size, patch in sides) + 2


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _is_cross_attention(name: str, module: Any) -> bool:
    """Whether a module attends to another sequence than its own: by its name, or because it needs two of them."""
    needed = {x.name for x in inspect.signature(module.forward).parameters.values() if x.default is x.empty}
    flag = getattr(module, "is_cross_attention", False) or needed & OTHER_SEQUENCE
    return bool(flag) or bool(CROSS.search(f"{name}.{type(module).__name__}"))


def _clean(model: PreTrainedModel, modules: dict[str, Any]) -> None:
    """Take away all that an earlier conversion left."""
    for module in modules.values():
        for attribute in ("mechanism", "stays_softmax", "current_state_layer", "attends_causally", "max_rollback"):
            if hasattr(module, attribute):
                delattr(module, attribute)
    for module in (*_models(model), *modules.values()):
        for key in [
            key for key, hook in module._forward_pre_hooks.items() if hook in (set_state_layer, refuse_weights)
        ]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    for config in _configs(model, modules):
        for setting in ("lln_attention", "attn_implementation"):
            config.__dict__.pop(setting, None)


def _models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside it, each of which can be called."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _configs(model: PreTrainedModel, modules: dict[str, Any]) -> list[Any]:
    """The configuration of the model and those of its parts, such as the two of a model of images and text."""
    return list({id(config): config for config in (model.config, *(m.config for m in modules.values()))}.values())
