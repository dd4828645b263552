"""What the library is meant to reach on two threads (float32, batch 1, 12 heads of 64), and whether a result does.

Every goal is a number and a bound. Where a goal holds for several lengths the number is that of the worst of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lln.report.speed_styles import attention_label as label
from lln.report.table import Table
from lln.results import Result, Row

# A value and the number of tokens that it was found at, or None if the result does not have it.
Found = tuple[float, int] | None

THREADS, HEADS, HEAD_DIM = 2, 12, 64
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FORWARD, BOTH = PASSES = ("forward", "forward+backward")
LONG = tuple(n for n in LENGTHS if n >= 1024)
MIDDLE = tuple(n for n in LENGTHS if 512 <= n <= 8192)


@dataclass(frozen=True)
class Goal:
    text: str
    bound: float
    at_least: bool
    find: Callable[[Sequence[Row]], Found]
    unit: str = "x"

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Outcome:
    goal: Goal
    found: Found

    @property
    def verdict(self) -> str:
        return "not measured" if self.found is None else "met" if self.goal.met(self.found[0]) else "missed"

    @property
    def value(self) -> str:
        if self.found is None:
            return ""
        value, tokens = self.found
        number = f"{value:.1%}" if self.goal.unit == "%" else f"{value:.3g}x"
        return f"{number} at {tokens:,}"


def _at(lengths: Sequence[int]) -> str:
    if len(lengths) == 1:
        return f"at {lengths[0]:,} tokens"
    return f"at every length from {lengths[0]:,} to {lengths[-1]:,} tokens"


def faster(mechanism: str, than: str, times: float, pass_: str, lengths: Sequence[int]) -> Goal:
    text = f"{label(mechanism)} {pass_} is at least {times:g}x as fast as {label(than)} {_at(lengths)}"
    return Goal(text, times, True, lambda rows: _worst(rows, pass_, "milliseconds", than, mechanism, lengths, min))


def within(mechanism: str, of: str, times: float, pass_: str, lengths: Sequence[int]) -> Goal:
    text = f"{label(mechanism)} {pass_} takes at most {times:g}x the time of {label(of)} {_at(lengths)}"
    return Goal(text, times, False, lambda rows: _worst(rows, pass_, "milliseconds", mechanism, of, lengths, max))


def growth(mechanism: str, quantity: str, noun: str, times: float, pass_: str, short: int, long: int) -> Goal:
    text = f"{label(mechanism)} {pass_} needs at most {times:g}x the {noun} at {long:,} tokens of that at {short:,}"
    return Goal(text, times, False, lambda rows: _growth(rows, pass_, quantity, mechanism, short, long))


def extra_memory(mechanism: str, share: float, tokens: int) -> Goal:
    inputs = 3 * HEADS * tokens * HEAD_DIM * 4

    def find(rows: Sequence[Row]) -> Found:
        extra = _value(rows, BOTH, "extra_bytes", mechanism, tokens)
        return None if extra is None else (extra / inputs, tokens)

    text = (
        f"{label(mechanism)} {BOTH} needs, beyond inputs, output and gradients, at most {share:.0%} of the inputs' "
        f"memory {_at((tokens,))}"
    )
    return Goal(text, share, False, find, "%")


def decode_growth(mechanism: str, quantity: str, noun: str, times: float, short: int, long: int) -> Goal:
    text = (
        f"a decode step of {label(mechanism)} after {long:,} tokens needs at most {times:g}x the {noun} after {short:,}"
    )
    return Goal(text, times, False, lambda rows: _growth(rows, None, quantity, mechanism, short, long))


ATTENTION_GOALS = (
    *(
        faster("lln", "softmax", times, FORWARD, (tokens,))
        for tokens, times in ((128, 2), (256, 3), (1024, 10), (4096, 40), (8192, 80))
    ),
    faster("lln", "paper", 3, FORWARD, MIDDLE),
    within("lln", "floor", 1.5, FORWARD, LONG),
    *(faster("lln", "softmax", times, BOTH, (tokens,)) for tokens, times in ((256, 2), (1024, 10), (4096, 40))),
    faster("lln", "paper", 2.5, BOTH, MIDDLE),
    *(within("lln_diag", "lln", 2.1, pass_, LENGTHS) for pass_ in PASSES),
    extra_memory("lln", 0.1, 8192),
    *(growth("lln", "milliseconds", "time", 2.15, pass_, 8192, 16384) for pass_ in PASSES),
    *(growth("lln", "peak_bytes", "memory", 2.05, pass_, 8192, 16384) for pass_ in PASSES),
    faster("lln_torch", "paper", 1.3, BOTH, MIDDLE),
)
DECODE_GOALS = tuple(
    decode_growth(mechanism, quantity, noun, 1.05, 1024, 131072)
    for mechanism in ("lln", "lln_diag")
    for quantity, noun in (("milliseconds", "time"), ("total_bytes", "memory"))
)


def check(goals: Sequence[Goal], result: Result) -> list[Outcome]:
    """Every goal with what a result has; a ValueError if it was measured in another setting than the goals'."""
    wanted = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    setting, threads = {"causal": False} | dict(result.settings), result.origin["threads"]
    other = [f"{key} {setting.get(key)}" for key, value in wanted.items() if setting.get(key) != value]
    other += ["causal"] * setting["causal"] + [f"{threads} threads"] * (threads != THREADS)
    if other:
        raise ValueError(
            "the goals are for 12 heads of 64, float32, not causal, on 2 threads; this was measured with "
            + ", ".join(other)
        )
    return [Outcome(goal, goal.find(result.rows)) for goal in goals]


def goals_table(outcomes: Sequence[Outcome]) -> Table:
    rows = [[outcome.goal.text, outcome.value, outcome.verdict] for outcome in outcomes]
    return Table("Two threads, float32, batch 1, 12 heads of 64", ["goal", "measured", ""], rows)


def _worst(
    rows: Sequence[Row],
    pass_: str,
    quantity: str,
    numerator: str,
    denominator: str,
    lengths: Sequence[int],
    worst: Callable[..., tuple[float, int]],
) -> Found:
    found = []
    for tokens in lengths:
        over, under = (_value(rows, pass_, quantity, name, tokens) for name in (numerator, denominator))
        if over is None or not under:
            return None
        found.append((over / under, tokens))
    return worst(found)


def _growth(rows: Sequence[Row], pass_: str | None, quantity: str, mechanism: str, short: int, long: int) -> Found:
    over, under = (_value(rows, pass_, quantity, mechanism, tokens) for tokens in (long, short))
    return None if over is None or not under else (over / under, long)


def _value(rows: Sequence[Row], pass_: str | None, quantity: str, mechanism: str, tokens: int) -> float | None:
    """The value in one row, if it was measured; rows of decoding have no pass."""
    for row in rows:
        if (row.get("pass"), row["mechanism"], row["tokens"]) == (pass_, mechanism, tokens):
            return row.get(quantity)
    return None
