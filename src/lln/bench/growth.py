"""How time and memory of the linear mechanisms grow, as measured here: `python -m lln.bench.growth`.

Times: the shortest of several forward passes on one thread, short and long inputs in turns, in processor time (of the
system, too, for fresh memory), which is wall time unless other programs take the processor away. Memory: the peak of a
forward pass in a process of its own, without a causal mask.
"""

import argparse
import time

import torch

from lln.bench.measure import peak_memory
from lln.mechanism import Mechanism
from lln.zoo.registry import build, describe, names

HEADS, HEAD_DIM = 2, 64
HEADER = ("name", "time, ms", "growth", "causal time, ms", "growth", "memory, MB", "growth")


def measure(name: str, *, short: int, long: int, repeats: int) -> list[str]:
    """The row of one mechanism: times, causal times and memory at both lengths, and how often the long is the short."""
    attention = build(name, num_heads=HEADS, head_dim=HEAD_DIM, max_len=long).eval()
    times = shortest_times(attention, (short, long), repeats, is_causal=False)
    causal = shortest_times(attention, (short, long), repeats, is_causal=True) if describe(name).causal else None
    memory = [peak_memory(name, tokens=n, heads=HEADS, head_dim=HEAD_DIM) / 2**20 for n in (short, long)]
    return [f"`{name}`", *_growth(times), *(("", "") if causal is None else _growth(causal)), *_growth(memory)]


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lln.bench.growth", description=__doc__)
    parser.add_argument("names", nargs="*", help="mechanisms; all that are linear if none is given")
    parser.add_argument("--short", type=int, default=4096, help="tokens (default %(default)s)")
    parser.add_argument("--long", type=int, default=16384, help="tokens (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="passes at least (default %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for line in (HEADER, ("---",) * len(HEADER)):
        print(f"| {' | '.join(line)} |")
    for name in options.names or [name for name in names() if describe(name).linear]:
        row = measure(name, short=options.short, long=options.long, repeats=options.repeats)
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
