"""LLNState: causal LLN (and LLN+Diag) attention as a recurrence, with a memory that does not grow.

    state = LLNState.empty(batch, heads, head_dim)
    output, state = state.prefill(query, key, value)        # any number of tokens, any number of times
    output, state = state.step(query, key, value)           # one token

However a sequence is split into calls, the outputs are those of `lln_attention(..., is_causal=True)` on all of it (with
`block_size`, of `lln_diag_attention`). A state is a value: every method returns a new one and leaves the old one as
it was, so that branching a generation is keeping a reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lln.backends.torch.blocks import block_diagonal_attention
from lln.backends.torch.causal import causal_attention
from lln.backends.torch.summary import KeySummary, absent, empty_summary, merge, recall, remember
from lln.checks import check_block_size, check_choice, check_inputs, check_scale, check_values, is_recorded
from lln.curves import MATCHINGS, Matching
from lln.masks import blank, kept_tokens, read_padding, take_tokens
from lln.moments import PrefixSums, empty_sums, prefix_moments
from lln.precision import accumulator, autocast_is_on


@dataclass(frozen=True)
class LLNState:
    """Shapes: B batch, H heads, H_k key heads, D features, V value width, C block size."""

    mass: Tensor  # (B, H, D) log of the summed exp(beta k), for each feature
    values: Tensor  # (B, H, D, V) the mean value that each feature points to
    count: Tensor  # (B,) kept tokens so far
    query_sums: Tensor  # (B, H, 3) what alpha and beta need to know of all queries, see `moments.PrefixSums`
    key_sums: Tensor  # (B, H, 3)
    alpha: Tensor | None = None  # given, or matched to the tokens so far
    beta: Tensor | None = None
    recent_key: Tensor | None = None  # (B, H_k, C, D) the last tokens, newest last: LLN+Diag only
    recent_value: Tensor | None = None  # (B, H_k, C, V)
    matching: Matching = "variance"

    def __post_init__(self) -> None:
        """Every tensor owns its memory: a view would keep all that it was cut from, and cannot be saved."""
        owners: set[int] = set()
        for field in fields(self):
            x = getattr(self, field.name)
            if isinstance(x, Tensor) and not _is_owner(x, owners):
                object.__setattr__(self, field.name, x.clone(memory_format=torch.contiguous_format))

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
        alpha: float | Tensor | None = None,
        beta: float | Tensor | None = None,
        matching: Matching = "variance",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LLNState":
        """The state before the first token.

        `dtype` is that of the tokens to come. With `block_size` the state is that of LLN+Diag attention and keeps a
        block of `key_heads` recent keys and values. alpha and beta (numbers, or tensors of shape (), (H,) or (B, H))
        are those of every token; without them each token has those of the tokens up to it (`lln.match_moments`).
        """
        check_choice("matching", matching, MATCHINGS)
        value_dim, key_heads = value_dim or head_dim, key_heads or heads
        like = torch.empty(0, dtype=dtype, device=device)
        scales = {}
        for name, scale in (("alpha", alpha), ("beta", beta)):
            check_scale(name, scale, batch=batch, heads=heads, tokens=1)
            if isinstance(scale, Tensor) and scale.dim() > 2:
                raise ValueError(f"{name} of a state must be the same for all tokens, got {tuple(scale.shape)}")
            if scale is not None:
                given = torch.as_tensor(scale, dtype=accumulator(dtype), device=device)
                scales[name] = (given if given.dim() == 2 else given.reshape(1, -1)).expand(batch, heads)
        memory = empty_summary(batch, heads, head_dim, value_dim, like)
        sums = empty_sums(memory.values)
        recent = {}
        if block_size is not None:
            check_block_size(block_size)
            recent["recent_key"] = like.new_zeros(batch, key_heads, block_size, head_dim)
            recent["recent_value"] = like.new_zeros(batch, key_heads, block_size, value_dim)
        return cls(memory.mass, memory.values, sums.tokens, sums.query, sums.key, **scales, **recent, matching=matching)

    @property
    def block_size(self) -> int | None:
        return None if self.recent_key is None else self.recent_key.shape[2]

    @property
    def nbytes(self) -> int:
        """The size of the state, whatever the number of tokens it has seen."""
        return sum(x.numel() * x.element_size() for x in self.to_dict().values())

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, "LLNState"]:
        """The outputs (B, H, N, V) of the next N tokens, and the state after them.

        Tokens that `key_padding_mask` does not keep leave no trace in the state.
        """
        far, near, state = self.branches(query, key, value, key_padding_mask=key_padding_mask)
        return (far if near is None else (far + near) / 2).to(query.dtype), state

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, "LLNState"]:
        """The output (B, H, 1, V) of the next token, and the state after it."""
        if query.dim() == 4 and query.shape[2] != 1:
            raise ValueError(f"step takes one token, got query {tuple(query.shape)}; use prefill for several")
        return self.prefill(query, key, value, key_padding_mask=key_padding_mask)

    def branches(
        self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, "LLNState"]:
        """As `prefill`, with the LLN and the block-diagonal output apart, in the accumulator's dtype."""
        self._check_tokens(query, key, value)
        if autocast_is_on(query.device.type):
            with torch.autocast(query.device.type, enabled=False):
                return self.branches(query, key, value, key_padding_mask=key_padding_mask)
        keep = read_padding(key_padding_mask, key)
        moments, sums = prefix_moments(query, key, keep, PrefixSums(self.count, self.query_sums, self.key_sums))
        matched: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.alpha is None or self.beta is None:
            matched = moments.scales(head_dim=query.shape[3], matching=self.matching)
        alpha, beta = (
            given[..., None, None] if given is not None else found[..., None]  # type: ignore[index]
            for given, found in zip((self.alpha, self.beta), matched, strict=True)
        )
        memory = KeySummary(self.mass, self.values)
        if query.shape[2] == 1:  # a third of the time of a causal chunk
            memory = merge(memory, remember(key, value, beta, keep, heads=query.shape[1]))
            far = recall(query, alpha, memory)
        else:
            far, memory = causal_attention(query, key, value, alpha, beta, keep, memory)
        state = replace(
            self,
            mass=memory.mass,
            values=memory.values,
            count=sums.tokens,
            query_sums=sums.query,
            key_sums=sums.key,
        )
        if self.recent_key is None or self.recent_value is None:
            return far, None, state
        if query.shape[2] == 1 and keep is None:
            recent = tuple(
                torch.cat((old[:, :, 1:], new), dim=2)
                for old, new in ((self.recent_key, key), (self.recent_value, value))
            )
            near = self._attend_block(query, *recent)
        else:
            near = self._attend_recent(query, key, value, kept_tokens(keep, query))
            recent = _newest(self.recent_key, self.recent_value, self.count, key, value, kept_tokens(keep, query))
        return far, near, replace(state, recent_key=recent[0], recent_value=recent[1])

    def reorder(self, index: Tensor) -> "LLNState":
        """The state of the samples `index` (any number of them, also repeated), as a beam search asks for."""
        return self._map(lambda x: x.index_select(0, index))

    def merge(self, later: "LLNState") -> "LLNState":
        """The state after the tokens of this one and then those of `later`, which started from an empty state.

        Both need the same given alpha and beta: with statistics of their own, two shards weigh their keys differently.
        """
        if any(scale is None for scale in (self.alpha, self.beta, later.alpha, later.beta)):
            raise ValueError(
                "only states with given alpha and beta can be merged, because matched ones depend on the tokens "
                "before; pass alpha= and beta= to LLNState.empty (lln.match_moments finds good values)"
            )
        mine, theirs = self.to_dict(), later.to_dict()
        if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
            raise ValueError(f"states of different shape cannot be merged: {_describe(mine)} and {_describe(theirs)}")
        same = (mine["alpha"] == theirs["alpha"]) & (mine["beta"] == theirs["beta"])
        check_values(same, "states with different alpha or beta cannot be merged; give both the same")
        memory = merge(KeySummary(self.mass, self.values), KeySummary(later.mass, later.values))
        recent_key, recent_value = self.recent_key, self.recent_value
        if recent_key is not None and recent_value is not None:
            assert later.recent_key is not None
            assert later.recent_value is not None
            filled = _filled(later.count, recent_key.shape[2])
            recent_key, recent_value = _newest(
                recent_key, recent_value, self.count, later.recent_key, later.recent_value, filled
            )
        return replace(
            self,
            mass=memory.mass,
            values=memory.values,
            count=self.count + later.count,
            query_sums=self.query_sums + later.query_sums,
            key_sums=self.key_sums + later.key_sums,
            recent_key=recent_key,
            recent_value=recent_value,
        )

    def to(self, device: torch.device | str) -> "LLNState":
        return self._map(lambda x: x.to(device))

    def to_dict(self) -> dict[str, Tensor]:
        """The state as tensors alone, for safetensors, a network or a cache."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "matching"}
        matching = torch.tensor(MATCHINGS.index(self.matching), device=self.mass.device)
        return {name: x for name, x in tensors.items() if x is not None} | {"matching": matching}

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor]) -> "LLNState":
        names = {field.name for field in fields(cls)}
        needed = names - {"alpha", "beta", "recent_key", "recent_value"}
        if not needed <= tensors.keys() <= names:
            raise ValueError(
                f"not the dict of an LLNState: missing {sorted(needed - tensors.keys())}, "
                f"unknown {sorted(tensors.keys() - names)}"
            )
        rest = {name: x for name, x in tensors.items() if name != "matching"}
        return cls(**rest, matching=MATCHINGS[int(tensors["matching"])])

    def _map(self, change: Callable[[Tensor], Tensor]) -> "LLNState":
        tensors = {name: x for name, x in self.to_dict().items() if name != "matching"}
        return replace(self, **{name: change(x) for name, x in tensors.items()})  # type: ignore[arg-type]

    def _attend_recent(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        """Block-diagonal attention, with what the current block already holds put before the new tokens."""
        assert self.recent_key is not None
        assert self.recent_value is not None
        size = self.recent_key.shape[2]
        begun = _filled(self.count % size, size)
        absent_query = query.new_zeros(*query.shape[:2], size, query.shape[3])
        near = block_diagonal_attention(
            torch.cat((absent_query, query), dim=2),
            torch.cat((self.recent_key, key), dim=2),
            torch.cat((self.recent_value, value), dim=2),
            torch.cat((begun, keep), dim=1),
            block_size=size,
            is_causal=True,
        )
        return near[:, :, size:]

    def _attend_block(self, query: Tensor, recent_key: Tensor, recent_value: Tensor) -> Tensor:
        """Softmax attention of one token to its block, which ends with it: the newest of the recent tokens."""
        size, dtype = recent_key.shape[2], accumulator(query.dtype)
        groups = query.shape[1] // recent_key.shape[1]
        k, v = (
            x.to(dtype).repeat_interleave(groups, dim=1) if groups > 1 else x.to(dtype)
            for x in (recent_key, recent_value)
        )
        scores = (query.to(dtype) * query.shape[3] ** -0.5) @ k.mT
        outside = ~_filled(self.count % size + 1, size)[:, None, None, :]
        weights = torch.softmax(scores.masked_fill(outside, absent(dtype)), dim=-1)
        return weights @ v.masked_fill(outside.mT, 0.0)  # of a block that has ended: 0 times NaN is NaN

    def _check_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        check_inputs(query, key, value, same_length="LLNState")
        batch, heads, head_dim, value_dim = self.values.shape
        wanted, got = (batch, heads, head_dim, value_dim), (*query.shape[:2], query.shape[3], value.shape[3])
        if wanted != got:
            raise ValueError(f"the state is for (batch, heads, features, value features) {wanted}, got {got}")
        if query.shape[2] == 0:
            raise ValueError(f"at least one token is needed, got query {tuple(query.shape)}")
        if self.recent_key is not None:
            if key.shape[1] != self.recent_key.shape[1]:
                raise ValueError(
                    f"the state has {self.recent_key.shape[1]} key heads, got {key.shape[1]}; see key_heads="
                )
            if key.dtype != self.recent_key.dtype:
                raise TypeError(f"the state is for {self.recent_key.dtype} tokens, got {key.dtype}; see dtype=")
        elif accumulator(key.dtype) != self.mass.dtype:
            raise TypeError(f"the state sums in {self.mass.dtype}, which does not fit {key.dtype} tokens; see dtype=")


def _is_owner(x: Tensor, others: set[int]) -> bool:
    """Whether a tensor has all of its memory to itself; `others` are the addresses of those seen so far."""
    if torch.compiler.is_compiling() or is_recorded() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False  # there are no addresses to compare
    storage = x.untyped_storage()
    is_alone = storage.data_ptr() not in others or storage.nbytes() == 0
    others.add(storage.data_ptr())
    return is_alone and x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size()


def _filled(count: Tensor, size: int) -> Tensor:
    """Which of `size` places, the newest last, hold one of `count` tokens: (B, size)."""
    return torch.arange(size, device=count.device) >= size - count[:, None]


def _newest(
    recent_key: Tensor, recent_value: Tensor, count: Tensor, key: Tensor, value: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """The newest kept tokens of a block of recent ones, of which `count` have come, and the tokens after it."""
    size = recent_key.shape[2]
    order = torch.argsort(torch.cat((_filled(count, size), keep), dim=1), dim=1, stable=True)[:, -size:]
    return (
        take_tokens(torch.cat((recent_key, blank(key, keep)), dim=2), order),
        take_tokens(torch.cat((recent_value, blank(value, keep)), dim=2), order),
    )


def _describe(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
