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
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from lln.backends import Repeats, advance
from lln.backends.torch.advance import newest
from lln.backends.torch.summary import KeySummary, empty_summary, merge
from lln.checks import check_block_size, check_choice, check_scale, check_values, is_recorded
from lln.masks import read_padding
from lln.matching.curves import FORMS, MATCHINGS, Form, Matching
from lln.matching.moments import empty_sums
from lln.precision import accumulator, autocast_is_on
from lln.problem import NEARS, Centers, Near, read_centers
from lln.recurrence import Advance, Memory, Recurrence, check_tokens, read_weight
from lln.repeats import signature_of

# Options that are words; `to_dict` has their places in these lists.
WORDS: dict[str, tuple[str, ...]] = {"matching": MATCHINGS, "near": NEARS, "form": FORMS}


class StateOptions(TypedDict, total=False):
    """Options of the next tokens of a state."""

    key_padding_mask: Tensor | None
    in_place: bool
    near_query: Tensor | None
    near_key: Tensor | None
    key_weight: Tensor | None


@dataclass(frozen=True)
class LLNState:
    """Shapes: B batch, H heads, H_k key heads, F features of LLN attention, D of softmax attention among neighbours
    (both are those of a head, unless `near_dim` says otherwise), V value width, C block size."""

    mass: Tensor  # (B, H, F) log of the summed exp(b), for each feature
    values: Tensor  # (B, H, F, V) the mean value that each feature points to
    count: Tensor  # (B,) kept tokens so far
    query_sums: Tensor  # (B, H, 3) what alpha and beta need to know of all queries, see `moments.PrefixSums`
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
        self._check_shapes()
        object.__setattr__(self, "_steps", Repeats(4))
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
        """The state before the first token.

        `dtype` is that of the tokens to come. With `block_size` the state is that of LLN+Diag attention and keeps the
        last `block_size` tokens of `key_heads` keys and values, for the block or the window (`near`) of the next one.
        alpha and beta (numbers, or tensors of shape (), (H,) or (B, H)) are those of every token; without them each
        token has those of the tokens up to it (`lln.match_moments`). `form` and `centers` are as in
        `lln.lln_attention`. `near_dim` is for LLN attention whose queries and keys are others than those of softmax
        attention: `head_dim` is then the number of features of the former, see `near_query` in `prefill`.
        """
        for name, word in (("matching", matching), ("near", near), ("form", form)):
            check_choice(name, word, WORDS[name])
        if near_dim is not None and block_size is None:
            raise ValueError(f"near_dim={near_dim} is for a state with neighbours; give block_size= too")
        if near != "blocks" and block_size is None:
            raise ValueError(f"near={near!r} is for a state with neighbours; give block_size= too")
        value_dim, key_heads = value_dim or head_dim, key_heads or heads
        if heads % key_heads:
            raise ValueError(f"heads={heads} must be a multiple of key_heads={key_heads}")
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
        """The size of the state, whatever the number of tokens it has seen."""
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
            key_weight: (B, H, N) log-weights of the keys in LLN attention.
        """
        found = self._advance(query, key, value, apart=False, **options)
        return found.output, self._after(found)

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StateOptions]
    ) -> tuple[Tensor, "LLNState"]:
        """The output (B, H, 1, V) of the next token, and the state after it; see `prefill`."""
        if query.dim() == 4 and query.shape[2] != 1:
            raise ValueError(f"step takes one token, got query {tuple(query.shape)}; use prefill for several")
        found = self._advance(query, key, value, apart=False, **options)
        return found.output, self._after(found)

    def branches(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StateOptions]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, "LLNState"]:
        """As `prefill`, with the outputs of LLN and of softmax attention apart, in the accumulator's dtype, and the
        log-sum-exp (B, H, N) of the scores of the latter, 0 for a token that is not kept."""
        found = self._advance(query, key, value, apart=True, **options)
        return found.output, found.near, found.near_lse, self._after(found)

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
        for name in ("alpha", "beta", *WORDS, "center_q", "center_k"):
            if name in mine:
                check_values(
                    mine[name] == theirs[name], f"states with different {name} cannot be merged; give both the same"
                )
        memory = merge(KeySummary(self.mass, self.values), KeySummary(later.mass, later.values))
        recent_key, recent_value = self.recent_key, self.recent_value
        if recent_key is not None and recent_value is not None:
            assert later.recent_key is not None
            assert later.recent_value is not None
            size = recent_key.shape[2]
            # The place of the later token t is t % C, and only the last C are asked for.
            places = torch.arange(size, device=self.count.device).expand(len(self.count), size)
            recent_key, recent_value = newest(
                (recent_key, recent_value),
                self.count,
                (later.recent_key, later.recent_value),
                places,
                self.count + later.count,
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
        words = {
            name: torch.tensor(words.index(getattr(self, name)), device=self.mass.device)
            for name, words in WORDS.items()
        }
        return self._tensors() | words

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor]) -> "LLNState":
        names = {field.name for field in fields(cls)}
        needed = {"mass", "values", "count", "query_sums", "key_sums", "matching"}
        if not needed <= tensors.keys() <= names:
            raise ValueError(
                f"not the dict of an LLNState: missing {sorted(needed - tensors.keys())}, "
                f"unknown {sorted(tensors.keys() - names)}"
            )
        values: dict[str, Any] = {name: WORDS[name][int(x)] if name in WORDS else x for name, x in tensors.items()}
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
        check_tokens(self.values, self.recent_key, query, key, value, near_query, near_key)
        keep = None if key_padding_mask is None else read_padding(key_padding_mask, key)
        if key_weight is not None:
            key_weight = read_weight(key_weight, query, self.mass.dtype)
        centers = None
        if self.center_q is not None and self.center_k is not None:
            if key.shape[1] != self.center_k.shape[1]:
                raise ValueError(f"the centres are for {self.center_k.shape[1]} key heads, got {key.shape[1]}")
            centers = self.center_q, self.center_k
        branches = (self.near, near_query, near_key, apart, in_place)
        return advance(
            Recurrence(
                *(query, key, value, keep, memory, self.alpha, self.beta, self.matching, self.form, key_weight),
                *branches,
                centers,
            ),
            signature if query.shape[2] == 1 else None,
            self._steps,
        )

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

    def _check_shapes(self) -> None:
        """Refuse tensors that do not belong to one state: C code reads them without a further look."""
        batch, heads, head_dim, value_dim = self.values.shape if self.values.dim() == 4 else (-1, -1, -1, -1)
        shapes: dict[str, tuple[int, ...]] = {
            "mass": (batch, heads, head_dim),
            "values": (batch, heads, head_dim, value_dim),
            "count": (batch,),
            "query_sums": (batch, heads, 3),
            "key_sums": (batch, heads, 3),
            "alpha": (batch, heads),
            "beta": (batch, heads),
            "center_q": (batch, heads, head_dim),
        }
        if self.recent_key is not None:
            recent = (batch, *self.recent_key.shape[1:3])
            shapes |= {"recent_key": (*recent, self.recent_key.shape[-1]), "recent_value": (*recent, value_dim)}
        if self.center_k is not None:
            shapes["center_k"] = (batch, self.center_k.shape[1], head_dim)
        for name, shape in shapes.items():
            x = getattr(self, name)
            if x is not None and x.shape != shape:
                raise ValueError(f"{name} of a state must be {shape}, got {tuple(x.shape)}")
        if (self.recent_key is None) != (self.recent_value is None):
            raise ValueError("a state has recent keys and recent values, or neither")
        if {self.center_q is None, self.center_k is None} != {self.form != "decomposed"}:
            raise ValueError(f'a state of form="decomposed" has two centres and others have none, got {self.form!r}')


def _is_owner(x: Tensor, others: set[int]) -> bool:
    """Whether a tensor has all of its memory to itself; `others` are the addresses of those seen so far."""
    if torch.compiler.is_compiling() or is_recorded() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False  # there are no addresses to compare
    storage = x.untyped_storage()
    is_alone = storage.data_ptr() not in others or storage.nbytes() == 0
    others.add(storage.data_ptr())
    return is_alone and x.is_contiguous() and storage.nbytes() == x.numel() * x.element_size()


def _describe(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
