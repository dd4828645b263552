"""`lln bench attention`: time and peak memory of attention side by side, over sequence lengths."""

import math
import os
from collections.abc import Iterator, Sequence

import torch

from lln import backends
from lln.bench import candidates
from lln.bench.candidates import MECHANISMS, CannotRunError, Setting
from lln.bench.measure import free_bytes, predict, time_in_turns
from lln.bench.new_process import in_new_process
from lln.bench.peak import SMALL, Call, peak_of_call
from lln.results import Row

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PASSES = ("forward", "forward+backward")
FREE_SHARE = 0.8  # of the free memory that matrices may take


def compare_attention(
    lengths: Sequence[int] = LENGTHS,
    mechanisms: Sequence[str] = MECHANISMS,
    setting: Setting | None = None,
    *,
    passes: Sequence[str] = PASSES[:1],
    seconds: float = 1.0,
    max_seconds: float = math.inf,
    seed: int = 0,
    done: Sequence[Row] = (),
) -> Iterator[Row]:
    """A row for each pass, length and mechanism; all mechanisms of a length are timed in the same rounds.

    `ratio` is the first mechanism's time over a row's own. A mechanism that cannot run, would not fit into memory or
    would take more than `max_seconds` for a call gives a row with the reason as `skipped` and, where its growth
    was measured, `predicted_milliseconds`. Rows of `done` were measured before: lengths that are complete there are
    left out. Each mechanism gets those options of the `setting` that it has.
    """
    setting = setting or Setting()
    candidates.check_names(mechanisms, setting)
    measured = list(done)
    for pass_ in passes:
        for tokens in sorted(lengths):
            here = {row["mechanism"] for row in measured if (row["pass"], row["tokens"]) == (pass_, tokens)}
            if here >= set(mechanisms):
                continue
            torch.manual_seed(seed)
            for row in _compare_at(
                tokens, pass_, mechanisms, setting, seconds=seconds, max_seconds=max_seconds, measured=measured
            ):
                measured.append(row)
                yield row


def kernel_in_use(setting: Setting) -> dict[str, str | None]:
    """What computes LLN attention here: the environment variable, and what `lln.backends.explain` returns."""
    explained = backends.explain(*candidates.random_inputs(setting, SMALL), is_causal=setting.causal)
    return {"LLN_BACKEND": os.environ.get("LLN_BACKEND"), "explained": explained}


def _compare_at(
    tokens: int,
    pass_: str,
    mechanisms: Sequence[str],
    setting: Setting,
    *,
    seconds: float,
    max_seconds: float,
    measured: Sequence[Row],
) -> Iterator[Row]:
    backward = pass_ == PASSES[1]
    inputs = candidates.random_inputs(setting, tokens)
    calls: dict[str, Call] = {}
    skipped: dict[str, Row] = {}
    for name in mechanisms:
        before = [
            row for row in measured if (row["pass"], row["mechanism"]) == (pass_, name) and row["tokens"] < tokens
        ]
        reason = _reason_to_skip(name, setting, tokens, before, backward=backward, max_seconds=max_seconds)
        if reason is not None:
            skipped[name] = reason
            continue
        try:
            candidates.OwnInputs(name, setting, backward)(SMALL).run()
            calls[name] = candidates.make_call(name, setting, inputs, backward=backward)
        except (CannotRunError, RuntimeError, ValueError, DeprecationWarning) as error:  # the last: fla raises it
            skipped[name] = {"skipped": f"cannot run: {error}"}
    timings = time_in_turns({name: call.run for name, call in calls.items()}, seconds=seconds) if calls else {}
    first = timings.get(mechanisms[0])
    for name in mechanisms:
        row: Row = {"pass": pass_, "tokens": tokens, "mechanism": name}
        if name in skipped:
            yield row | skipped[name]
            continue
        timing = timings[name]
        peak = in_new_process(peak_of_call, candidates.OwnInputs(name, setting, backward), tokens)
        yield (
            row
            | timing.row()
            | {
                "ratio": None if first is None else first.median / timing.median,
                "peak_bytes": peak.peak_bytes,
                "extra_bytes": peak.extra_bytes,
            }
        )


def _free_bytes(setting: Setting) -> int:
    free: int = torch.cuda.mem_get_info()[0] if setting.device == "cuda" else free_bytes()
    return free


def _reason_to_skip(
    name: str, setting: Setting, tokens: int, before: Sequence[Row], *, backward: bool, max_seconds: float
) -> Row | None:
    """Why a mechanism is not measured, from what is known of shorter lengths."""
    measured = [row for row in before if "milliseconds" in row]
    lengths, times = [row["tokens"] for row in measured], [row["milliseconds"] for row in measured]
    prediction = (
        predict(lengths, times, tokens, quadratic=candidates.quadratic(name)) if math.isfinite(max_seconds) else None
    )
    predicted = {} if prediction is None else {"predicted_milliseconds": prediction}
    needed, free = candidates.matrix_bytes(name, setting, tokens, backward=backward), _free_bytes(setting)
    if needed > FREE_SHARE * free:
        reason = f"its matrices would take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        return {"skipped": reason} | predicted
    if prediction is not None and prediction > max_seconds * 1e3:
        return {
            "skipped": f"a call would take about {prediction / 1e3:.0f} s, over the limit of {max_seconds:g} s"
        } | predicted
    return None
