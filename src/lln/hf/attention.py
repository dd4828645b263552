"""The functions that transformers calls: one that attends, and one that passes padding and packing to it.

An attention module of transformers gets its mechanism as a submodule, `module.mechanism`, from `lln.hf.convert`. A
model that was given "lln" or "lln_diag" by name alone has none and runs the function with its default options.

Shapes: B batch, H heads, H_k key heads, N queries, M keys, D features, V value width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from lln import zoo
from lln.checks import check_values, is_readable
from lln.functional import lln_attention, lln_diag_attention
from lln.hf.packing import PLAIN_MASKS, PackedMask, attend_rows, packed_mask, read_packing
from lln.hf.state_cache import StateLayer, note_past_recording, state_layer

BY_NAME: dict[str, Callable[..., Tensor]] = {"lln": lln_attention, "lln_diag": lln_diag_attention}
# The name under which every other mechanism runs: transformers takes some names, such as "flash", for its own.
ZOO = "lln_zoo"
# What is added to a score to hide its key; models write -10000 or the lowest number of the dtype, and exp of it is 0.
HIDDEN = -1e4

# What models pass to their attention function: arguments that it uses, and others that change scores or hide keys. The
# latter are None or False where they are not used.
KNOWN = {
    *("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal", "output_attentions"),
    *("position_ids", "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}
UNSUPPORTED = {
    "softcap": "a cap on scores",
    "position_bias": "a bias for positions",
    "s_aux": "attention sinks",
    "sliding_window": "a sliding window",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "output_attentions": "output_attentions=True",
}
# What states that a row holds several sequences, beside masks and positions.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
REMEDIES = {
    "sliding_window": "set config.sliding_window = None if inputs are shorter than the window",
    "output_attentions": (
        "there is no matrix of weights: inspect the heads with lln.instruments.Recorder or `lln inspect`, or make one "
        "with lln.attention_matrix"
    ),
}


def register() -> None:
    """Make our attention known to transformers, padding and caches included."""
    note_past_recording()
    for name in (*BY_NAME, ZOO):
        AttentionInterface.register(name, partial(attend, name))
        AttentionMaskInterface.register(name, make_padding_mask)


def implementation(attention: str) -> str:
    """The name under which transformers runs a mechanism."""
    return attention if attention in BY_NAME else ZOO


@dataclass(frozen=True)
class RefusedMask:
    """A mask that cannot be honoured. Models also make masks that none of their layers uses, so it is refused there."""

    reason: str


def make_padding_mask(
    *,
    attention_mask: Tensor | None = None,
    mask_function: Any = causal_mask_function,
    q_length: int,
    q_offset: int | Tensor = 0,
    **rest: Any,
) -> Tensor | PackedMask | RefusedMask | None:
    """A mask function of transformers: which of the tokens so far are real, (B, M) bool, or None if all are; or where
    packed sequences start.
    """
    if mask_function not in PLAIN_MASKS:
        if torch.compiler.is_compiling() and attention_mask is None:
            return RefusedMask(
                "while a model is compiled, transformers does not detect whether position_ids pack several sequences; "
                "pass attention_mask, of ones if there is no padding, and cu_seq_lens_q and cu_seq_lens_k if they do"
            )
        packed = None if attention_mask is not None else packed_mask(mask_function)
        return packed or RefusedMask(
            "a query attends to all tokens of its sequence that are not padding, or to those of them up to its own. "
            "The model needs another mask: a sliding window, chunks or bidirectional parts of a causal sequence. Pass "
            'an attention_mask, (batch, tokens), alone; or go back with lln.hf.convert(model, "softmax")'
        )
    if attention_mask is None:
        return None
    keep = attention_mask.bool()
    if keep.dim() != 2 or keep.shape[1] != q_length + q_offset:  # refused by `attend`, unless it is for other keys
        return keep
    everything = keep.all()
    return None if is_readable(everything) and bool(everything) else keep


def attend(
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedMask | RefusedMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: (B, H, N, D), (B, H_k, M, D), (B, H_k, M, V) to (B, N, H, V)."""
    if isinstance(attention_mask, RefusedMask):
        raise ValueError(attention_mask.reason)
    _refuse(rest)
    if getattr(module, "stays_softmax", False):  # the attention of a decoder to its encoder is left alone
        if isinstance(attention_mask, PackedMask) or any(rest.get(x) is not None for x in PACKING):
            raise ValueError("a decoder cannot attend to packed sequences of its encoder; pad the sequences instead")
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, None, None, :]
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False
        )
        return output, None
    mechanism = _mechanism(name, module)
    causal = _is_causal(module, is_causal, attention_mask, query)
    cu_seqlens = read_packing(attention_mask, query, key, rest)
    keep = None if isinstance(attention_mask, PackedMask) else _read_mask(attention_mask, query, causal)
    factor = 1.0 if scaling is None else scaling * query.shape[3] ** 0.5
    if abs(factor - 1.0) > 1e-9:  # mechanisms scale scores by 1 / sqrt(D) themselves
        query = query * factor
    if dropout > 0.0:  # there are no weights to drop, so value rows are dropped, for all queries of a head alike
        value = value * drop(value.new_ones(*value.shape[:3], 1), dropout)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, rotary embeddings leave them in float32
    rows = getattr(mechanism, "packed_rows", None)
    layer: StateLayer | None = getattr(module, "current_state_layer", None)
    if layer is not None:
        module.current_state_layer = None  # a copy of the model must not hold what it once generated
        if not causal:
            raise ValueError("a state goes from token to token, so is_causal=False needs use_cache=False")
        if cu_seqlens is not None or rows is not None:
            raise ValueError("a cache is for one sequence in each row; pass use_cache=False with packed sequences")
        output = layer.attend(module.mechanism, query, key, value, keep)
    else:
        _check_lengths(name, module, query, key, keep, causal)
        attention = BY_NAME[name] if mechanism is None else mechanism
        if rows is not None:  # a part of each row, where the starts of whole rows are known
            samples = (torch.split(x, 1) for x in (query, key, value))
            parts = zip(*samples, rows, strict=True)
            output = torch.cat([attention(q, k, v, cu_seqlens=x, is_causal=causal) for q, k, v, x in parts])
        elif cu_seqlens is None:
            output = attention(query, key, value, key_padding_mask=keep, is_causal=causal)
        else:
            output = attend_rows(attention, query, key, value, cu_seqlens, is_causal=causal)
    return output.transpose(1, 2).contiguous(), None


def set_state_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook on attention modules: sets `module.current_state_layer` to the state in the cache of the call."""
    cache = kwargs.get("past_key_values")  # the name that most models have for it
    if not isinstance(cache, Cache):
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    module.current_state_layer = None if cache is None else state_layer(cache, module.layer_idx, module.max_rollback)


def refuse_weights(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook on converted models, because not all of them pass output_attentions to their attention function."""
    asked = kwargs.get("output_attentions")
    _refuse({"output_attentions": model.config.output_attentions if asked is None else asked})


def _is_causal(module: nn.Module, given: bool | None, attention_mask: Any, query: Tensor) -> bool:
    """Whether tokens attend only to those before them, as `lln.hf.convert` found, or else by `module.is_causal`.

    As in transformers, `is_causal=` of a call counts where there is no mask; some modules pass False beside a mask.
    """
    decided = getattr(module, "attends_causally", getattr(module, "is_causal", given))
    if decided is None:
        raise ValueError(f"{type(module).__name__} has no attribute is_causal; convert the model with lln.hf.convert")
    if getattr(getattr(module, "config", None), "is_causal", None) is False:  # makes a decoder bidirectional
        decided = False
    if given is not None and given != decided and attention_mask is None and query.shape[2] > 1:
        raise ValueError(
            f"is_causal={given} is not for {type(module).__name__}, which is {'' if decided else 'not '}causal; leave "
            "it out"
        )
    return bool(decided)


def _refuse(rest: dict[str, Any]) -> None:
    for name, what in UNSUPPORTED.items():
        if rest.get(name) is not None and rest[name] is not False:
            remedy = REMEDIES.get(name, 'go back with lln.hf.convert(model, "softmax")')
            raise ValueError(f"this attention cannot honour {what}; {remedy}")


def _read_mask(attention_mask: Any, query: Tensor, causal: bool) -> Tensor | None:
    """Which keys are real, (B, M), from such a mask or from one that is the same for all queries, (B, 1, 1, M)."""
    if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2):
        return attention_mask
    if not isinstance(attention_mask, Tensor) or attention_mask.shape[1:-1] != (1, 1) or causal:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must mark the tokens that are kept, (batch, tokens), got {shape}: a mask for each pair of "
            "tokens cannot be honoured in linear time"
        )
    mask = attention_mask[:, 0, 0].expand(query.shape[0], -1)
    if mask.dtype is torch.bool:
        return mask
    keep = mask == 0
    check_values(
        keep | (mask <= HIDDEN),
        "an attention_mask that is added to scores must be 0 or hide a key; biases cannot be honoured",
    )
    return keep


def _mechanism(name: str, module: nn.Module) -> zoo.Mechanism | None:
    """What `lln.hf.convert` gave the module, or None if the model has its attention by name alone."""
    mechanism = getattr(module, "mechanism", None)
    if isinstance(mechanism, zoo.Mechanism):
        if implementation(mechanism.description.name) != name:
            raise ValueError(
                f"the model was converted to {mechanism.description.name} and then set to {name!r} by name; use "
                f"lln.hf.convert(model, {name!r}), which also takes options"
            )
        return mechanism
    config = getattr(module, "config", None)
    if getattr(config, "lln_attention", None) is not None or name not in BY_NAME:
        raise ValueError(
            "according to its configuration this model was converted, but its mechanism is not there; open it with "
            "lln.hf.from_pretrained(folder), or make it with lln.hf.convert"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{name!r} by name is for models of self-attention; use lln.hf.convert(model, {name!r}), which leaves the "
            "attention from decoder to encoder as it is"
        )
    return None


def _check_lengths(name: str, module: nn.Module, query: Tensor, key: Tensor, keep: Tensor | None, causal: bool) -> None:
    if keep is not None and keep.shape[1] != key.shape[2]:
        raise ValueError(
            f"attention_mask must be for all {key.shape[2]} tokens, got {tuple(keep.shape)}; with a cache it includes "
            "the tokens in it"
        )
    if query.shape[2] == key.shape[2]:
        return
    mechanism = getattr(module, "mechanism", None)
    if causal and mechanism is None:
        raise ValueError(
            f"{name} given by name has no state for generating; call lln.hf.convert(model, {name!r}), which has one of "
            "constant size, or generate with use_cache=False"
        )
    if causal:
        raise ValueError("this mechanism keeps no state, so it cannot continue from a cache: pass use_cache=False")
    description = zoo.describe(name) if mechanism is None else mechanism.description
    if keep is not None or not description.cross:  # a mask of keys does not mark the queries that are padding
        raise ValueError(
            f"{type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} keys, and as many of both are "
            'needed; pass use_cache=False if there is a cache, or go back with lln.hf.convert(model, "softmax")'
        )
