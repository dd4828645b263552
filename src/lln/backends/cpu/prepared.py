"""Attention as a function of query, key and value alone: the C struct of a problem is packed once, and each call has
addresses. `prepare` is for outputs, `Call` for outputs with gradients.

Shapes: B batch, H heads, N queries, M keys, D features, V value width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lln.backends.base import Prepared, empty_rows
from lln.backends.cpu import binding
from lln.backends.cpu.allocation import as_rows
from lln.backends.cpu.binding import (
    NO_CURVE,
    NO_GRADIENTS,
    SPOILED,
    checked,
    curve_of,
    dense,
    form_layout,
    layout_of,
    threads,
)
from lln.backends.cpu.build import load
from lln.problem import Problem

# Gradients come with few different strides; a program that makes up new ones must not fill the memory.
MAX_LAYOUTS = 8


def prepare(problem: Problem) -> Prepared:
    """The output alone, of tensors that lie in memory as those of the problem do."""
    query, key, value = problem.query, problem.key, problem.value
    keep_query, keep_key, alpha, beta, far, block_size, is_causal, matching, is_window, *rest = binding.settings_of(
        problem
    )
    key_weight, form, center_query, center_key = rest
    keep_query, keep_key = dense(keep_query), dense(keep_key)
    centers = () if center_query is None else binding.read_centers(form, None, query, key, center_query, center_key)
    job = binding.pack(
        *(query, key, value, empty_rows(query, value.shape[3]), keep_query, keep_key, alpha, beta, None, None),
        (is_causal, block_size, far, alpha is None and far, beta is None and far),
        curve_of(query.shape[3], matching, form).fields,
        NO_GRADIENTS,
        is_window,
        key_weight,
        0,
        form_layout(form, center_query is None, centers),
    )
    function, width = load().lln_forward_like, value.shape[3]
    read = (keep_query, keep_key, alpha, beta, key_weight, centers)

    def run(query: Tensor, key: Tensor, value: Tensor, kept: int | None = None, _read: Any = read) -> Tensor:
        output = empty_rows(query, width)
        tensors = (query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr())
        checked(function(job, *tensors, kept, threads()))
        return output

    return run


class Call:
    """Outputs with gradients, of a problem without padding, alpha, beta and weights of keys, and of calls like it."""

    def __init__(self, problem: Problem) -> None:
        (batch, heads, tokens, width), value_width = problem.query.shape, problem.value.shape[3]
        by_means = problem.form == "decomposed" and problem.centers is None
        scales = (batch, heads, tokens if problem.is_causal else 1)
        mass = (batch, heads, 4 if by_means else 2, 0 if problem.is_causal else width)
        values = (batch, heads, mass[3], value_width)
        # what the backward pass needs, in one tensor: `keep_in` of fused.c
        shapes = (mass, values, scales, scales) if problem.far else ((0,),) * 4
        self._shapes, self._sizes = shapes, [math.prod(shape) for shape in shapes]
        self._forward: Any = prepare(problem)
        self._backward = load().lln_backward_like
        self._jobs: dict[tuple[int, ...], bytes] = {}  # of the backward pass, by the strides of the gradient
        self.centers = problem.centers if problem.far else None
        self.near, self.matching, self.form = problem.near, problem.matching, problem.form if problem.far else "paper"
        self.settings = problem.far, problem.block_size, problem.is_causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs in one tensor: `keep_in` of fused.c."""
        kept = query.new_empty(sum(self._sizes), dtype=torch.float32)
        return self._forward(query, key, value, kept.data_ptr()), kept

    def kept(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """alpha, beta, mass and values."""
        mass, values, alpha, beta = (
            x.view(y) for x, y in zip(torch.split(kept, self._sizes), self._shapes, strict=True)
        )
        return alpha, beta, mass, values

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        grad = as_rows(grad)
        grads = (empty_rows(query, query.shape[3]), empty_rows(key, key.shape[3]), empty_rows(value, value.shape[3]))
        job = self._jobs.get(grad.stride())
        if job is None:
            if len(self._jobs) >= MAX_LAYOUTS:
                self._jobs.clear()
            job = self._jobs[grad.stride()] = self._pack(grad, query, key, value, grads)
        addresses = [x.data_ptr() for x in (query, key, value, grad, kept, *grads)]
        if checked(self._backward(job, *addresses, threads())) != SPOILED:
            return grads
        options = (
            *self.settings,
            False,
            self.near == "window",
            None,
            False,
            self.form,
            *(self.centers or (None, None)),
        )
        return binding.backward(grad, query, key, value, None, None, *self.kept(kept), *options)[:3]

    def _pack(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, grads: tuple[Tensor, ...]) -> bytes:
        far, block_size, is_causal = self.settings
        return binding.pack(
            *(query, key, value, grad, None, None, None, None, None, None),
            (is_causal, block_size, far, False, False),
            NO_CURVE,
            (*(field for x in (grad, *grads) for field in layout_of(x)), 0, 0),
            self.near == "window",
            None,
            0,
            form_layout(self.form, self.centers is None, self.centers or ()),
        )
