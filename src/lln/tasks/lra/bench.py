"""`lln bench lra`: what a training step costs on each task at the published length, the paper's table 4.

Time: all methods in turns in one process, forward, backward and optimiser, on full-length inputs without padding.
Memory: one step in a new process for each method, the peak over what the process held before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lln.bench.measure import peak_bytes, reset_peak, time_in_turns
from lln.bench.new_process import in_new_process
from lln.tasks.lra.config import OPTIONS
from lln.tasks.lra.model import Classifier, Shape, build_attention
from lln.tasks.lra.registry import TASKS, task_named
from lln.zoo.registry import check_shared_options, options_of

METHODS = (
    "softmax_explicit",
    "softmax",
    "reformer",
    "performer",
    "skyformer",
    "nystrom",
    "lln",
    "lln_diag",
)
TOKENS = 8192  # in a step: what the explicit matrices at 4,000 tokens leave memory for


def batch_size(task: str) -> int:
    """So many examples that a step has about `TOKENS` tokens."""
    shape = task_named(task)
    return max(1, TOKENS // (shape.length * shape.towers))


def training_step(
    task: str, method: str, *, length: int, batch: int, options: Mapping[str, Any], seed: int = 0
) -> Callable[[], None]:
    """A model, its optimiser and a batch of random tokens; each call is one step on it."""
    shape = task_named(task)
    torch.manual_seed(seed)
    model = Classifier(shape, method, options=options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    tokens = torch.randint(1, shape.vocabulary, (batch, shape.towers, length))
    labels = torch.randint(shape.classes, (batch,))

    def step() -> None:
        optimiser.zero_grad()
        model(tokens, labels)["loss"].backward()
        optimiser.step()

    return step


def compare(
    tasks: Sequence[str] = tuple(TASKS),
    methods: Sequence[str] = METHODS,
    *,
    seconds: float = 30.0,
    at_least: int = 5,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each task and method; ratios are the first method's cost over its own.

    The methods of a task are timed in rounds, for `seconds` and `at_least` so many. `options` are those of `lln.zoo`;
    each method gets the ones that it has, in place of those of the comparison.
    """
    if not methods:
        raise ValueError("name at least one method")
    check_shared_options(methods, options or {})
    own = {name: OPTIONS.get(name, {}) | options_of(name, options or {}) for name in methods}
    for task in tasks:  # refuses an unknown name before anything is measured
        for name in methods:
            build_attention(name, shape=Shape(), max_len=task_named(task).length, **own[name])
    for task in tasks:
        length, batch = task_named(task).length, batch_size(task)
        sizes: dict[str, Any] = {"length": length, "batch": batch, "seed": seed}
        steps = {name: training_step(task, name, options=own[name], **sizes) for name in methods}
        timings = time_in_turns(steps, seconds=seconds, at_least=at_least)
        del steps
        peaks = {name: peak_memory(task, name, options=own[name], **sizes) for name in methods}
        for name, timing in timings.items():
            yield {
                "task": task,
                "method": name,
                "options": own[name],
                "length": length,
                "batch": batch,
                **timing.row(),
                "time_ratio": timings[methods[0]].median / timing.median,
                "peak_bytes": peaks[name],
                "memory_ratio": peaks[methods[0]] / peaks[name],
            }


def peak_memory(task: str, method: str, *, length: int, batch: int, options: Mapping[str, Any], seed: int = 0) -> int:
    """Peak bytes of a training step, beyond the process, the model and the libraries that it has loaded."""
    return in_new_process(_peak, task, method, length, batch, options, seed)


def _peak(task: str, method: str, length: int, batch: int, options: Mapping[str, Any], seed: int) -> int:
    given: dict[str, Any] = {"options": options, "seed": seed}
    training_step(task, method, length=64, batch=1, **given)()  # loads what is loaded at first use
    step = training_step(task, method, length=length, batch=batch, **given)
    reset_peak()
    before = peak_bytes()
    step()
    return peak_bytes() - before
