"""Packed sequences: several, one after the other, in a batch of 1, as flash-attention's varlen functions have it.

`cu_seqlens` (sequences + 1,) gives where each starts and where the last ends. Every sequence becomes a sample, so that
everything that is done per sample, statistics, blocks, windows and causal attention, is done per sequence, by any
backend and any mechanism:

- sequences of equal length are the samples of one batch, which is a view of the tokens;
- on a CPU a long sequence is a call of its own, without a copy and without padding;
- others of similar length are the samples of one padded batch, of which no sample is more than half padding.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lln.checks import check_inputs, check_scale
from lln.problem import read_centers, read_key_weight

INTEGERS = (torch.int32, torch.int64)
# From here on a call on a CPU costs less than what padding adds.
LONG = 128
MASKS = ("key_padding_mask", "query_padding_mask")
PER_TOKEN = ("alpha", "beta", "key_weight")
NO_GRAPH = (
    "the lengths of packed sequences (cu_seqlens) decide which calls are made, so they are no part of a graph: "
    "compile without fullgraph=True, or pad the sequences and pass key_padding_mask"
)


Outputs = tuple[Tensor, ...]


def attend_packed(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: Any
) -> Tensor:
    """The attention of each sequence to itself, (1, H, total, V).

    Args:
        attend: attention of a batch, with `key_padding_mask` among its options.
        query, key, value: (1, heads, total, features).
        cu_seqlens: int32 or int64, from 0 to total, not decreasing; on the CPU or on the device of the query.
        **options: of the attention; alpha and beta may differ between the tokens.

    Raises:
        TypeError, ValueError: the sequences do not fit the tokens, or a mask is given beside them.
    """

    def attend_one(*tokens: Tensor, **own: Any) -> Outputs:
        return (attend(*tokens, **own),)

    return packed_outputs(attend_one, query, key, value, cu_seqlens, **options)[0]


def packed_outputs(
    attend: Callable[..., Outputs], query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: Any
) -> Outputs:
    """`attend_packed` for what gives several tensors, each (B, H, N, features)."""
    return _outside_of_graphs(attend, query, key, value, cu_seqlens, options)


def _outside_of_graphs(*arguments: Any) -> Outputs:
    """`_attend_packed` under torch.compiler.disable, which imports the compiler: seconds, if it is not there yet."""
    global _disabled
    if _disabled is None and "torch._dynamo" in sys.modules:
        _disabled = torch.compiler.disable(_attend_packed, reason=NO_GRAPH)  # type: ignore[no-untyped-call]
    return (_disabled or _attend_packed)(*arguments)


_disabled: Callable[..., Outputs] | None = None
# What torch.compiler.disable marks a function with.
_outside_of_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]
_outside_of_graphs._torchdynamo_disable_msg = NO_GRAPH  # type: ignore[attr-defined]


def _attend_packed(
    attend: Callable[..., Outputs],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    options: dict[str, Any],
) -> Outputs:
    check_inputs(query, key, value, same_length="cu_seqlens")
    starts = _read_starts(cu_seqlens, query)
    for name in MASKS:
        if options.pop(name, None) is not None:
            raise ValueError(f"cu_seqlens gives the ends of sequences, so there is no padding; leave {name} out")
    if options.get("scope") == "batch":
        raise ValueError('scope="batch" takes statistics over all sequences; with cu_seqlens use scope="sample"')
    for name in ("alpha", "beta"):
        check_scale(name, options.get(name), batch=1, heads=query.shape[1], tokens=query.shape[2])
    if options.get("far", True):
        form, causal = options.get("form", "paper"), options.get("is_causal", False)
        read_centers(options.get("centers"), query, key, form=form, is_causal=causal)
    if options.get("key_weight") is not None:
        read_key_weight(options["key_weight"], query, key, far=options.get("far", True))
    options = {n: x if n == "key_weight" else _without_batch(x) for n, x in options.items() if x is not None}
    # What has tokens is cut into sequences: the scales that differ between tokens are (1, H, total, 1) here.
    scales = {name: x[..., None] for name, x in options.items() if name in PER_TOKEN and _is_of_tokens(x)}
    options = {name: x for name, x in options.items() if name not in scales}

    def run(tokens: list[Tensor], **padding: Tensor) -> Outputs:
        own = {name: x[..., 0] for name, x in zip(scales, tokens[3:], strict=True)}
        return attend(*tokens[:3], **own, **options, **padding)

    cut = [query, key, value, *scales.values()]
    return _attend_parts(run, cut, [end - start for start, end in pairwise(starts)])


def _attend_parts(run: Callable[..., Outputs], cut: list[Tensor], lengths: list[int]) -> Outputs:
    """The outputs of `run` for sequences of these lengths, each a row of all sequences."""
    query = cut[0]
    if not lengths or query.shape[2] == 0:
        return run(cut)
    if min(lengths) == max(lengths):
        return tuple([_as_row(x) for x in run([_as_samples(x, len(lengths)) for x in cut])])
    parts = list(zip(*(_split(x, lengths) for x in cut), strict=True))
    outputs: dict[int, Outputs] = {}
    for group in _groups(lengths, is_cpu=query.device.type == "cpu"):
        if len(group) == 1:
            outputs[group[0]] = run(list(parts[group[0]]))
            continue
        sizes = [lengths[i] for i in group]
        padded = [_as_samples(_pad([parts[i][n] for i in group], max(sizes)), len(group)) for n in range(len(cut))]
        rows = [_as_row(x) for x in run(padded, key_padding_mask=torch.tensor(sizes, device=query.device))]
        pieces = zip(*(_split(x, [n for size in sizes for n in (size, max(sizes) - size)]) for x in rows), strict=True)
        outputs.update(zip(group, list(pieces)[::2], strict=True))
    return tuple([_cat(list(x)) for x in zip(*(outputs[i] for i in sorted(outputs)), strict=True)])


def _read_starts(cu_seqlens: Tensor, query: Tensor) -> list[int]:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in INTEGERS or cu_seqlens.dim() != 1:
        what = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens)
        raise TypeError(f"cu_seqlens must be an int32 tensor (sequences + 1,), got {what}")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seqlens is for a batch of 1 that holds all sequences, got a batch of {query.shape[0]}")
    if cu_seqlens.device.type != "cpu" and (cu_seqlens.is_meta or cu_seqlens.device != query.device):
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device} and query on {query.device}; move cu_seqlens to the CPU, where its "
            "values are read"
        )
    starts: list[int] = cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] != query.shape[2] or any(x > y for x, y in pairwise(starts)):
        raise ValueError(f"cu_seqlens must rise from 0 to the {query.shape[2]} tokens, got {starts}")
    return starts


def _groups(lengths: list[int], *, is_cpu: bool) -> list[list[int]]:
    """Sequences that run together: their lengths lie between the same powers of two. Empty ones are left out."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            alone = i if is_cpu and length >= LONG else -1
            groups.setdefault(((length - 1).bit_length(), alone), []).append(i)
    return list(groups.values())


def _as_samples(row: Tensor, samples: int) -> Tensor:
    """(1, heads, samples x tokens, features) as (samples, heads, tokens, features)."""
    # Not row[0]: its gradient would be a tensor of zeros, filled by a copy.
    return torch.unflatten(row.squeeze(0), 1, (samples, row.shape[2] // samples)).transpose(0, 1)


def _as_row(samples: Tensor) -> Tensor:
    return samples.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _pad(parts: list[Tensor], longest: int) -> Tensor:
    """Sequences in one row, each followed by ones up to the longest: a scale must be positive in padding too."""
    return _cat([y for x in parts for y in (x, x.new_ones(1, x.shape[1], longest - x.shape[2], x.shape[3]))])


def _has_tokens_first(x: Tensor) -> bool:
    """Whether heads follow each other faster than tokens in memory, as in the layers of models: it stays so."""
    return x.stride(1) < x.stride(2)


def _split(row: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    if _has_tokens_first(row):
        return tuple([x.transpose(1, 2) for x in torch.split(row.transpose(1, 2), lengths, dim=1)])
    return torch.split(row, lengths, dim=2)


def _cat(parts: list[Tensor]) -> Tensor:
    if _has_tokens_first(parts[0]):
        return torch.cat([x.transpose(1, 2) for x in parts], dim=1).transpose(1, 2)
    return torch.cat(parts, dim=2)


def _is_of_tokens(scale: Any) -> bool:
    return isinstance(scale, Tensor) and scale.dim() == 3


def _without_batch(x: Any) -> Any:
    """What belongs to the one sample that there is belongs to all sequences in it; scales of tokens stay."""
    if isinstance(x, tuple):
        return tuple(y[0] if isinstance(y, Tensor) and y.dim() == 3 else y for y in x)
    if isinstance(x, Tensor) and x.dim() == 2:
        return x[0]
    if isinstance(x, Tensor) and x.dim() == 3 and x.shape[2] == 1:
        return x[0, :, 0]
    return x
