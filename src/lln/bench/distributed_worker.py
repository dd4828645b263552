"""One process of `lln bench distributed`: times attention to a sequence over all of them; rank 0 prints JSON lines.

Started by `lln.bench.distributed` with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the settings in its environment.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import lln
from lln import distributed
from lln.bench.measure import peak_bytes, reset_peak

SOFTMAX_TOKENS = 2048  # enough for the quadratic part to be nearly all of its time
# Of the turns: other programs only add to times.
LEAST_OR_MOST: dict[str, Callable[[Iterable[float]], float]] = {
    "seconds": min,
    "cpu_seconds": min,
    "messages": max,
    "sent_bytes": max,
    "wire_bytes": min,
    "peak_bytes": max,
}


def main() -> None:
    settings = json.loads(os.environ["LLN_BENCH"])
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    # In turns, so that what slows one length slows the others.
    turns = [[_measure(tokens, settings, size) for tokens in settings["tokens"]] for _ in range(settings["repeats"])]
    for tokens, found in zip(settings["tokens"], zip(*turns, strict=True), strict=True):
        row = _slowest({name: LEAST_OR_MOST[name](x[name] for x in found) for name in LEAST_OR_MOST}, size)
        if int(os.environ["RANK"]) == 0:
            print(json.dumps({"tokens": tokens, "processes": size} | row), flush=True)
    if size > 1:
        dist.destroy_process_group()
    elif settings["softmax"]:
        print(json.dumps({"softmax_seconds": _softmax(settings), "tokens": SOFTMAX_TOKENS}), flush=True)


def _measure(tokens: int, settings: dict[str, Any], size: int) -> dict[str, float]:
    """One turn of this process: seconds, seconds on a processor, what it sends, and its peak memory."""
    rank = int(os.environ["RANK"])
    part = tokens // size + (rank < tokens % size)
    reset_peak()
    before = peak_bytes()
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, settings["heads"], part, settings["width"]).requires_grad_() for _ in range(3))
    slope = torch.randn_like(v)
    wait_for_all(size)
    wire, began, worked = _wire_bytes(), time.perf_counter(), time.process_time()
    with distributed.record_traffic() as traffic:
        name = f"{settings['attention']}_attention"
        if size > 1:
            output = getattr(distributed, name)(q, k, v, group=dist.group.WORLD)
        else:
            output = getattr(lln, name)(q, k, v)
        torch.autograd.grad(output, (q, k, v), slope)
    worked = time.process_time() - worked
    wait_for_all(size)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": worked,
        "messages": traffic.messages,
        "sent_bytes": traffic.sent_bytes,
        "wire_bytes": _wire_bytes() - wire,
        "peak_bytes": peak_bytes() - before,
    }


def _slowest(row: dict[str, float], size: int) -> dict[str, float]:
    """What the process that has most of it has."""
    numbers = torch.tensor(list(row.values()), dtype=torch.float64)
    if size > 1:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return dict(zip(row, numbers.tolist(), strict=True))


def wait_for_all(size: int) -> None:
    if size > 1:
        dist.barrier()


def _wire_bytes() -> int:
    """Bytes that this network namespace has sent, headers included; 0 where it is shared with other programs."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if device == "lo":
        return 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise OSError(f"there is no network device {device}")


def _softmax(settings: dict[str, Any]) -> float:
    q, k, v = (torch.randn(1, settings["heads"], SOFTMAX_TOKENS, settings["width"]).requires_grad_() for _ in range(3))
    seconds = []
    for _ in range(3):
        began = time.process_time()
        torch.autograd.grad(scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
        seconds.append(time.process_time() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
