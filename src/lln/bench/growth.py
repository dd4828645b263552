"""How time and memory of the linear mechanisms grow, as measured here: `lln bench growth`.

Times: the shortest of several forward passes on one thread, short and long inputs in turns, in processor time (of the
system, too, for fresh memory), which is wall time unless other programs take the processor away. Memory: the peak of a
forward pass in a process of its own, without a causal mask.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lln.bench.measure import peak_memory
from lln.mechanism import Mechanism
from lln.zoo.registry import build, check_shared_options, describe, options_of

HEADS, HEAD_DIM = 2, 64
COLUMNS = ("name", "time, ms", "growth", "causal time, ms", "growth", "memory, MB", "growth")


def compare_growth(
    mechanisms: Sequence[str], options: Mapping[str, Any], *, short: int, long: int, repeats: int
) -> Iterator[list[str]]:
    """The cells of each mechanism, in the order of `COLUMNS`, measured on one thread.

    Each mechanism gets those of the `options` that it has.
    """
    check_shared_options(mechanisms, options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in mechanisms:
            yield measure(name, options_of(name, options), short=short, long=long, repeats=repeats)
    finally:
        torch.set_num_threads(threads)


def measure(name: str, options: Mapping[str, Any], *, short: int, long: int, repeats: int) -> list[str]:
    """The cells of one mechanism: times, causal times and memory at both lengths, and their ratios."""
    attention = build(name, num_heads=HEADS, head_dim=HEAD_DIM, max_len=long, **options).eval()
    times = shortest_times(attention, (short, long), repeats, is_causal=False)
    causal = shortest_times(attention, (short, long), repeats, is_causal=True) if describe(name).causal else None
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM}
    memory = [peak_memory(name, tokens=n, options=options, **sizes) / 2**20 for n in (short, long)]
    return [name, *_growth(times), *(("", "") if causal is None else _growth(causal)), *_growth(memory)]


@torch.no_grad()
def shortest_times(attention: Mechanism, lengths: tuple[int, ...], repeats: int, *, is_causal: bool) -> list[float]:
    """Milliseconds of the shortest forward pass at each length, after one that is not counted.

    Passes go on for a second, and until there are `repeats` of them.
    """
    inputs = [torch.randn(3, 1, attention.num_heads, n, attention.head_dim).unbind() for n in lengths]
    shortest = [float("inf")] * len(lengths)
    started = time.perf_counter()
    repeat = 0
    while repeat <= repeats or time.perf_counter() - started < 1.0:
        for i, qkv in enumerate(inputs):
            before = time.process_time()
            attention(*qkv, is_causal=is_causal)
            taken = 1e3 * (time.process_time() - before)
            if repeat > 0:
                shortest[i] = min(shortest[i], taken)
        repeat += 1
    return shortest


def _growth(pair: list[float]) -> tuple[str, str]:
    short, long = pair
    return f"{short:.1f} → {long:.1f}", f"{long / short:.2f}"
