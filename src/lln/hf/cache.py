"""Generation with a cache that does not grow: an `LLNState` in place of each layer's keys and values.

`generate()` makes a DynamicCache and gives it to the model, which gives it to every attention module. A hook on the
module (`lln.hf.attention.before_forward`) puts a `StateLayer` in place of the cache's empty layer.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from lln.state import LLNState
from lln.zoo import Mechanism
from lln.zoo.core import LLN, LLNDiag


def has_state(mechanism: Mechanism) -> bool:
    """Whether a mechanism can be continued from a state of constant size."""
    return isinstance(mechanism, LLN)


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What one layer remembers of the tokens so far, padding included in their number."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.state: LLNState | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Counts the new tokens and hands them back alone: `attend` knows the rest."""
        self.lazy_initialization(key_states, value_states)
        self.length += key_states.shape[2]
        return key_states, value_states

    def attend(
        self, mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """The outputs of the new tokens, which are remembered; `attention_mask` is for all tokens so far."""
        if attention_mask is not None and attention_mask.shape[1] != self.length:
            raise ValueError(
                f"attention_mask must be for all tokens so far, {self.length} with the new ones, got "
                f"{tuple(attention_mask.shape)}"
            )
        if self.state is None:
            self.state = _empty_state(cast(LLN, mechanism), query, key, value)
        keep = None if attention_mask is None else attention_mask[:, -query.shape[2] :]
        far, near, self.state = self.state.branches(query, key, value, key_padding_mask=keep)
        output = mechanism.join(far, near) if isinstance(mechanism, LLNDiag) and near is not None else far
        return output.to(query.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.length, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(indices.to(self.state.mass.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            samples = torch.arange(len(self.state.mass), device=self.state.mass.device)
            self.state = self.state.reorder(samples.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise ValueError("a state of constant size cannot forget its last tokens; generate without an assistant")


def state_layer(cache: Cache, index: int) -> StateLayer:
    """The layer of a cache that belongs to the attention module `index`."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if type(layer) is not DynamicLayer or layer.get_seq_length() > 0 or cache.offloading:
        raise ValueError(
            f"this attention keeps a state of constant size instead of keys and values, so a {type(cache).__name__} "
            f"with a {type(layer).__name__} of {layer.get_seq_length()} tokens is not for it; leave "
            "cache_implementation out and start from an empty cache"
        )
    cache.layers[index] = state = StateLayer()
    return state


def _empty_state(mechanism: LLN, query: Tensor, key: Tensor, value: Tensor) -> LLNState:
    return LLNState.empty(
        query.shape[0],
        query.shape[1],
        query.shape[3],
        value.shape[3],
        key_heads=key.shape[1],
        block_size=mechanism.block_size if isinstance(mechanism, LLNDiag) else None,
        alpha=mechanism.alpha,
        beta=mechanism.beta,
        matching=mechanism.matching,
        dtype=query.dtype,
        device=query.device,
    )
