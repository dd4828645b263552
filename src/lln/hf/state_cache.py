"""Generation with a cache that does not grow: an `LLNState` in place of each layer's keys and values.

`generate()` makes a DynamicCache and gives it to the model, which gives it to every attention module. A hook on the
module (`lln.hf.attention.set_state_layer`) puts a `StateLayer` in place of the cache's empty layer.

Assisted decoding removes tokens again (`Cache.crop`), and announces it beforehand (`Cache.activate_past_recording`).
From then on a layer also keeps an older state and what came after it, of which it makes the state without the last
tokens.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from lln.masks import kept_tokens
from lln.mechanism import JoinedBranches
from lln.state import LLNState
from lln.zoo import Mechanism

# Tokens that can be taken back unless `lln.hf.convert` is given another number; assistants propose 20 by default.
MAX_ROLLBACK = 64

# Inputs of `LLNState.prefill` by name, and which of their dimensions are the tokens.
Piece = dict[str, Tensor | None]
TOKENS = {"query": 2, "key": 2, "value": 2, "key_padding_mask": 1, "near_query": 2, "near_key": 2, "key_weight": 2}


def has_state(mechanism: Mechanism) -> bool:
    """Whether a mechanism can be continued from a state of constant size."""
    heads: int = getattr(mechanism, "num_key_heads", mechanism.num_heads)
    shape: dict[str, Any] = {"key_heads": heads, "value_dim": mechanism.head_dim}
    return mechanism.init_state(1, **shape, dtype=torch.float32, device=torch.device("meta")) is not None


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What one layer keeps of the tokens so far, padding included in their number."""

    is_sliding = False
    is_croppable = True

    def __init__(self, *, max_rollback: int = MAX_ROLLBACK, record_past: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_rollback, self.record_past = max_rollback, record_past
        self.length = 0
        self.state: LLNState | None = None
        # A first sequence, (query, key, value, kept tokens), of which no state has been made yet.
        self.first: tuple[Tensor | None, ...] | None = None
        # While the past is recorded: an older state, which nothing overwrites, and all tokens after it.
        self.base: LLNState | None = None
        self.recorded: list[Piece] = []

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take back the last tokens, `max_rollback` or fewer, from now on."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)  # which some models read
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Counts the new tokens and returns them alone: `attend` has the rest."""
        if not self.is_initialized:
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
        parallel, begins = getattr(mechanism, "parallel", None), self.state is None
        if self.state is None:
            self.state = mechanism.init_state(
                query.shape[0],
                key_heads=key.shape[1],
                value_dim=value.shape[3],
                dtype=query.dtype,
                device=query.device,
            )
            assert self.state is not None
        far_query, far_key, weight = mechanism.far_inputs(query, key)
        piece: Piece = {"query": far_query, "key": far_key, "value": value, "key_padding_mask": keep}
        if weight is not None:
            piece["key_weight"] = weight
        if self.state.block_size is not None and (far_query is not query or far_key is not key):
            piece["near_query"], piece["near_key"] = query, key
        if parallel is not None:
            self._begin_part(piece, parallel, begins)
        if self.record_past:
            return self._advance_recorded(mechanism, piece)
        self.base, self.recorded = None, []
        return self._advance(mechanism, piece)

    def _begin_part(self, piece: Piece, parallel: Any, begins: bool) -> None:
        """The state of the processes that hold the tokens before those of this one."""
        if not begins or self.record_past:
            raise ValueError(
                "several processes can begin a sequence but not continue it; make its cache with "
                "lln.distributed.prefill and generate in one process"
            )
        assert self.state is not None
        given: Any = {name: x for name, x in piece.items() if name != "near_query"}
        self.state = parallel.state_before(self.state, **given)

    def _advance(self, mechanism: Mechanism, piece: Any) -> Tensor:
        assert self.state is not None
        in_place = self.state is not self.base
        if mechanism.averages_branches:
            output, self.state = self.state.prefill(**piece, in_place=in_place)
            return output
        query, key = piece.get("near_query", piece["query"]), piece.get("near_key", piece["key"])
        assert isinstance(mechanism, JoinedBranches)
        far_mass = mechanism.log_far_mass(key, piece["key_padding_mask"], self.state)
        far, near, near_lse, self.state = self.state.branches(**piece, in_place=in_place)
        assert near is not None
        assert near_lse is not None
        ratio = None if far_mass is None else far_mass - near_lse
        return mechanism.join(far, near, ratio, query=query).to(piece["value"].dtype)

    def _advance_recorded(self, mechanism: Mechanism, piece: Piece) -> Tensor:
        outputs = []
        more = _length(piece) - self.max_rollback
        if more > 0:  # these are never taken back
            self.base, self.recorded = None, []
            outputs.append(self._advance(mechanism, _cut(piece, 0, more)))
            piece = _copy(_cut(piece, more, None))
        if self.base is None:
            self.base, self.recorded = self.state, []
        outputs.append(self._advance(mechanism, piece))
        self.recorded.append(piece)
        more = sum(map(_length, self.recorded)) - self.max_rollback
        if more >= self.max_rollback:  # now and then, so that each token is read only once more
            tokens: Any = _join(self.recorded)
            assert self.base is not None
            _, self.base = self.base.prefill(**_cut(tokens, 0, more), in_place=True)
            self.recorded = [_copy(_cut(tokens, more, None))]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.first, self.base, self.recorded = None, None, None, []
        self.length, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(indices.to(self.state.mass.device))
        if self.base is not None:
            self.base = self.base.reorder(indices.to(self.base.mass.device))
        if self.first is not None:
            self.first = tuple(None if x is None else x.index_select(0, indices.to(x.device)) for x in self.first)
        self.recorded = [
            {name: None if x is None else x.index_select(0, indices.to(x.device)) for name, x in piece.items()}
            for piece in self.recorded
        ]

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = self.first[0] if self.first is not None else None if self.state is None else self.state.mass
        if batch is not None:
            self.batch_select_indices(torch.arange(len(batch)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens; their number is given as a negative one, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative int, got {tokens_to_remove}")
        if tokens_to_remove == 0 or self.length == 0:
            return
        if self.first is not None:  # nothing has been made of it yet
            query, key, value, keep = self.first
            cut: Any = _cut({"query": query, "key": key, "value": value, "key_padding_mask": keep}, 0, tokens_to_remove)
            self.first = tuple(cut.values()) if -tokens_to_remove < self.length else None
            self.length = max(0, self.length + tokens_to_remove)
            return
        recorded = sum(map(_length, self.recorded))
        if -tokens_to_remove > recorded:
            remedy = (
                f"lln.hf.convert(model, ..., max_rollback={-tokens_to_remove}) keeps enough of them"
                if self.record_past
                else "call cache.activate_past_recording() before the tokens that may have to be taken back"
            )
            raise ValueError(
                f"a state of constant size can take back {recorded} tokens here, got crop({tokens_to_remove}); {remedy}"
            )
        self.state = self.base
        self.length += tokens_to_remove
        left: Any = _cut(_join(self.recorded), 0, recorded + tokens_to_remove)
        self.recorded = []
        if recorded + tokens_to_remove > 0:
            assert self.base is not None
            _, self.state = self.base.prefill(**left)
            self.recorded = [left]


def _length(piece: Piece) -> int:
    query = piece["query"]
    assert query is not None
    return query.shape[2]


def _cut(piece: Piece, start: int, end: int | None) -> Any:
    """Some of the tokens of a piece."""
    places = slice(start, end)
    return {
        name: None if x is None else x[:, places] if TOKENS[name] == 1 else x[:, :, places] for name, x in piece.items()
    }


def _copy(piece: Piece) -> Piece:
    """The same without the memory of what it was cut from."""
    return {name: None if x is None else x.clone() for name, x in piece.items()}


def _join(pieces: list[Piece]) -> Piece:
    """Pieces one after the other; a mask, or none where all tokens are kept."""
    joined: Piece = {}
    for name, dim in TOKENS.items():
        parts = [piece.get(name) for piece in pieces]
        if name == "key_padding_mask" and any(x is not None for x in parts):
            queries: list[Any] = [piece["query"] for piece in pieces]
            parts = [kept_tokens(x, q) for x, q in zip(parts, queries, strict=True)]
        present = [x for x in parts if x is not None]
        joined[name] = torch.cat(present, dim=dim) if present else None
    return joined


def note_past_recording() -> None:
    """Make `Cache.activate_past_recording` leave a mark on the cache.

    It goes to the layers of a cache, and `generate` calls it before the first tokens, when ours are not there yet.
    """
    activate: Any = Cache.activate_past_recording
    if hasattr(activate, "__wrapped__"):
        return

    @functools.wraps(activate)
    def activate_and_note(self: Any) -> None:
        self.records_past = True
        activate(self)

    Cache.activate_past_recording = activate_and_note  # type: ignore[method-assign]


def state_layer(cache: Cache, index: int, max_rollback: int) -> StateLayer:
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
    recording = getattr(cache, "records_past", False)
    cache.layers[index] = state = StateLayer(max_rollback=max_rollback, record_past=recording)
    return state
