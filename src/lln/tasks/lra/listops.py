"""ListOps: expressions such as [MAX 2 9 [MIN 4 7 ] 0 ], drawn by the published recipe, and their values.

The recipe (Nangia and Bowman, with the sizes of the Long Range Arena): from depth 1, below depth 10 an operator with
probability 0.25 and otherwise a digit; 2 to 10 arguments; a tree is kept if it has more than 500 and fewer than 2000
symbols, where an operator and its closing bracket count 2. The published files put binary parentheses around every
pair, which add nothing to the brackets: readers here skip them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from lln.tasks.data.lines import read_table
from lln.tasks.lra.examples import Examples, Sequences, Splits
from lln.tasks.lra.generated import Arrays, in_blocks
from lln.tasks.lra.task import Generator, Task

MAX_DEPTH, MAX_ARGUMENTS = 10, 10
OPERATOR_PROBABILITY = 0.25
SHORTER_THAN, LONGER_THAN = 2000, 500
BLOCK = 250
LENGTH = 2000


def _median(values: Sequence[int]) -> int:
    """The median, cut to an integer: of an even number of values the mean of the middle two."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": _median,
    "[SM": lambda values: sum(values) % 10,
}
# The symbols by their numbers: a digit is its own.
SYMBOLS = (*"0123456789", *OPERATORS, "]")
CLOSE = SYMBOLS.index("]")
_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
_FUNCTIONS = tuple(OPERATORS.values())


def encode(expression: str) -> bytes:
    """The symbols of an expression as numbers; parentheses are skipped, all else must be in `SYMBOLS`."""
    return bytes(number for number, _ in _scan(expression))


def decode(symbols: Iterable[int]) -> str:
    return " ".join(SYMBOLS[symbol] for symbol in symbols)


def evaluate(expression: str) -> int:
    """The value of an expression, 0 to 9. A malformed one is a ValueError that names the character, from 1."""
    open_: list[tuple[int, list[int], int]] = []  # operator, values so far, where it stands
    result: int | None = None
    for number, position in _scan(expression):
        if result is not None:
            raise _malformed(position, f"{SYMBOLS[number]!r} follows an expression that is complete")
        if number < 10:
            value = number
        elif number != CLOSE:
            open_.append((number, [], position))
            continue
        elif not open_:
            raise _malformed(position, "']' closes nothing")
        else:
            operator, values, _ = open_.pop()
            if not values:
                raise _malformed(position, f"{SYMBOLS[operator]!r} is closed without an argument")
            value = _FUNCTIONS[operator - 10](values)
        if open_:
            open_[-1][1].append(value)
        else:
            result = value
    if open_:
        operator, _, position = open_[-1]
        raise _malformed(position, f"{SYMBOLS[operator]!r} is never closed")
    if result is None:
        raise _malformed(1, "there is no expression")
    return result


def draw(random: Random) -> tuple[bytes, int]:
    """An expression by the recipe, as numbers, and its value."""
    while True:
        symbols: list[int] = []
        value = _grow(random, 1, symbols)
        if value is not None and LONGER_THAN < len(symbols) < SHORTER_THAN:
            return bytes(symbols), value


def generate(count: int, *, seed: int, workers: int | None = None) -> Examples:
    """So many expressions and their values; fewer of the same seed are the first of them."""
    made = in_blocks("listops", partial(_block, seed), count, size=BLOCK, workers=workers)
    starts = np.concatenate(([0], made["lengths"].cumsum()))
    return Examples((Sequences(made["symbols"], starts),), made["labels"])


def read(folder: Path) -> tuple[str, Splits]:
    files = {"train": "train", "valid": "val", "test": "test"}
    return "published files", {
        split: read_tsv(folder / "listops" / f"basic_{ending}.tsv") for split, ending in files.items()
    }


def read_tsv(path: Path) -> Examples:
    """The published format: a header, then Source<TAB>Target, with or without parentheses."""
    sources, targets = [], []
    for number, row in read_table(path, ("Source", "Target")):
        if row["Target"] not in SYMBOLS[:10]:
            raise ValueError(f"{path}, line {number}: Target is {row['Target']!r}; expected a digit")
        try:
            sources.append(encode(row["Source"]))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        targets.append(int(row["Target"]))
    return Examples((Sequences.of(sources, length=LENGTH),), np.array(targets, dtype=np.int64))


def _scan(expression: str) -> Iterable[tuple[int, int]]:
    """Pairs of a symbol's number and its position in the text, from 1."""
    for found in re.finditer(r"[^\s()]+", expression):
        number = _NUMBERS.get(found.group())
        if number is None:
            raise _malformed(found.start() + 1, f"{found.group()!r} is none of {' '.join(SYMBOLS)}")
        yield number, found.start() + 1


def _malformed(position: int, what: str) -> ValueError:
    return ValueError(f"malformed expression at character {position}: {what}")


def _grow(random: Random, depth: int, symbols: list[int]) -> int | None:
    """Append a tree and return its value, or None once it is too long to be kept."""
    # A lone digit is never kept, so the root is an operator: what is kept is distributed as if it were drawn.
    if depth > 1 and (depth >= MAX_DEPTH or random.random() > OPERATOR_PROBABILITY):
        digit = int(random.random() * 10)
        symbols.append(digit)
        return digit
    operator = int(random.random() * len(_FUNCTIONS))
    symbols.append(10 + operator)
    values = []
    for _ in range(2 + int(random.random() * (MAX_ARGUMENTS - 1))):
        value = _grow(random, depth + 1, symbols)
        if value is None or len(symbols) >= SHORTER_THAN:
            return None
        values.append(value)
    symbols.append(CLOSE)
    return _FUNCTIONS[operator](values)


def _block(seed: int, index: int, count: int) -> Arrays:
    random = Random(f"listops {seed} {index}")
    drawn = [draw(random) for _ in range(count)]
    return {
        "symbols": np.frombuffer(b"".join(symbols for symbols, _ in drawn), dtype=np.uint8),
        "lengths": np.array([len(symbols) for symbols, _ in drawn], dtype=np.int64),
        "labels": np.array([value for _, value in drawn], dtype=np.int64),
    }


TASK = Task(
    name="listops",
    title="ListOps (2k)",
    length=LENGTH,
    symbols=len(SYMBOLS),
    classes=10,
    about="What is the value of a nested expression of lists?",
    presets={
        "laptop": {"steps": 700, "batch_size": 16, "learning_rate": 3e-3, "examples": 12_000},
        "paper": {"batch_size": 32, "learning_rate": 1e-4, "warmup_steps": 1000},
    },
    read=read,
    files="listops/basic_{train,val,test}.tsv",
    published="listops",
    # As many held out as published, whatever there is to train on.
    generator=Generator(generate, examples=96_000, held_out=lambda train: 2000),
    decode=decode,
)
