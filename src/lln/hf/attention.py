"""The functions that transformers calls: one that attends, and one that hands padding over to it.

An attention module of transformers gets its mechanism as a submodule, `module.mechanism`, from `lln.hf.convert`. A
model that was given "lln" or "lln_diag" by name alone has none and runs the function with its default options.

Shapes: B batch, H heads, H_k key heads, N queries, M keys, D features, V value width.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from lln import zoo
from lln.checks import known
from lln.functional import lln_attention, lln_diag_attention
from lln.hf.cache import StateLayer, state_layer

BY_NAME: dict[str, Callable[..., Tensor]] = {"lln": lln_attention, "lln_diag": lln_diag_attention}
# The name under which every other mechanism runs: transformers takes some names, such as "flash", for its own.
ZOO = "lln_zoo"

# What models hand to their attention function that changes scores or hides keys, and what it is.
UNSUPPORTED = {
    "softcap": "a cap on scores",
    "position_bias": "a bias for positions",
    "s_aux": "attention sinks",
    "sliding_window": "a sliding window",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "output_attentions": "output_attentions=True",
}
REMEDIES = {
    "sliding_window": "set config.sliding_window = None if inputs are shorter than the window",
    "cu_seq_lens_q": "pad the sequences instead",
    "cu_seq_lens_k": "pad the sequences instead",
    "output_attentions": (
        "there is no matrix of weights: look at the heads with lln.instruments.Recorder or `lln inspect`, or make one "
        "with lln.attention_matrix"
    ),
}


def register() -> None:
    """Make our attention known to transformers, padding included."""
    for name in (*BY_NAME, ZOO):
        AttentionInterface.register(name, partial(attend, name))
        AttentionMaskInterface.register(name, hand_over_padding)


def implementation(attention: str) -> str:
    """The name under which transformers runs a mechanism."""
    return attention if attention in BY_NAME else ZOO


def hand_over_padding(
    *, attention_mask: Tensor | None = None, mask_function: Any = causal_mask_function, **rest: Any
) -> Tensor | None:
    """A mask function of transformers: which of the tokens so far are real, (B, M) bool, or None if all are."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        if torch.compiler.is_compiling() and attention_mask is None:
            raise ValueError(
                "while a model is compiled, transformers cannot tell whether position_ids pack several sequences, "
                "which this attention cannot honour; pass attention_mask, of ones if there is no padding"
            )
        raise ValueError(
            "this attention sees all tokens that are not padding, or those of them up to its own. The model asks for "
            "another mask: a sliding window, chunks, packed sequences (position_ids that start again) or bidirectional "
            "parts of a causal sequence. Pad sequences instead of packing them, and pass their attention_mask, (batch, "
            'tokens); or go back with lln.hf.convert(model, "softmax")'
        )
    if attention_mask is None:
        return None
    everything = attention_mask.all()
    return None if known(everything) and bool(everything) else attention_mask.bool()


def attend(
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: (B, H, N, D), (B, H_k, M, D), (B, H_k, M, V) to (B, N, H, V)."""
    _refuse(rest, attention_mask)
    if getattr(module, "attends_elsewhere", False):  # the attention of a decoder to its encoder is left alone
        pairs = None if attention_mask is None else attention_mask[:, None, None, :]
        output, _ = sdpa_attention_forward(
            module, query, key, value, pairs, dropout=dropout, scaling=scaling, is_causal=False
        )
        return output, None
    mechanism = _mechanism(name, module)
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[3])
    if not math.isclose(factor, 1.0):  # mechanisms scale scores by 1 / sqrt(D) themselves
        query = query * factor
    if dropout > 0.0:  # there are no weights to drop, so value rows are dropped, for all queries of a head alike
        value = value * drop(value.new_ones(*value.shape[:3], 1), dropout)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, rotary embeddings leave them in float32
    layer: StateLayer | None = getattr(module, "lent_state", None)
    if layer is not None:
        module.lent_state = None  # a copy of the model must not hold what it once generated
        output = layer.attend(module.mechanism, query, key, value, attention_mask)
    else:
        causal = sees_only_the_past(module) if is_causal is None else is_causal
        _check_lengths(name, module, query, key, causal)
        attention = BY_NAME[name] if mechanism is None else mechanism
        output = attention(query, key, value, key_padding_mask=attention_mask, is_causal=causal)
    return output.transpose(1, 2).contiguous(), None


def lend_state(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook on attention modules: `module.lent_state` is the state in the cache that the module is called with."""
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    module.lent_state = None if cache is None else state_layer(cache, module.layer_idx)


def refuse_weights(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook on converted models, because not all of them tell their attention function about output_attentions."""
    _refuse({"output_attentions": kwargs.get("output_attentions")}, None)


def sees_only_the_past(module: nn.Module) -> bool:
    """Whether the tokens of an attention module see only those before them."""
    decoder = getattr(getattr(module, "config", None), "is_causal", True)  # can make a decoder bidirectional
    return bool(decoder and getattr(module, "is_causal", True))


def _refuse(rest: dict[str, Any], attention_mask: Any) -> None:
    for name, what in UNSUPPORTED.items():
        if rest.get(name) is not None and rest[name] is not False:
            remedy = REMEDIES.get(name, 'go back with lln.hf.convert(model, "softmax")')
            raise ValueError(f"this attention cannot honour {what}; {remedy}")
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2):
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must say which tokens are real, (batch, tokens), got {shape}: a mask for each pair of "
            "tokens cannot be honoured in linear time"
        )


def _mechanism(name: str, module: nn.Module) -> zoo.Mechanism | None:
    """What `lln.hf.convert` gave the module, or None if the model has its attention by name alone."""
    mechanism = getattr(module, "mechanism", None)
    if isinstance(mechanism, zoo.Mechanism):
        if implementation(mechanism.record.name) != name:
            raise ValueError(
                f"the model was converted to {mechanism.record.name} and then set to {name!r} by name; use "
                f"lln.hf.convert(model, {name!r}), which also takes options"
            )
        return mechanism
    config = getattr(module, "config", None)
    if getattr(config, "lln_attention", None) is not None or name not in BY_NAME:
        raise ValueError(
            "the configuration says that this model was converted, but its mechanism is not there; open it with "
            "lln.hf.from_pretrained(folder), or make it with lln.hf.convert"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{name!r} by name is for models of self-attention; use lln.hf.convert(model, {name!r}), which leaves the "
            "attention from decoder to encoder as it is"
        )
    return None


def _check_lengths(name: str, module: nn.Module, query: Tensor, key: Tensor, causal: bool) -> None:
    if query.shape[2] == key.shape[2]:
        return
    if causal and name in BY_NAME:
        raise ValueError(
            f"{name} given by name has no state for generating; call lln.hf.convert(model, {name!r}), which has one of "
            "constant size, or generate with use_cache=False"
        )
    if causal:
        raise ValueError("this mechanism keeps no state, so it cannot continue from a cache: pass use_cache=False")
    raise ValueError(
        f"self-attention needs as many queries as keys, got {query.shape[2]} and {key.shape[2]} in "
        f'{type(module).__name__}; go back with lln.hf.convert(model, "softmax")'
    )
