"""`lln bench model`: time and memory of one training step of RoBERTa-base over sequence lengths, as in table 2.

A step is forward, loss, backward and AdamW on a batch of one sequence, of which 15 % of the tokens are to be predicted;
as in the paper's framework the language model head gets these alone. Weights are random. Dropout is 0.1 as published,
but none of attention weights: linear attention has none to drop, and SDPA would make them explicit for it.
Each step runs in a process of its own; mechanisms take turns.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lln.bench.measure import free_bytes, predict, timing
from lln.bench.new_process import in_new_process
from lln.results import Row
from lln.zoo.registry import check_shared_options

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MECHANISMS = ("eager", "sdpa", "nystrom", "lln", "lln_diag")
QUADRATIC_TIME, QUADRATIC_MEMORY = {"eager", "sdpa"}, {"eager"}
MOST_ROUNDS = 3
PRELOAD = ("transformers.models.roberta.modeling_roberta",)
FREE_SHARE = 0.9  # of the free memory that a step may take


@dataclass(frozen=True)
class ModelSetting:
    """The sizes of RoBERTa-base, and options of its attention."""

    layers: int = 12
    hidden_size: int = 768
    heads: int = 12
    vocabulary: int = 50265
    block_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)  # of the zoo, for the mechanisms that have them


ROBERTA_BASE = ModelSetting()


def compare_training(
    lengths: Sequence[int] = LENGTHS,
    mechanisms: Sequence[str] = MECHANISMS,
    *,
    setting: ModelSetting = ROBERTA_BASE,
    seconds: float = 60.0,
    max_seconds: float = 40.0,
    seed: int = 0,
    done: Sequence[Row] = (),
) -> Iterator[Row]:
    """A row for each length and mechanism: seconds of a step and peak bytes of model, optimiser and activations.

    Rounds, in which each mechanism makes one step, go on for `seconds`, but there are at least one and at most three.
    What would not fit into memory or take more than `max_seconds` is not run: its row has the reason as `skipped`,
    and `predicted_seconds` and `predicted_peak_bytes`. Lengths that are complete in `done` are left out.
    """
    from lln.bench.step import training_step  # it needs transformers

    for name in mechanisms:
        if name not in MECHANISMS:
            raise ValueError(f"no attention of this comparison is called {name!r}; there are: {', '.join(MECHANISMS)}")
    check_shared_options(mechanisms, setting.options)
    measured = list(done)
    for tokens in sorted(lengths):
        if {row["mechanism"] for row in measured if row["tokens"] == tokens} >= set(mechanisms):
            continue
        skipped = {
            name: reason
            for name in mechanisms
            if (
                reason := _reason_to_skip(
                    name, tokens, [row for row in measured if row["mechanism"] == name], max_seconds
                )
            )
        }
        steps: dict[str, list[tuple[float, int]]] = {name: [] for name in mechanisms if name not in skipped}
        started = time.perf_counter()
        for round_ in range(MOST_ROUNDS):
            if round_ > 0 and time.perf_counter() - started > seconds:
                break
            for name in list(steps):
                job = (name, tokens, setting, seed)
                try:
                    steps[name].append(in_new_process(training_step, *job, free_bytes(), preload=PRELOAD))
                except MemoryError:
                    del steps[name]
                    skipped[name] = {"skipped": "did not fit into memory"}
        for name in mechanisms:
            row: Row = {"tokens": tokens, "mechanism": name} | (skipped.get(name) or _measured(steps[name]))
            measured.append(row)
            yield row


def _measured(steps: Sequence[tuple[float, int]]) -> Row:
    times = timing([seconds for seconds, _ in steps])
    return {
        "seconds": times.median,
        "quartiles": [times.low, times.high],
        "repeats": times.repeats,
        "peak_bytes": int(median(peak for _, peak in steps)),
    }


def _reason_to_skip(name: str, tokens: int, rows: Sequence[Row], max_seconds: float) -> Row | None:
    """Why a step is not run, from what is known of shorter sequences."""
    measured = [row for row in rows if "seconds" in row and row["tokens"] < tokens]
    lengths = [row["tokens"] for row in measured]
    seconds = predict(lengths, [row["seconds"] for row in measured], tokens, quadratic=name in QUADRATIC_TIME)
    peak = predict(lengths, [row["peak_bytes"] for row in measured], tokens, quadratic=name in QUADRATIC_MEMORY)
    if seconds is None or peak is None:
        return None
    predicted = {"predicted_seconds": seconds, "predicted_peak_bytes": peak}
    free = free_bytes()
    if peak > FREE_SHARE * free:
        return {"skipped": f"would take {peak / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"} | predicted
    if seconds > max_seconds:
        return {"skipped": f"would take {seconds:.0f} s, over the limit of {max_seconds:g} s"} | predicted
    return None
