"""LLNState: causal LLN (and LLN+Diag) attention as a recurrence, with a memory that does not grow.

    state = LLNState.empty(batch, heads, head_dim)
    output, state = state.prefill(query, key, value)        # any number of tokens, any number of times
    output, state = state.step(query, key, value)           # one token

However a sequence is split into calls, the outputs are those of `lln_attention(..., is_causal=True)` on all of it (with
`block_size`, of `lln_diag_attention`), in every form, with blocks or windows. A state is a value: every method returns
a new one and leaves the old one as it was, so that branching a generation is keeping a reference. Where the old one is
not needed, `in_place=True` lets the new one take its memory, which is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from lln.backends import Repeats, advance
from lln.backends.torch.advance import merge_memories
from lln.backends.torch.summary import empty_summary
from lln.checks import check_block_size, check_choice
from lln.masks import read_padding
from lln.matching.curves import FORMS, MATCHINGS, Form, Matching
from lln.matching.moments import empty_sums
from lln.precision import autocast_is_on
from lln.problem import NEARS, Centers, Near, read_centers, read_key_weight
from lln.recurrence import (
    Advance,
    Memory,
    Recurrence,
    StateOptions,
    check_memory,
    check_mergeable,
    check_tokens,
    is_owner,
    read_scale,
)
from lln.repeats import signature_of

# Options that are strings; `to_dict` has their indices in these lists.
CHOICES: dict[str, tuple[str, ...]] = {"matching": MATCHINGS, "near": NEARS, "form": FORMS}


@dataclass(frozen=True)
class LLNState:
    """Shapes: B batch, H heads, H_k key heads, F features of LLN attention, D of softmax attention among neighbours
    (both are those of a head, unless `near_dim` is given), V value width, C block size."""

    mass: Tensor  # (B, H, F) log of the summed exp(b), for each feature
    values: Tensor  # (B, H, F, V) the mean value that each feature points to
    count: Tensor  # (B,) kept tokens so far
    query_sums: Tensor  # (B, H, 3) what alpha and beta need of all queries, see `moments.PrefixSums`
    key_sums: Tensor  # (B, H, 3)
    alpha: Tensor | None = None  # given, or matched to the tokens so far
    beta: Tensor | None = None
    recent_key: Tensor | None = None  # (B, H_k, C, D) the last tokens, kept token t at place t % C: LLN+Diag only
    recent_value: Tensor | None = None  # (B, H_k, C, V)
    matching: Matching = "variance"
    near: Near = "blocks"
    form: Form = "paper"
    center_q: Tensor | None = None  # (B, H, F) of the decomposed form
    center_k: Tensor | None = None  # (B, H_k, F)
    _steps: ClassVar[Repeats]  # of each state, in place; set below, because it is no part of its value

    def __post_init__(self) -> None:
        """Every tensor owns its memory: a view would keep all that it was cut from, and cannot be saved."""
        check_memory(self._memory(), self.alpha, self.beta, (self.center_q, self.center_k), form=self.form)
        object.__setattr__(self, "_steps", Repeats(4))
        owners: set[int] = set()
        for name, x in self._tensors().items():
            if not is_owner(x, owners):
                object.__setattr__(self, name, x.clone(memory_format=torch.contiguous_format))

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        key_heads: int | None = None,
        block_size: int | None = None,
        near: Near = "blocks",
        near_dim: int | None = None,
        alpha: float | Tensor | None = None,
        beta: float | Tensor | None = None,
        matching: Matching = "variance",
        form: Form = "paper",
        centers: Centers | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LLNState":
        """Make the state before the first token.

        Args:
            batch, heads, head_dim, value_dim: B, H, F and V; V is F if it is left out.
            key_heads: H_k, by default H.
            block_size: C; given, the state is that of LLN+Diag attention and keeps the last C tokens of the keys and
                values, for the block or the window of the next one.
            near: "blocks" or "window".
            near_dim: D, for LLN attention whose queries and keys are others than those of softmax attention: see
                `near_query` in `prefill`; by default F.
            alpha, beta: of every token, numbers or tensors of shape (), (H,) or (B, H); without them each token has
                those of the tokens up to it (`lln.match_moments`).
            matching, form, centers: as in `lln.lln_attention`.
            dtype, device: of the tokens to come.

        Returns:
            The state.

        Raises:
            TypeError, ValueError: options that do not fit each other.

        Example:
            >>> state = lln.LLNState.empty(1, 8, 64, key_heads=2, block_size=32, near="window")
            >>> state.block_size
            32
        """
        for name, choice in (("matching", matching), ("near", near), ("form", form)):
            check_choice(name, choice, CHOICES[name])
        if near_dim is not None and block_size is None:
            raise ValueError(f"near_dim={near_dim} is for a state with neighbours; give block_size= too")
        if near != "blocks" and block_size is None:
            raise ValueError(f"near={near!r} is for a state with neighbours; give block_size= too")
        value_dim, key_heads = value_dim or head_dim, key_heads or heads
        if heads % key_heads:
            raise ValueError(f"heads={heads} must be a multiple of key_heads={key_heads}")
        like = torch.empty(0, dtype=dtype, device=device)
        sizes: dict[str, Any] = {"batch": batch, "heads": heads, "like": like}
        scales = {name: read_scale(name, x, **sizes) for name, x in (("alpha", alpha), ("beta", beta))}
        memory = empty_summary(batch, heads, head_dim, value_dim, like)
        sums = empty_sums(memory.values)
        more: dict[str, Any] = {**scales, "matching": matching, "near": near, "form": form}
        if block_size is not None:
            check_block_size(block_size)
            more["recent_key"] = like.new_zeros(batch, key_heads, block_size, near_dim or head_dim)
            more["recent_value"] = like.new_zeros(batch, key_heads, block_size, value_dim)
        query, key = (memory.mass.new_empty(batch, h, 0, head_dim) for h in (heads, key_heads))
        frozen = read_centers(centers, query, key, form=form, is_causal=True)
        if frozen is not None:
            more["center_q"], more["center_k"] = (x.to(memory.mass.dtype).expand(batch, -1, -1) for x in frozen)
        return cls(memory.mass, memory.values, sums.tokens, sums.query, sums.key, **more)

    @property
    def block_size(self) -> int | None:
        return None if self.recent_key is None else self.recent_key.shape[2]

    @property
    def nbytes(self) -> int:
        """The size of the state, whatever the number of tokens so far."""
        return sum(x.numel() * x.element_size() for x in self.to_dict().values())

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StateOptions]
    ) -> tuple[Tensor, "LLNState"]:
        """The outputs (B, H, N, V) of the next N tokens, and the state after them.

        Args:
            query: (B, H, N, D).
            key: (B, H_k, N, D).
            value: (B, H_k, N, V).
            key_padding_mask: (B, N) bool with True = keep, or (B,) lengths. Tokens that are not kept leave no trace in
                the state.
            in_place: whether the state that is returned may take the memory of this one, which must not be used
                afterwards.
            near_query, near_key: what softmax attention among neighbours is computed of, (B, H, N, D) and
                (B, H_k, N, D), where `query` and `key` are others, (B, H, N, F) and (B, H_k, N, F), for LLN attention.
            key_weight: log-weights of the keys in LLN attention, as in `lln.lln_attention`.

        Returns:
            The outputs in the dtype of the tokens, and the state.

        Raises:
            TypeError, ValueError: tokens that are not for this state.

        Example:
            >>> query, key, value = torch.randn(3, 1, 2, 20, 16)
            >>> output, state = lln.LLNState.empty(1, 2, 16).prefill(query, key, value)
            >>> output.allclose(lln.lln_attention(query, key, value, is_causal=True), atol=1e-5)
            True
        """
        found = self._advance(query, key, value, apart=False, **options)
        return found.output, self._after(found)

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StateOptions]
    ) -> tuple[Tensor, "LLNState"]:
        """The output (B, H, 1, V) of the next token, and the state after it.

        Args:
            query, key, value, **options: as in `prefill`, with N = 1.

        Returns:
            The output in the dtype of the token, and the state.

        Raises:
            TypeError, ValueError: several tokens, or one that is not for this state.

        Example:
            >>> output, state = lln.LLNState.empty(1, 2, 16).step(*torch.randn(3, 1, 2, 1, 16))
            >>> output.shape
            torch.Size([1, 2, 1, 16])
        """
        if query.dim() == 4 and query.shape[2] != 1:
            raise ValueError(f"step takes one token, got query {tuple(query.shape)}; use prefill for several")
        found = self._advance(query, key, value, apart=False, **options)
        return found.output, self._after(found)

    def branches(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StateOptions]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, "LLNState"]:
        """As `prefill`, with the outputs of LLN and of softmax attention apart.

        Args:
            query, key, value, **options: as in `prefill`.

        Returns:
            Both outputs in at least float32, the log-sum-exp (B, H, N) of the scores of softmax attention, which is 0
            for a token that is not kept, and the state. A state without neighbours has None for softmax attention.

        Raises:
            TypeError, ValueError: tokens that are not for this state.

        Example:
            >>> state = lln.LLNState.empty(1, 2, 16, block_size=8)
            >>> far, near, near_lse, state = state.branches(*torch.randn(3, 1, 2, 20, 16))
            >>> near_lse.shape
            torch.Size([1, 2, 20])
        """
        found = self._advance(query, key, value, apart=True, **options)
        return found.output, found.near, found.near_lse, self._after(found)

    def reorder(self, index: Tensor) -> "LLNState":
        """The state of some of the samples, as a beam search needs it.

        Args:
            index: the samples, a tensor of any number of them, also repeated.

        Returns:
            The state of a batch of these.

        Raises:
            IndexError: there is no such sample.

        Example:
            >>> lln.LLNState.empty(2, 8, 64).reorder(torch.tensor([1, 0, 0])).count.shape
            torch.Size([3])
        """
        return self._map(lambda x: x.index_select(0, index))

    def merge(self, later: "LLNState") -> "LLNState":
        """The state after the tokens of this one and then those of `later`, which started from an empty state.

        Both need the same given alpha and beta: with statistics of their own, two shards weigh their keys differently.

        Args:
            later: a state with the same options.

        Returns:
            The state of all tokens.

        Raises:
            ValueError: alpha or beta is matched, or the states do not belong together.

        Example:
            >>> tokens = torch.randn(3, 1, 2, 20, 16)
            >>> empty = lln.LLNState.empty(1, 2, 16, alpha=1.0, beta=1.0)
            >>> first, last = (empty.prefill(*x)[1] for x in (tokens[..., :12, :], tokens[..., 12:, :]))
            >>> first.merge(last).mass.allclose(empty.prefill(*tokens)[1].mass, atol=1e-5)
            True
        """
        if any(scale is None for scale in (self.alpha, self.beta, later.alpha, later.beta)):
            raise ValueError(
                "only states with given alpha and beta can be merged, because matched ones depend on the tokens "
                "before; pass alpha= and beta= to LLNState.empty (lln.match_moments finds good values)"
            )
        mine, theirs = self.to_dict(), later.to_dict()
        check_mergeable(mine, theirs, ("alpha", "beta", *CHOICES, "center_q", "center_k"))
        tensors = merge_memories(self._memory(), later._memory())._asdict()
        return replace(self, count=tensors.pop("num_tokens"), **tensors)

    def to(self, device: torch.device | str) -> "LLNState":
        """The state on another device.

        Args:
            device: of the tokens to come.

        Returns:
            The state with its tensors there.

        Raises:
            RuntimeError: torch cannot use the device.

        Example:
            >>> lln.LLNState.empty(1, 8, 64).to("cpu").mass.device
            device(type='cpu')
        """
        return self._map(lambda x: x.to(device))

    def to_dict(self) -> dict[str, Tensor]:
        """The state as tensors alone, for safetensors, a network or a cache.

        Returns:
            Its tensors by name, and its string options as indices.

        Example:
            >>> sorted(lln.LLNState.empty(1, 8, 64).to_dict())
            ['count', 'form', 'key_sums', 'mass', 'matching', 'near', 'query_sums', 'values']
        """
        choices = {
            name: torch.tensor(choices.index(getattr(self, name)), device=self.mass.device)
            for name, choices in CHOICES.items()
        }
        return self._tensors() | choices

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor]) -> "LLNState":
        """The state of the tensors that `to_dict` gave.

        Args:
            tensors: by name.

        Returns:
            The state.

        Raises:
            ValueError: tensors are missing, unknown, or do not belong to one state.

        Example:
            >>> lln.LLNState.from_dict(lln.LLNState.empty(1, 8, 64, matching="entropy").to_dict()).matching
            'entropy'
        """
        names = {field.name for field in fields(cls)}
        needed = {"mass", "values", "count", "query_sums", "key_sums", "matching"}
        if not needed <= tensors.keys() <= names:
            raise ValueError(
                f"not the dict of an LLNState: missing {sorted(needed - tensors.keys())}, "
                f"unknown {sorted(tensors.keys() - names)}"
            )
        values: dict[str, Any] = {name: CHOICES[name][int(x)] if name in CHOICES else x for name, x in tensors.items()}
        return cls(**values)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> "LLNState":
        return replace(self, **{name: change(x) for name, x in self._tensors().items()})  # type: ignore[arg-type]

    def _advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        apart: bool,
        key_padding_mask: Tensor | None = None,
        in_place: bool = False,
        near_query: Tensor | None = None,
        near_key: Tensor | None = None,
        key_weight: Tensor | None = None,
    ) -> Advance:
        signature, memory = None, self._memory()
        if in_place and not apart and key_padding_mask is near_query is near_key is key_weight is None:
            signature = signature_of(query, key, value, *[0 if x is None else x.data_ptr() for x in memory])
            step = self._steps.find(signature)
            if step is not None:
                return Advance(step(query, key, value), None, memory)
        if autocast_is_on(query.device.type):
            options: StateOptions = {"key_padding_mask": key_padding_mask, "in_place": in_place}
            options |= {"near_query": near_query, "near_key": near_key, "key_weight": key_weight}
            with torch.autocast(query.device.type, enabled=False):
                return self._advance(query, key, value, apart=apart, **options)
        check_tokens(self.values, self.recent_key, self.center_k, query, key, value, near_query, near_key)
        keep = None if key_padding_mask is None else read_padding(key_padding_mask, key)
        if key_weight is not None:
            key_weight = read_key_weight(key_weight, query, key)
        centers = None if self.center_q is None or self.center_k is None else (self.center_q, self.center_k)
        tokens = (query, key, value, memory, keep, self.alpha, self.beta, self.matching, self.form, key_weight)
        recurrence = Recurrence(*tokens, self.near, near_query, near_key, apart, in_place, centers)
        return advance(recurrence, signature if query.shape[2] == 1 else None, self._steps)

    def _memory(self) -> Memory:
        sums = (self.count, self.query_sums, self.key_sums)
        return Memory(self.mass, self.values, *sums, self.recent_key, self.recent_value)

    def _after(self, advance: Advance) -> "LLNState":
        """The state after some tokens: this one, if its tensors were overwritten."""
        if advance.memory.mass is self.mass:
            return self
        tensors = advance.memory._asdict()
        tensors["count"] = tensors.pop("num_tokens")
        if not advance.is_owner:
            return replace(self, **tensors)
        state = object.__new__(LLNState)  # without the checks of `__post_init__`, which take as long as many tokens
        state.__dict__.update(self.__dict__, _steps=Repeats(4), **tensors)
        return state
