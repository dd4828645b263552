"""`lln bench distributed`: one layer of LLN attention to a sequence over several processes.

Forward and backward together. Networks are network namespaces of Linux, see `lln.bench.network`. What follows for more
processes is in `lln.report.distributed`.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lln.bench import network as shaped
from lln.results import Row

PROCESSES, TOKENS = (1, 2, 4), (16_384, 65_536)


@dataclass(frozen=True)
class Network:
    """Bandwidth of each process in megabits a second, and delay of a message in milliseconds; None: this machine."""

    name: str
    megabits: float | None = None
    delay: float = 0.0


NETWORKS = (Network("machine"), Network("1 Gbit/s, 0.2 ms", 1000, 0.2), Network("100 Mbit/s, 5 ms", 100, 5.0))


def measure(
    network: Network,
    processes: int,
    tokens: Sequence[int],
    *,
    heads: int,
    width: int,
    attention: str = "lln",
    repeats: int = 7,
    softmax: bool = False,
) -> Iterator[Row]:
    """A row for each number of tokens; with `softmax` and one process also one of softmax attention.

    `attention` is "lln" or "lln_diag", with blocks of 64 tokens.
    """
    settings = {"tokens": list(tokens), "heads": heads, "width": width, "repeats": repeats, "softmax": softmax}
    settings["attention"] = attention
    with ExitStack() as stack:
        if network.megabits is None:
            prefixes: list[list[str]] = [[] for _ in range(processes)]
            address, device = "127.0.0.1", "lo"
        else:
            limits = {"megabits": network.megabits, "delay": network.delay}
            prefixes = stack.enter_context(shaped.namespaces(processes, **limits))
            address, device = shaped.address(0), shaped.DEVICE
        common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": address, "MASTER_PORT": str(_free_port())}
        common |= {"LLN_BENCH": json.dumps(settings), "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "lln.bench.distributed_worker"]
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*prefix, *command],
                    env=os.environ | common | {"RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank, prefix in enumerate(prefixes)
        ]
        outputs = [process.communicate()[0] for process in started]
    failed = [rank for rank, process in enumerate(started) if process.returncode]
    if failed:
        raise ChildProcessError(f"rank {failed[0]} of {processes} failed in the network {network.name!r}; see above")
    for line in outputs[0].splitlines():
        origin = {"network": network.name, "megabits": network.megabits, "delay": network.delay, "heads": heads}
        origin["attention"] = attention
        yield origin | json.loads(line)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def jobs(*, networks: bool, million: bool, heads: int, head_dim: int) -> list[tuple[Network, int, dict[str, Any]]]:
    """What to measure: networks, numbers of processes, and the arguments of `measure`."""
    sizes: dict[str, Any] = {"heads": heads, "width": head_dim}
    found: list[tuple[Network, int, dict[str, Any]]] = [
        (NETWORKS[0], size, sizes | {"tokens": TOKENS, "softmax": True}) for size in PROCESSES
    ]
    if networks:
        found += [(net, size, sizes | {"tokens": TOKENS[:1]}) for net in NETWORKS[1:] for size in PROCESSES[1:]]
    if million:
        one = sizes | {"heads": 1, "tokens": (2**20,), "repeats": 1}
        found += [
            (NETWORKS[0], size, one | {"attention": attention})
            for attention in ("lln", "lln_diag")
            for size in (1, PROCESSES[-1])
        ]
    return found


def is_measured(row: Row, network: Network, processes: int, arguments: dict[str, Any]) -> bool:
    attention = arguments.get("attention", "lln")
    expected = (network.name, processes, arguments["heads"], attention)
    found = (row["network"], row.get("processes"), row.get("heads"), row.get("attention", "lln"))
    return found == expected and row["tokens"] in arguments["tokens"]
