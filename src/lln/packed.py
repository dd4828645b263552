"""Packed sequences: several, one after the other, in a batch of 1, as flash-attention's varlen functions have it.

`cu_seqlens` (sequences + 1,) says where each starts and where the last ends. Sequences of similar length become the
samples of one padded batch, of which no sample is more than half padding, so that everything that is done per sample,
statistics, blocks, windows and causal attention, is done per sequence, by any backend. Sequences of equal
length need no copy.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lln.checks import check_inputs, check_scale
from lln.problem import read_centers

INTEGERS = (torch.int32, torch.int64)


def attend_packed(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: Any
) -> Tensor:
    """The attention of each sequence to itself, (1, H, total, V).

    Args:
        attend: attention of a batch, with `key_padding_mask` among its options.
        query, key, value: (1, heads, total, features).
        cu_seqlens: int32 or int64, from 0 to total, not decreasing.
        **options: of the attention; alpha and beta may differ between the tokens.

    Raises:
        TypeError, ValueError: the sequences do not fit the tokens, or a mask is given beside them.
    """
    check_inputs(query, key, value, same_length="cu_seqlens")
    starts = _read_starts(cu_seqlens, query)
    for name in ("key_padding_mask", "query_padding_mask"):
        if options.get(name) is not None:
            raise ValueError(f"cu_seqlens says where sequences end, so there is no padding; leave {name} out")
    options = {name: x for name, x in options.items() if name not in ("key_padding_mask", "query_padding_mask")}
    if options.get("scope") == "batch":
        raise ValueError('scope="batch" takes statistics over all sequences; with cu_seqlens use scope="sample"')
    for name in ("alpha", "beta"):
        check_scale(name, options.get(name), batch=1, heads=query.shape[1], tokens=query.shape[2])
    if options.get("far", True):
        form, causal = options.get("form", "paper"), options.get("is_causal", False)
        read_centers(options.get("centers"), query, key, form=form, is_causal=causal)
    if query.shape[2] == 0:
        return attend(query, key, value, **_given(options))
    options["centers"] = _without_batch(options.get("centers"))
    lengths = [end - start for start, end in pairwise(starts)]
    if lengths and min(lengths) == max(lengths) > 0:
        tokens = [_split(x, len(lengths)) for x in (query, key, value)]
        own = {x: _split_scale(options.get(x), len(lengths)) for x in ("alpha", "beta")}
        return _joined(attend(*tokens, **_given(options | own)))
    outputs = [query.new_empty(*query.shape[:2], 0, value.shape[3])]
    places: list[int] = []
    for group in _groups(lengths):
        longest = max(lengths[i] for i in group)
        first = torch.tensor([starts[i] for i in group], device=query.device)
        sizes = torch.tensor([lengths[i] for i in group], device=query.device)
        position = torch.arange(longest, device=query.device)
        index = (first[:, None] + position).clamp(max=query.shape[2] - 1)
        tokens = [x[0, :, index].transpose(0, 1) for x in (query, key, value)]  # (samples, heads, longest, features)
        own = {x: _take_scale(options.get(x), index) for x in ("alpha", "beta")}
        output = attend(*tokens, **_given(options | own), key_padding_mask=sizes)
        kept = position < sizes[:, None]
        outputs.append(output.transpose(0, 1)[:, kept][None])
        places += [starts[i] + t for i in group for t in range(lengths[i])]
    back = torch.tensor(places, dtype=torch.int64, device=query.device).argsort()
    return torch.cat(outputs, dim=2).index_select(2, back)


def _read_starts(cu_seqlens: Tensor, query: Tensor) -> list[int]:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in INTEGERS or cu_seqlens.dim() != 1:
        what = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens)
        raise TypeError(f"cu_seqlens must be an int32 tensor (sequences + 1,), got {what}")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seqlens is for a batch of 1 that holds all sequences, got a batch of {query.shape[0]}")
    starts: list[int] = cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] != query.shape[2] or any(x > y for x, y in pairwise(starts)):
        raise ValueError(f"cu_seqlens must rise from 0 to the {query.shape[2]} tokens, got {starts}")
    return starts


def _groups(lengths: list[int]) -> list[list[int]]:
    """Sequences whose lengths lie between the same powers of two; empty ones are left out."""
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            groups.setdefault((length - 1).bit_length(), []).append(i)
    return [groups[size] for size in sorted(groups)]


def _split(x: Tensor, samples: int) -> Tensor:
    return torch.unflatten(x[0], 1, (samples, -1)).transpose(0, 1)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2)[None]


def _split_scale(scale: Any, samples: int) -> Any:
    is_each = isinstance(scale, Tensor) and scale.dim() == 3 and scale.shape[2] > 1
    return _split(scale[..., None], samples)[..., 0] if is_each else _without_batch(scale)


def _take_scale(scale: Any, index: Tensor) -> Any:
    is_each = isinstance(scale, Tensor) and scale.dim() == 3 and scale.shape[2] > 1
    return scale[0, :, index].transpose(0, 1) if is_each else _without_batch(scale)


def _without_batch(x: Any) -> Any:
    """What belongs to the one sample that there is belongs to all sequences in it."""
    if isinstance(x, tuple):
        return tuple(y[0] if isinstance(y, Tensor) and y.dim() == 3 else y for y in x)
    if isinstance(x, Tensor) and x.dim() > 1:
        return x[0] if x.dim() == 2 else x[0, :, 0]
    return x


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if x is not None}
