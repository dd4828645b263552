"""Generation with a cache that does not grow: an `LLNState` in place of each layer's keys and values.

`generate()` makes a DynamicCache and gives it to the model, which gives it to every attention module. A hook on the
module (`lln.hf.attention.lend_state`) puts a `StateLayer` in place of the cache's empty layer.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from lln.state import LLNState
from lln.zoo import Mechanism


def has_state(mechanism: Mechanism) -> bool:
    """Whether a mechanism can be continued from a state of constant size."""
    heads, width = mechanism.num_heads, mechanism.head_dim
    shape: dict[str, Any] = {"key_heads": heads, "value_dim": width}
    return mechanism.init_state(1, **shape, dtype=torch.float32, device=torch.device("meta")) is not None


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What one layer remembers of the tokens so far, padding included in their number."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.state: LLNState | None = None
        # A first sequence, (query, key, value, kept tokens), of which no state has been made yet.
        self.first: tuple[Tensor | None, ...] | None = None

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
            tokens = self.length
            self.length -= query.shape[2]  # as before the call, which can be repeated with another mask
            raise ValueError(
                f"attention_mask must be for all tokens so far, {tokens} with the new ones, got "
                f"{tuple(attention_mask.shape)}"
            )
        keep = None if attention_mask is None else attention_mask[:, -query.shape[2] :]
        begins = self.state is None and self.first is None
        if begins and (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            # Models make a cache in training too, where nothing continues from it: a state is made when something does.
            self.first = query, key, value, keep
            output: Tensor = mechanism(query, key, value, key_padding_mask=keep, is_causal=True)
            return output
        if self.first is not None:
            first, self.first = self.first, None
            self._continue(mechanism, *first)
        return self._continue(mechanism, query, key, value, keep)

    def _continue(self, mechanism: Mechanism, query: Any, key: Any, value: Any, keep: Tensor | None) -> Tensor:
        if self.state is None:
            self.state = mechanism.init_state(
                query.shape[0],
                key_heads=key.shape[1],
                value_dim=value.shape[3],
                dtype=query.dtype,
                device=query.device,
            )
            assert self.state is not None
        far, near, self.state = self.state.branches(query, key, value, key_padding_mask=keep, in_place=True)
        output = far if near is None else mechanism.join(far, near)
        return output.to(query.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.first, self.length, self.is_initialized = None, None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(indices.to(self.state.mass.device))
        if self.first is not None:
            self.first = tuple(None if x is None else x.index_select(0, indices.to(x.device)) for x in self.first)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = self.first[0] if self.first is not None else None if self.state is None else self.state.mass
        if batch is not None:
            self.batch_select_indices(torch.arange(len(batch)).repeat_interleave(repeats))

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
