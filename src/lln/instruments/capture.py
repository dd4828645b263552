"""Query and key of a running attention: read from the arguments of our modules, of torch's and of Hugging Face's.

Each reader takes the module and the arguments of its call, and copies one sample and a few heads. A reader that cannot
make sense of its arguments raises `UnreadableError`, with the text of a warning.

Shapes: B batch, H heads, N queries, M keys, D features, E width of the model; h chosen heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lln.functional import KINDS, match_moments
from lln.instruments.reading import Options, read, scales_of
from lln.instruments.rows import MeanRows, Rows, SoftmaxRows
from lln.masks import read_padding
from lln.mechanism import JoinedBranches, Mechanism
from lln.nn import LLNAttention
from lln.precision import accumulator

Choose = Callable[[int, int], tuple[int, list[int]]]  # from batch and heads to a sample and some heads

# Names under which transformers runs softmax attention, by how they start.
HF_SOFTMAX = ("eager", "sdpa", "flash", "flex", "paged")


# Arguments of Hugging Face attention functions that change the weights beyond query, key and mask.
HF_UNREAD = {"softcap": "a cap on scores", "position_bias": "a bias for positions", "s_aux": "attention sinks"}


class UnreadableError(Exception):
    """An attention that cannot be recorded, and why."""


@dataclass
class Capture:
    """Query (1, h, N, D) and key (1, h, M, D) of one sample, and how they are attended.

    `mask` (1 or h, N, M) is what a model gave for pairs of tokens: bool with True = may attend, or float to be added.
    `share` (h, 1 or N) is the part of LLN in LLN + Diag where it is not one half. With `is_disjoint` LLN leaves the
    neighbours out.
    """

    heads: list[int]
    query: Tensor
    key: Tensor
    options: Options
    mask: Tensor | None = None
    share: Tensor | None = None
    is_disjoint: bool = False

    def rows(self) -> list[Rows]:
        """Pieces that hold the heads in order."""
        if self.mask is None:
            pieces = read(self.query, self.key, self.options)[1]
            share, keep = self.share, self.options.get("key_padding_mask")
            if share is not None and share.shape[1] > 1 and keep is not None:
                share = share[:, keep[0]]
            done = 0
            for piece in pieces:
                if isinstance(piece, MeanRows) and share is not None:
                    piece.share = share[done : done + piece.heads, :, None]
                    piece.is_disjoint = self.is_disjoint
                done += piece.heads
            return pieces
        masks = self.mask if len(self.mask) > 1 else [self.mask[0]] * len(self.heads)
        return [self._masked_rows(head, mask) for head, mask in enumerate(masks)]

    def _masked_rows(self, head: int, mask: Tensor) -> Rows:
        query, key = self.query[0, head, None], self.key[0, head, None]
        everything = SoftmaxRows(query, key, is_causal=False, mask=mask)
        allowed = everything.allowed(everything.index)
        rows, columns = allowed.any(dim=1), allowed.any(dim=0)
        square = len(rows) == len(columns)
        while square and not torch.equal(rows, columns):
            rows = columns = rows & columns  # padding is padding on both sides
            allowed = allowed & rows[:, None] & columns  # and without it others may be left with nothing
            rows, columns = allowed.any(dim=1), allowed.any(dim=0)
        is_causal = square and len(rows) > 1 and not bool(allowed[rows][:, columns].triu(1).any())
        return SoftmaxRows(query[:, rows], key[:, columns], is_causal=is_causal, mask=mask[rows][:, columns])

    def scales(self) -> tuple[Tensor, Tensor] | None:
        """alpha and beta (h,) of LLN attention; those of the last kept token if each token has its own.

        None for other attention, and where features are learned, of which they are a part.
        """
        if self.options.get("kind", "lln") not in ("lln", "lln_diag") or self.options.get("features") is not None:
            return None
        keep = self.options.get("key_padding_mask")
        last = -1 if keep is None or not bool(keep.any()) else int(keep[0].nonzero()[-1])
        alpha, beta = (
            x[0, :, last if x.shape[2] > 1 else 0].expand(len(self.heads))
            for x in scales_of(self.query, self.key, self.options)
        )
        return alpha, beta


def take(
    choose: Choose,
    query: Tensor,
    key: Tensor,
    options: Options,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    mechanism: nn.Module | None = None,
) -> Capture:
    """Copy one sample and some heads of query (B, H, N, D), key (B, H_k, M, D) and what belongs to them."""
    sample, heads = choose(query.shape[0], query.shape[1])
    share = None
    if isinstance(mechanism, JoinedBranches) and options.get("kind") == "lln_diag":
        share = _far_share(mechanism, query[sample, None] * scale, key[sample, None], options, sample)
    groups = query.shape[1] // key.shape[1]
    options = options.copy()
    keep = options.get("key_padding_mask")
    if keep is not None:
        options["key_padding_mask"] = keep[sample, None].clone()
    if "alpha" in options:
        options["alpha"] = _take_scale(options["alpha"], sample, heads)
    if "beta" in options:
        options["beta"] = _take_scale(options["beta"], sample, heads)
    features = options.get("features")
    if features is not None:
        a, b = (x.detach()[sample, heads][None] for x in features)
        options["features"] = a, b
    centers = options.get("centers")
    if centers is not None:
        chosen = (heads, [head // groups for head in heads])
        options["centers"] = (centers[0].detach()[chosen[0]], centers[1].detach()[chosen[1]])
    if mask is not None:
        mask = mask[sample] if len(mask) > 1 else mask[0]
        mask = (mask[heads] if len(mask) > 1 else mask).clone()
    dtype = accumulator(query.dtype)
    chosen_keys = [head // groups for head in heads]
    # Indexing with a list copies, so that what the model does to its tensors later does not matter.
    return Capture(
        heads,
        query.detach()[sample, heads][None].to(dtype) * scale,
        key.detach()[sample, chosen_keys][None].to(dtype),
        options,
        mask,
        None if share is None else share[heads],
        is_disjoint=isinstance(mechanism, JoinedBranches) and mechanism.combine == "replace",
    )


def _take_scale(scale: float | Tensor | None, sample: int, heads: list[int]) -> float | Tensor | None:
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return scale
    scale = scale.detach()[None] if scale.dim() == 1 else scale.detach()
    scale = scale[sample, None] if len(scale) > 1 else scale
    return scale[:, heads] if scale.shape[1] > 1 else scale.clone()


def from_ours(
    choose: Choose,
    module: LLNAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_causal: bool = False,
) -> Capture:
    """`lln.LLNAttention` and `lln.LLNDiagAttention`, also inside `lln.MultiheadAttention`.

    A learned scale for each value feature leaves LLN + Diag without a matrix; its LLN branch is recorded then. Of
    packed sequences the longest is recorded.
    """
    query, key = _longest(query, key, cu_seqlens)
    if query_padding_mask is not None and (
        key_padding_mask is None or not torch.equal(query_padding_mask, key_padding_mask)
    ):
        raise UnreadableError("its queries have a padding of their own (query_padding_mask), which is not read yet")
    keep = read_padding(key_padding_mask, key)
    options = Options(key_padding_mask=keep, is_causal=is_causal)
    _add_settings(options, module, query, key)
    return take(choose, query, key, options, mechanism=module)


def _longest(query: Tensor, key: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Query and key of the longest of packed sequences, the first of several, in rows that are laid end to end."""
    if cu_seqlens is None:
        return query, key
    lengths = cu_seqlens.diff()
    longest = int(lengths.argmax())
    row, start = divmod(int(cu_seqlens[longest]), query.shape[2])
    part = slice(start, start + int(lengths[longest]))
    return query[row, None, :, part], key[row, None, :, part]


@torch.no_grad()
def _far_share(mechanism: JoinedBranches, query: Tensor, key: Tensor, options: Options, sample: int) -> Tensor | None:
    """The share of LLN attention of one sample, (H, 1 or N), or None where it is one half."""
    keep = options.get("key_padding_mask")
    keep = None if keep is None else keep[sample, None]
    is_causal = options.get("is_causal", False)
    tokens: Any = {"key_padding_mask": keep, "is_causal": is_causal}
    ratio = mechanism.joined_branches(lambda: query, query, key, key, **tokens)[2]
    share = mechanism.far_share(query, ratio)
    return None if share is None else share[0, :, :, 0]


def from_hugging_face(
    choose: Choose,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> Capture:
    """An attention function of transformers: query and key come after rotary embedding and cache.

    A function registered under the name of one of our kinds, or with an attribute `kind`, is read as that kind; a
    module that `lln.hf.convert` gave a mechanism, as that mechanism with its options. Of packed sequences the longest
    is recorded.
    """
    mechanism = getattr(module, "mechanism", None)
    if implementation.startswith(HF_SOFTMAX) or getattr(module, "stays_softmax", False):
        kind, mechanism = "softmax", None
    else:
        query, key, attention_mask = _unpacked(query, key, attention_mask, rest)
        read = mechanism.recorded_options(query, key) if isinstance(mechanism, Mechanism) else None
        kind = read["kind"] if read else mechanism.description.name if mechanism else implementation
    if kind not in KINDS:
        raise UnreadableError(f"attention implementation {kind!r} is neither softmax nor one of {', '.join(KINDS)}")
    for name, what in HF_UNREAD.items():
        if rest.get(name) is not None:
            raise UnreadableError(f"it uses {what} ({name}), which query and key do not show")
    state = getattr(module, "current_state_layer", None)
    if state is not None and state.length > query.shape[2]:
        raise UnreadableError("it continues from a state that does not hold the keys before; use_cache=False shows all")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    causal = causal and query.shape[2] == key.shape[2] and query.shape[2] > 1
    width = query.shape[-1]
    scale = 1.0 if scaling is None else scaling * width**0.5
    if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2):
        # Eager attention is causal by its mask alone; the others are by a flag when there is no mask.
        options = Options(kind=kind, is_causal=causal and implementation != "eager")
        if attention_mask is not None:
            options["key_padding_mask"] = attention_mask.bool()
        if mechanism is not None:
            _add_settings(options, mechanism, query * scale, key)
        return take(choose, query, key, options, scale=scale, mechanism=mechanism)
    if not isinstance(attention_mask, Tensor):
        raise UnreadableError(f"a mask of type {type(attention_mask).__name__} cannot be read; use attention 'sdpa'")
    if kind != "softmax":
        raise UnreadableError(
            f"a mask of shape {tuple(attention_mask.shape)} for pairs of tokens is not for kind {kind!r}"
        )
    mask = attention_mask[..., : key.shape[2]]
    return take(choose, query, key, Options(kind="softmax"), mask=mask, scale=scale)


def _unpacked(query: Tensor, key: Tensor, mask: Any, rest: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """The longest of packed sequences, which has no padding; the input as it is if there are none."""
    from lln.hf.packing import read_packing  # only where there is transformers

    starts = read_packing(mask, query, key, rest)
    return (query, key, mask) if starts is None else (*_longest(query, key, starts), None)


def _add_settings(options: Options, mechanism: Mechanism, query: Tensor, key: Tensor) -> None:
    """The options that a mechanism gives for its attention."""
    settings = mechanism.recorded_options(query, key)
    if settings is None:
        raise UnreadableError(f"{type(mechanism).__name__} has no matrix that can be read")
    scope = settings.pop("scope", "sample")
    options.update(settings)  # type: ignore[typeddict-item]
    if scope == "batch":
        _match_batch(options, query, key)


def _match_batch(options: Options, query: Tensor, key: Tensor) -> None:
    """alpha and beta of the whole batch where none are given, because only a sample of it is kept."""
    given = options["alpha"], options["beta"]
    if None not in given:
        return
    keep = options.get("key_padding_mask")
    matched = match_moments(query, key, matching=options["matching"], scope="batch", key_padding_mask=keep)
    options["alpha"], options["beta"] = (m if g is None else g for m, g in zip(matched, given, strict=True))
