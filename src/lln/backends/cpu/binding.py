"""The fused CPU code as functions of tensors: `forward` and `backward`, which are also registered as torch.library
custom ops, and `advance` and `prepare_step` for states. `prepared` has calls that are made again.

Shapes: B batch, H heads, N queries, M keys, D features, V value width.
"""

import functools
import math
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lln.backends.cpu import layout
from lln.backends.cpu.allocation import allocate_gradients, allocate_results, as_rows
from lln.backends.cpu.build import load
from lln.backends.future import without_nonfinite_future
from lln.checks import check_choice
from lln.matching import curves
from lln.matching.curves import MATCHINGS, Form, Matching
from lln.problem import Problem
from lln.recurrence import Advance, Memory, Recurrence

TYPES = {torch.float32: layout.FLOAT32, torch.bfloat16: layout.BFLOAT16, torch.float16: layout.FLOAT16}
JOB, ADVANCE = (struct.Struct("=" + layout.format_of(kind)) for kind in (layout.Job, layout.Advance))
NO_TENSOR = (0, 0, 0, 0)
SPOILED = 2  # what lln_backward returns where results are not finite, see `lln.backends.future`
NO_CURVE = (0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
NO_GRADIENTS = NO_TENSOR * 4 + (0, 0)
FORMS = {"paper": layout.PAPER, "unbiased": layout.UNBIASED, "decomposed": layout.DECOMPOSED}
NO_MEMORY = "no memory for the scratch space of attention"
# The dtypes of a state's memory, by whether it has no recent tokens and by the dtype of its tokens.
SUMS = (torch.float32, torch.float32, torch.int64, torch.float64, torch.float64)
MEMORY_DTYPES = {
    (is_far, dtype): (*SUMS, *((None, None) if is_far else (dtype, dtype)))
    for dtype in TYPES
    for is_far in (True, False)
}

Prepared = Callable[[Tensor, Tensor, Tensor], Tensor]

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True  # torch's threads exist in the parent alone: the child has one thread


os.register_at_fork(after_in_child=_after_fork)


class Curve(NamedTuple):
    """The matching curve for a head dimension in memory that stays; the last fields are those of the Job."""

    memory: Tensor
    fields: tuple[float, ...]


@functools.cache
def curve_of(head_dim: int, given: str, form_given: str = "paper") -> Curve:
    check_choice("matching", given, MATCHINGS)
    matching, form = cast(Matching, given), cast(Form, form_given)
    table = curves.TABLE
    start, ratio = table["score_variance"]["start"], table["score_variance"]["ratio"]
    counts = table["num_keys"]
    rows = [] if matching == "linear" else curves.curve_rows(head_dim, matching, form=form)
    memory = torch.tensor(rows, dtype=torch.float32)
    logs = (math.log(start), math.log(ratio), math.log(counts[0]), math.log(counts[1] / counts[0]))
    line = curves.linear_constants(head_dim, form=form)
    return Curve(memory, (memory.data_ptr(), len(rows), len(rows[0]) if rows else 0, *logs, *line))


def settings_of(problem: Problem) -> tuple[Any, ...]:
    """The arguments of `forward` after query, key and value."""
    far = problem.far
    center_query, center_key = problem.centers if far and problem.centers else (None, None)
    return (
        problem.queries.keep,
        problem.keys.keep,
        problem.alpha,
        problem.beta,
        far,
        problem.block_size,
        problem.is_causal,
        problem.matching,
        problem.near == "window",
        problem.key_weight if far else None,
        problem.form if far else "paper",
        center_query,
        center_key,
    )


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
    matching: str,
    is_window: bool = False,
    key_weight: Tensor | None = None,
    form: str = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, alpha, beta, what the backward pass needs of all keys (`mass` and `values` of job.h), and with
    `with_lse` the log-sum-exp of the scores of attention inside blocks or windows alone, (B, H, N).

    `block_size` 0 is LLN attention; otherwise the mean of LLN and the attention inside blocks, or in windows of that
    size, or the latter alone. Without centres (1 or B, heads, D) those of the decomposed form are means of the sample.
    """
    assert not (with_lse and with_lln)
    by_means = form == "decomposed" and center_query is None
    results = allocate_results(query, value, alpha, beta, with_lln, is_causal, form, center_query, with_lse)
    output, used_alpha, used_beta, mass, values, lse = results
    centers = read_centers(form, mass, query, key, center_query, center_key)
    _run(
        load().lln_forward,
        *(as_rows(query), as_rows(key), as_rows(value), output, dense(keep_query), dense(keep_key)),
        *(used_alpha, used_beta, mass, values),
        (is_causal, block_size, with_lln, alpha is None and with_lln, beta is None and with_lln),
        curve_of(query.shape[3], matching, form).fields,
        NO_GRADIENTS,
        is_window,
        key_weight,
        0,
        form_layout(form, by_means, centers),
        lse.data_ptr() if with_lse else 0,
    )
    return results


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
    form: str = "paper",
    center_query: Tensor | None = None,
    center_key: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, with `grad_scales` those of alpha and beta, (B, H, tokens), and with
    `grad_weight` that of `key_weight`, (B, H, M). `grad_lse` is the gradient of the log-sum-exp, if there was one."""
    gradients = allocate_gradients(query, key, value, keep_key, grad_scales, grad_weight)
    grad_query, grad_key, grad_value, grad_alpha, grad_beta, of_weight = gradients
    grad, grad_lse = as_rows(grad), dense(grad_lse)
    by_means = form == "decomposed" and center_query is None
    centers = read_centers(form, mass, query, key, center_query, center_key)
    code = _run(
        load().lln_backward,
        *(as_rows(query), as_rows(key), as_rows(value), grad, dense(keep_query), dense(keep_key)),
        *(alpha, beta, mass, values),
        (is_causal, block_size, with_lln, False, False),
        NO_CURVE,
        (
            *(*layout_of(grad), *layout_of(grad_query), *layout_of(grad_key), *layout_of(grad_value)),
            *((grad_alpha.data_ptr(), grad_beta.data_ptr()) if grad_scales else (0, 0)),
        ),
        is_window,
        key_weight,
        of_weight.data_ptr() if grad_weight else 0,
        form_layout(form, by_means, centers),
        0,
        0 if grad_lse is None else grad_lse.data_ptr(),
    )
    if code == SPOILED:
        clean = without_nonfinite_future(grad, query, key, value, (alpha, beta), grad_lse)
        if clean is not None:
            tensors: Any = (*clean[:4], keep_query, keep_key, *clean[4], mass, values)
            options: Any = (with_lln, block_size, is_causal, grad_scales, is_window, key_weight, grad_weight, form)
            return backward(*(*tensors, *options, center_query, center_key, clean[5]))
    return gradients


def dtypes_of(memory: Memory) -> tuple[torch.dtype | None, ...]:
    """The dtype of each tensor on a CPU; None for one that is absent or elsewhere."""
    return tuple([x.dtype if x is not None and x.is_cpu else None for x in memory])


def advance(recurrence: Recurrence) -> Advance:
    """The next tokens of a state in one call; its memory is overwritten, or the new one is in tensors of its own."""
    memory, value = recurrence.memory, recurrence.value
    recurrence = recurrence._replace(
        query=as_rows(recurrence.query),
        key=as_rows(recurrence.key),
        value=as_rows(value),
        keep=dense(recurrence.keep),
        near_query=None if recurrence.near_query is None else as_rows(recurrence.near_query),
        near_key=None if recurrence.near_key is None else as_rows(recurrence.near_key),
    )
    shape = (*recurrence.query.shape[:3], value.shape[3])
    output = value.new_empty(shape, dtype=torch.float32 if recurrence.apart else value.dtype)
    near, lse = None, None
    if recurrence.apart and memory.recent_key is not None:
        near, lse = torch.empty_like(output), output.new_empty(output.shape[:3])
    after = memory
    if not recurrence.in_place:
        copies: list[Any] = [None if x is None else torch.empty_like(x) for x in memory]
        after = Memory(*copies)
    checked(load().lln_advance(_pack_advance(recurrence, output, near, lse, after)))
    if recurrence.in_place:
        _note_change([x for x in memory if x is not None])
    return Advance(output, near, after, lse, is_owner=True)


def prepare_step(recurrence: Recurrence) -> Prepared:
    """The output of the next token alone and in place, as a function of query, key and value that lie in memory as
    those of the recurrence do."""
    memory, value = recurrence.memory, recurrence.value
    shape = (*recurrence.query.shape[:3], value.shape[3])
    job = _pack_advance(recurrence, value.new_empty(shape), None, None, memory)
    function, changed = load().lln_step_like, [x for x in memory if x is not None]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = value.new_empty(shape)
        checked(function(job, query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(), threads()))
        _note_change(changed)
        return output

    return run


def _pack_advance(
    recurrence: Recurrence, output: Tensor, near: Tensor | None, lse: Tensor | None, after: Memory
) -> bytes:
    """An Advance of job.h."""
    query, key, value, memory, keep, alpha, beta = recurrence[:7]
    (batch, heads, tokens, width), (_, key_heads, _, value_width) = query.shape, value.shape
    near_query = query if recurrence.near_query is None else recurrence.near_query
    near_key = key if recurrence.near_key is None else recurrence.near_key
    block_size = 0 if memory.recent_key is None else memory.recent_key.shape[2]
    q, k, v, o = query.stride(), key.stride(), value.stride(), output.stride()[:3]
    return ADVANCE.pack(
        *(batch, heads, key_heads, tokens, tokens, width, value_width, TYPES[value.dtype]),
        *(threads(), True, block_size),
        *(True, alpha is None, beta is None),
        *(query.data_ptr(), q[0], q[1], q[2], key.data_ptr(), k[0], k[1], k[2]),
        *(value.data_ptr(), v[0], v[1], v[2], output.data_ptr(), *o),
        *(0, 0 if keep is None else keep.data_ptr()),
        *(NO_TENSOR if alpha is None else (alpha.data_ptr(), heads, 1, 0)),
        *(NO_TENSOR if beta is None else (beta.data_ptr(), heads, 1, 0)),
        *(0, 0),
        *curve_of(width, recurrence.matching, recurrence.form).fields,
        *NO_GRADIENTS,
        *(recurrence.near == "window", *_scale_layout(recurrence.key_weight), 0),
        *form_layout(recurrence.form, False, recurrence.centers or ()),
        *(0 if lse is None else lse.data_ptr(), 0),
        *(NO_TENSOR if near is None else (near.data_ptr(), *o)),
        *(*layout_of(near_query), *layout_of(near_key), near_query.shape[3]),
        *(TYPES[query.dtype], TYPES[output.dtype]),
        *_pointers(memory),
        *_pointers(after),
    )


def _pointers(memory: Memory) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in memory])


def _note_change(overwritten: list[Tensor]) -> None:
    """Mark tensors as overwritten for autograd, which then refuses to use what it saved of them."""
    if not overwritten[0].is_inference():
        increment_version(overwritten)


def _run(function: Any, *arguments: Any) -> int:
    """Call the C code; what is passed to `pack` is kept until it returns."""
    return checked(function(pack(*arguments)))


def checked(code: int) -> int:
    if code == 1:
        raise MemoryError(NO_MEMORY)
    return code


def threads() -> int:
    return 1 if _forked else torch.get_num_threads()


def pack(
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
    near_lse: int = 0,
    grad_lse: int = 0,
) -> bytes:
    """A Job of job.h."""
    (batch, heads, queries, width), (_, key_heads, keys, value_width) = query.shape, value.shape
    q, k, v, o = query.stride(), key.stride(), value.stride(), output.stride()
    return JOB.pack(
        *(batch, heads, key_heads, queries, keys, width, value_width),
        *(TYPES[query.dtype], threads(), *options),
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
        near_lse,
        grad_lse,
    )


def layout_of(x: Tensor) -> tuple[int, int, int, int]:
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


def read_centers(
    form: str,
    mass: Tensor | None,
    query: Tensor,
    key: Tensor,
    center_query: Tensor | None,
    center_key: Tensor | None,
) -> tuple[Tensor, ...]:
    """The centres (1 or B, heads, D) of the decomposed form as floats: given ones, or the place for means in `mass`."""
    if form != "decomposed":
        return ()
    if center_query is not None and center_key is not None:
        return center_query.float().contiguous(), center_key.float().contiguous()
    assert mass is not None
    return mass[:, :, 2], mass[:, :: query.shape[1] // key.shape[1], 3]


def form_layout(form: str, by_means: bool, centers: tuple[Tensor, ...]) -> tuple[int, ...]:
    if not centers:
        return (FORMS[form], by_means and form == "decomposed", *NO_TENSOR, *NO_TENSOR)
    return (FORMS[form], by_means, *(field for x in centers for field in _scale_layout(x)))


def dense(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous()
