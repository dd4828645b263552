"""The fused CPU code as functions of tensors: called directly, and registered as torch.library custom ops.

`forward` and `backward` take the sequence apart exactly as `plain` does; `curve_of` hands over the matching curve.
Shapes: B batch, H heads, N queries, M keys, D features, V value width.
"""

import functools
import math
import os
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lln import curves
from lln.backends.cpu import layout
from lln.backends.cpu.build import load
from lln.checks import check_choice
from lln.curves import MATCHINGS, Matching
from lln.recurrence import Advance, Memory, Recurrence

TYPES = {torch.float32: layout.FLOAT32, torch.bfloat16: layout.BFLOAT16, torch.float16: layout.FLOAT16}
JOB, ADVANCE = (struct.Struct("=" + layout.format_of(kind)) for kind in (layout.Job, layout.Advance))
NO_TENSOR = (0, 0, 0, 0)
# No gradients, no window and no weights of keys: the last fields of a Job.
NO_GRADIENTS = NO_TENSOR * 4 + (0, 0) + (0, *NO_TENSOR, 0)
# The dtypes of a state's memory, by whether it has no recent tokens and by the dtype of its tokens.
SUMS = (torch.float32, torch.float32, torch.int64, torch.float64, torch.float64)
MEMORY_DTYPES = {
    (is_far, dtype): (*SUMS, *((None, None) if is_far else (dtype, dtype)))
    for dtype in TYPES
    for is_far in (True, False)
}

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True  # torch's threads stay behind in the parent: the child works alone


os.register_at_fork(after_in_child=_after_fork)


class Curve(NamedTuple):
    """The matching curve for a head dimension in memory that stays; the last fields are those of the Job."""

    memory: Tensor
    fields: tuple[float, ...]


@functools.cache
def curve_of(head_dim: int, matching: Matching) -> Curve:
    check_choice("matching", matching, MATCHINGS)
    table = curves.TABLE
    start, ratio = table["score_variance"]["start"], table["score_variance"]["ratio"]
    a, b = curves.linear_constants(head_dim)
    counts = table["num_keys"]
    rows: list[list[float]] = []
    if matching == "variance":
        rows = [curves._between_head_dims(table["variance"], head_dim)]
    elif matching == "entropy":
        tables = ([curve[n] for curve in table["entropy"]] for n in range(len(counts)))
        rows = [curves._between_head_dims(curve, head_dim) for curve in tables]
    memory = torch.tensor(rows, dtype=torch.float32)
    logs = (math.log(start), math.log(ratio), math.log(counts[0]), math.log(counts[1] / counts[0]))
    return Curve(memory, (memory.data_ptr(), len(rows), len(rows[0]) if rows else 0, *logs, a, b))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    with_lln: bool,
    block_size: int,
    is_causal: bool,
    matching: Matching,
    is_window: bool = False,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, alpha, beta, and what the backward pass needs of all keys: `mass` and `values` of job.h.

    `block_size` 0 is LLN attention; otherwise the mean of LLN and the attention inside blocks, or in windows of that
    size, or the latter alone.
    """
    output, *scales, mass, values = make_room(query, value, alpha, beta, with_lln, is_causal)
    query, key, value = _rows(query), _rows(key), _rows(value)
    _run(
        "lln_forward",
        query,
        key,
        value,
        output,
        keep_query,
        keep_key,
        scales,
        (mass, values),
        (with_lln, alpha is None and with_lln, beta is None and with_lln, block_size, is_causal),
        curve_of(query.shape[3], matching).fields,
        NO_TENSOR * 4,
        (0, 0),
        (is_window, *_weight_layout(key_weight), 0),
    )
    return output, scales[0], scales[1], mass, values


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    mass: Tensor,
    values: Tensor,
    with_lln: bool,
    block_size: int,
    is_causal: bool,
    grad_scales: bool,
    is_window: bool = False,
    key_weight: Tensor | None = None,
    grad_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, with `grad_scales` those of alpha and beta, (B, H, tokens), and with
    `grad_weight` that of `key_weight`, (B, H, M)."""
    gradients = make_gradients(query, key, value, keep_key, grad_scales, grad_weight)
    grads, (grad_alpha, grad_beta, of_weight) = gradients[:3], gradients[3:]
    query, key, value, grad = _rows(query), _rows(key), _rows(value), _rows(grad)
    _run(
        "lln_backward",
        query,
        key,
        value,
        grad,
        keep_query,
        keep_key,
        [alpha, beta],
        (mass, values),
        (with_lln, False, False, block_size, is_causal),
        (0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        (*_layout(grad), *(field for x in grads for field in _layout(x))),
        (grad_alpha.data_ptr(), grad_beta.data_ptr()) if grad_scales else (0, 0),
        (is_window, *_weight_layout(key_weight), of_weight.data_ptr() if grad_weight else 0),
    )
    return gradients


def dtypes_of(memory: Memory) -> tuple[torch.dtype | None, ...]:
    """The dtype of each tensor on a CPU; None for one that is absent or elsewhere."""
    return tuple([x.dtype if x is not None and x.is_cpu else None for x in memory])


def advance(recurrence: Recurrence) -> Advance:
    """The next tokens of a state in one call; its memory is overwritten, or the new one is in tensors of its own."""
    query, key, value, keep, memory, alpha, beta, matching, apart, in_place = recurrence
    (batch, heads, tokens, width), (_, key_heads, _, value_width) = query.shape, value.shape
    query, key, value = _rows(query), _rows(key), _rows(value)
    dtype = query.dtype
    output_type = torch.float32 if apart else dtype
    output = torch.empty((batch, heads, tokens, value_width), dtype=output_type)
    near = torch.empty_like(output) if apart and memory.recent_key is not None else None
    after = memory
    if not in_place:
        copies: list[Any] = [None if x is None else torch.empty_like(x) for x in memory]
        after = Memory(*copies)
    if keep is not None:
        keep = keep.contiguous()
    before_pointers = _pointers(memory)
    q, k, v = query.stride(), key.stride(), value.stride()
    output_strides = (heads * tokens * value_width, tokens * value_width, value_width)
    job = ADVANCE.pack(
        *(batch, heads, key_heads, tokens, tokens, width, value_width, TYPES[dtype]),
        *(
            1 if _forked else torch.get_num_threads(),
            True,
            0 if memory.recent_key is None else memory.recent_key.shape[2],
        ),
        *(True, alpha is None, beta is None),
        *(query.data_ptr(), q[0], q[1], q[2], key.data_ptr(), k[0], k[1], k[2]),
        *(value.data_ptr(), v[0], v[1], v[2], output.data_ptr(), *output_strides),
        *(0, 0 if keep is None else keep.data_ptr()),
        *(NO_TENSOR if alpha is None else (alpha.data_ptr(), heads, 1, 0)),
        *(NO_TENSOR if beta is None else (beta.data_ptr(), heads, 1, 0)),
        *(0, 0),
        *curve_of(width, matching).fields,
        *NO_GRADIENTS,
        *(NO_TENSOR if near is None else (near.data_ptr(), *output_strides)),
        TYPES[output_type],
        *before_pointers,
        *(before_pointers if in_place else _pointers(after)),
    )
    if load().lln_advance(job) != 0:
        raise MemoryError("no memory for the scratch space of attention")
    if in_place:
        _note_change(memory)
    return Advance(output, near, after)


def _pointers(memory: Memory) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in memory])


def _note_change(memory: Memory) -> None:
    """Let autograd know that tensors were overwritten, so that it refuses to use what it saved of them."""
    if not memory.mass.is_inference():
        increment_version([x for x in memory if x is not None])


def make_room(
    query: Tensor, value: Tensor, alpha: Tensor | None, beta: Tensor | None, with_lln: bool, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for what `forward` returns; the given alpha and beta as they are.

    The output has tokens and heads in memory as the query has them: no copy for whoever joins heads.
    """
    batch, heads, tokens, width = query.shape
    value_width = value.shape[3]
    output = _new_rows(query, value_width)
    floats = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    matched = (batch, heads, tokens if is_causal else 1) if with_lln else (0,)
    kept = width if with_lln and not is_causal else 0
    return (
        output,
        floats(matched) if alpha is None else alpha,
        floats(matched) if beta is None else beta,
        floats(batch, heads, 2, kept),
        floats(batch, heads, kept, value_width),
    )


def make_gradients(
    query: Tensor, key: Tensor, value: Tensor, keep_key: Tensor | None, grad_scales: bool, grad_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors for what `backward` returns: zeros where padding gets no gradient, else empty."""
    grads = [_new_rows(x, x.shape[3]) for x in (query, key, value)]
    if keep_key is not None:
        for grad in grads:
            grad.zero_()
    batch, heads, tokens, _ = query.shape
    wanted = ((tokens, grad_scales), (key.shape[2], grad_scales), (key.shape[2], grad_weight))
    shapes = ((batch, heads, n) if is_wanted else (0,) for n, is_wanted in wanted)
    others = [query.new_zeros(shape, dtype=torch.float32) for shape in shapes]
    return grads[0], grads[1], grads[2], others[0], others[1], others[2]


def _new_rows(like: Tensor, width: int) -> Tensor:
    """An empty (B, heads, tokens, width) tensor as the C code writes it, whatever the strides of `like`.

    Rows of features are contiguous and do not overlap; heads and tokens follow each other as they do in `like`, so that
    whoever splits or joins heads needs no copy.
    """
    batch, heads, tokens, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return like.new_empty(batch, heads, tokens, width)


def _run(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    scales: list[Tensor],
    memory: tuple[Tensor, Tensor],
    options: tuple[bool, bool, bool, int, bool],
    curve: tuple[float, ...],
    grads: tuple[Any, ...],
    grad_scales: tuple[int, ...],
    rest: tuple[int, ...],
) -> None:
    with_lln, match_alpha, match_beta, block_size, is_causal = options
    (batch, heads, queries, width), (_, key_heads, keys, value_width) = query.shape, value.shape
    keep_query, keep_key = (None if x is None else x.contiguous() for x in (keep_query, keep_key))
    q, k, v, o = query.stride(), key.stride(), value.stride(), output.stride()
    job = JOB.pack(
        *(batch, heads, key_heads, queries, keys, width, value_width),
        *(TYPES[query.dtype], 1 if _forked else torch.get_num_threads(), is_causal, block_size),
        *(with_lln, match_alpha, match_beta),
        *(query.data_ptr(), q[0], q[1], q[2], key.data_ptr(), k[0], k[1], k[2]),
        *(value.data_ptr(), v[0], v[1], v[2], output.data_ptr(), o[0], o[1], o[2]),
        *(0 if keep_query is None else keep_query.data_ptr(), 0 if keep_key is None else keep_key.data_ptr()),
        *_scale_layout(scales[0]),
        *_scale_layout(scales[1]),
        *(memory[0].data_ptr(), memory[1].data_ptr()),
        *curve,
        *grads,
        *grad_scales,
        *rest,
    )
    if getattr(load(), name)(job) != 0:
        raise MemoryError("no memory for the scratch space of attention")


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    return (x.data_ptr(), *x.stride()[:3])  # type: ignore[return-value]


def _scale_layout(scale: Tensor) -> tuple[int, int, int, int]:
    """Pointer and strides for (batch, head, token), 0 where a scale is the same for all."""
    if scale.dim() != 3:
        return NO_TENSOR
    (batch, head, token), sizes = scale.stride(), scale.shape
    return (
        scale.data_ptr(),
        batch if sizes[0] > 1 else 0,
        head if sizes[1] > 1 else 0,
        token if sizes[2] > 1 else 0,
    )


def _weight_layout(key_weight: Tensor | None) -> tuple[int, int, int, int]:
    return NO_TENSOR if key_weight is None else _scale_layout(key_weight)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
