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

from lln.backends.cpu import layout
from lln.backends.cpu.build import load
from lln.checks import check_choice
from lln.matching import curves
from lln.matching.curves import MATCHINGS, Form, Matching
from lln.recurrence import Advance, Memory, Recurrence

TYPES = {torch.float32: layout.FLOAT32, torch.bfloat16: layout.BFLOAT16, torch.float16: layout.FLOAT16}
JOB, ADVANCE = (struct.Struct("=" + layout.format_of(kind)) for kind in (layout.Job, layout.Advance))
NO_TENSOR = (0, 0, 0, 0)
NO_CURVE = (0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
NO_GRADIENTS = NO_TENSOR * 4 + (0, 0)
FORMS = {"paper": layout.PAPER, "unbiased": layout.UNBIASED, "decomposed": layout.DECOMPOSED}
NO_CENTERS = (0, *NO_TENSOR, *NO_TENSOR)
PAPER_FORM = (layout.PAPER, *NO_CENTERS)
# The dtypes of a state's memory, by whether it has no recent tokens and by the dtype of its tokens.
SUMS = (torch.float32, torch.float32, torch.int64, torch.float64, torch.float64)
MEMORY_DTYPES = {
    (is_far, dtype): (*SUMS, *((None, None) if is_far else (dtype, dtype)))
    for dtype in TYPES
    for is_far in (True, False)
}

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # output, alpha, beta, mass, values

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
def curve_of(head_dim: int, matching: Matching, form: Form = "paper") -> Curve:
    check_choice("matching", matching, MATCHINGS)
    table = curves.TABLE
    start, ratio = table["score_variance"]["start"], table["score_variance"]["ratio"]
    counts = table["num_keys"]
    rows = [] if matching == "linear" else curves.curve_rows(head_dim, matching, form=form)
    memory = torch.tensor(rows, dtype=torch.float32)
    logs = (math.log(start), math.log(ratio), math.log(counts[0]), math.log(counts[1] / counts[0]))
    line = curves.linear_constants(head_dim, form=form)
    return Curve(memory, (memory.data_ptr(), len(rows), len(rows[0]) if rows else 0, *logs, *line))


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
    form: Form = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
    for_backward: bool = True,
) -> Results | tuple[Tensor, Tensor | None, Tensor | None, None, None]:
    """The output, alpha, beta, and what the backward pass needs of all keys: `mass` and `values` of job.h.

    Without `for_backward` there is only the output, and of the others what was given.

    `block_size` 0 is LLN attention; otherwise the mean of LLN and the attention inside blocks, or in windows of that
    size, or the latter alone. Without centres (1 or B, heads, D) those of the decomposed form are means of the sample.
    """
    by_means = form == "decomposed" and center_query is None
    results: Any = (
        make_room(query, value, alpha, beta, with_lln, is_causal, by_means)
        if for_backward
        else (_new_rows(query, value.shape[3]), alpha, beta, None, None)
    )
    output, used_alpha, used_beta, mass, values = results
    centers = _centers(mass, query, key, center_query, center_key) if form == "decomposed" else ()
    _run(
        load().lln_forward,
        _rows(query),
        _rows(key),
        _rows(value),
        output,
        keep_query,
        keep_key,
        used_alpha,
        used_beta,
        mass,
        values,
        (is_causal, block_size, with_lln, alpha is None and with_lln, beta is None and with_lln),
        curve_of(query.shape[3], matching, form).fields,
        NO_GRADIENTS,
        is_window,
        key_weight,
        0,
        PAPER_FORM if form == "paper" else _form_layout(form, by_means, centers),
    )
    return results  # type: ignore[no-any-return]


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
    form: Form = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, with `grad_scales` those of alpha and beta, (B, H, tokens), and with
    `grad_weight` that of `key_weight`, (B, H, M)."""
    gradients = make_gradients(query, key, value, keep_key, grad_scales, grad_weight)
    grad_query, grad_key, grad_value, grad_alpha, grad_beta, of_weight = gradients
    grad = _rows(grad)
    by_means = form == "decomposed" and center_query is None
    centers = _centers(mass, query, key, center_query, center_key) if form == "decomposed" else ()
    _run(
        load().lln_backward,
        _rows(query),
        _rows(key),
        _rows(value),
        grad,
        keep_query,
        keep_key,
        alpha,
        beta,
        mass,
        values,
        (is_causal, block_size, with_lln, False, False),
        NO_CURVE,
        (
            *(*_layout(grad), *_layout(grad_query), *_layout(grad_key), *_layout(grad_value)),
            *((grad_alpha.data_ptr(), grad_beta.data_ptr()) if grad_scales else (0, 0)),
        ),
        is_window,
        key_weight,
        of_weight.data_ptr() if grad_weight else 0,
        PAPER_FORM if form == "paper" else _form_layout(form, by_means, centers),
    )
    return gradients


def dtypes_of(memory: Memory) -> tuple[torch.dtype | None, ...]:
    """The dtype of each tensor on a CPU; None for one that is absent or elsewhere."""
    return tuple([x.dtype if x is not None and x.is_cpu else None for x in memory])


def advance(recurrence: Recurrence) -> Advance:
    """The next tokens of a state in one call; its memory is overwritten, or the new one is in tensors of its own."""
    query, key, value = _rows(recurrence.query), _rows(recurrence.key), _rows(recurrence.value)
    keep, memory, alpha, beta = recurrence.keep, recurrence.memory, recurrence.alpha, recurrence.beta
    (batch, heads, tokens, width), (_, key_heads, _, value_width) = query.shape, value.shape
    near_query = query if recurrence.near_query is None else _rows(recurrence.near_query)
    near_key = key if recurrence.near_key is None else _rows(recurrence.near_key)
    output_type = torch.float32 if recurrence.apart else value.dtype
    output = torch.empty((batch, heads, tokens, value_width), dtype=output_type)
    block_size = 0 if memory.recent_key is None else memory.recent_key.shape[2]
    near = torch.empty_like(output) if recurrence.apart and block_size else None
    after = memory
    if not recurrence.in_place:
        copies: list[Any] = [None if x is None else torch.empty_like(x) for x in memory]
        after = Memory(*copies)
    if keep is not None:
        keep = keep.contiguous()
    pointers = _pointers(memory)
    q, k, v = query.stride(), key.stride(), value.stride()
    output_strides = (heads * tokens * value_width, tokens * value_width, value_width)
    job = ADVANCE.pack(
        *(batch, heads, key_heads, tokens, tokens, width, value_width, TYPES[value.dtype]),
        *(1 if _forked else torch.get_num_threads(), True, block_size),
        *(True, alpha is None, beta is None),
        *(query.data_ptr(), q[0], q[1], q[2], key.data_ptr(), k[0], k[1], k[2]),
        *(value.data_ptr(), v[0], v[1], v[2], output.data_ptr(), *output_strides),
        *(0, 0 if keep is None else keep.data_ptr()),
        *(NO_TENSOR if alpha is None else (alpha.data_ptr(), heads, 1, 0)),
        *(NO_TENSOR if beta is None else (beta.data_ptr(), heads, 1, 0)),
        *(0, 0),
        *curve_of(width, recurrence.matching, recurrence.form).fields,
        *NO_GRADIENTS,
        *(recurrence.near == "window", *_scale_layout(recurrence.key_weight), 0, FORMS[recurrence.form], *NO_CENTERS),
        *(NO_TENSOR if near is None else (near.data_ptr(), *output_strides)),
        *(*_layout(near_query), *_layout(near_key), near_query.shape[3]),
        *(TYPES[query.dtype], TYPES[output_type]),
        *pointers,
        *(pointers if recurrence.in_place else _pointers(after)),
    )
    if load().lln_advance(job) != 0:
        raise MemoryError("no memory for the scratch space of attention")
    if recurrence.in_place:
        _note_change(memory)
    return Advance(output, near, after)


def _pointers(memory: Memory) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in memory])


def _note_change(memory: Memory) -> None:
    """Let autograd know that tensors were overwritten, so that it refuses to use what it saved of them."""
    if not memory.mass.is_inference():
        increment_version([x for x in memory if x is not None])


def make_room(
    query: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    with_lln: bool,
    is_causal: bool,
    sample_centers: bool = False,
) -> Results:
    """Empty tensors for what `forward` returns; the given alpha and beta as they are.

    The output has tokens and heads in memory as the query has them: no copy for whoever joins heads.
    """
    batch, heads, tokens, width = query.shape
    value_width = value.shape[3]
    matched = (batch, heads, tokens if is_causal else 1) if with_lln else (0,)
    kept = width if with_lln and not is_causal else 0
    return (
        _new_rows(query, value_width),
        _new_floats(query, matched) if alpha is None else alpha,
        _new_floats(query, matched) if beta is None else beta,
        _new_floats(query, (batch, heads, 4 if sample_centers else 2, kept)),
        _new_floats(query, (batch, heads, kept, value_width)),
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


def _new_floats(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _new_rows(like: Tensor, width: int) -> Tensor:
    """An empty (B, heads, tokens, width) tensor as the C code writes it, whatever the strides of `like`.

    Rows of features are contiguous and do not overlap; samples, heads and tokens follow each other as they do in
    `like`, so that whoever splits or joins heads, or packed sequences, needs no copy.
    """
    batch, heads, tokens, _ = like.shape
    sample, head, token, _ = like.stride()
    if head < token:
        return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)
    if sample < head:
        return like.new_empty((heads, batch, tokens, width)).transpose(0, 1)
    return like.new_empty((batch, heads, tokens, width))


def _run(
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    keep_query: Tensor | None,
    keep_key: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    mass: Tensor | None,
    values: Tensor | None,
    options: tuple[bool, int, bool, bool, bool],
    curve: tuple[float, ...],
    grads: tuple[int, ...],
    is_window: bool,
    key_weight: Tensor | None,
    grad_weight: int,
    form: tuple[int, ...],
) -> None:
    (batch, heads, queries, width), (_, key_heads, keys, value_width) = query.shape, value.shape
    if keep_query is not None:
        keep_query = keep_query.contiguous()
    if keep_key is not None:
        keep_key = keep_key.contiguous()
    q, k, v, o = query.stride(), key.stride(), value.stride(), output.stride()
    job = JOB.pack(
        *(batch, heads, key_heads, queries, keys, width, value_width),
        *(TYPES[query.dtype], 1 if _forked else torch.get_num_threads(), *options),
        *(query.data_ptr(), q[0], q[1], q[2], key.data_ptr(), k[0], k[1], k[2]),
        *(value.data_ptr(), v[0], v[1], v[2], output.data_ptr(), o[0], o[1], o[2]),
        *(0 if keep_query is None else keep_query.data_ptr(), 0 if keep_key is None else keep_key.data_ptr()),
        *_scale_layout(alpha),
        *_scale_layout(beta),
        *(0 if mass is None else mass.data_ptr(), 0 if values is None else values.data_ptr()),
        *curve,
        *grads,
        is_window,
        *_scale_layout(key_weight),
        grad_weight,
        *form,
    )
    if function(job) != 0:
        raise MemoryError("no memory for the scratch space of attention")


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    return (x.data_ptr(), *x.stride()[:3])  # type: ignore[return-value]


def _scale_layout(scale: Tensor | None) -> tuple[int, int, int, int]:
    """Pointer and strides for (batch, head, token), 0 where a scale is the same for all."""
    if scale is None or scale.dim() != 3:
        return NO_TENSOR
    (batch, head, token), sizes = scale.stride(), scale.shape
    return (
        scale.data_ptr(),
        batch if sizes[0] > 1 else 0,
        head if sizes[1] > 1 else 0,
        token if sizes[2] > 1 else 0,
    )


def _centers(
    mass: Tensor | None, query: Tensor, key: Tensor, center_query: Tensor | None, center_key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The centres (1 or B, heads, D) as floats: those given, or the place for means of the sample in `mass`."""
    if center_query is None or center_key is None:
        if mass is None:
            mass = _new_floats(query, (*query.shape[:2], 4, query.shape[3]))
        return mass[:, :, 2], mass[:, :: query.shape[1] // key.shape[1], 3]
    return center_query.float().contiguous(), center_key.float().contiguous()


def _form_layout(form: Form, by_means: bool, centers: tuple[Tensor, ...]) -> tuple[int, ...]:
    if not centers:
        return (FORMS[form], *NO_CENTERS)
    return (FORMS[form], by_means, *(field for x in centers for field in _scale_layout(x)))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
