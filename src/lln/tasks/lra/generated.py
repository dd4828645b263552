"""Examples that a generator made are made once: in blocks, on all cores, and kept in the cache.

A block is drawn from its own seed, so the result does not depend on the number of workers. The cache checks what it
holds against its sum, and has what is damaged made again.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lln.tasks.data.folder import cached_file, digest
from lln.tasks.lra.examples import Examples, Sequences
from lln.terminal import Progress

Arrays = dict[str, NDArray[Any]]


def cached_examples(name: str, settings: Mapping[str, Any], make: Callable[[], Examples]) -> Examples:
    """What `make` returns for these settings, from the cache if it is there; of examples with one input each."""
    key = digest([name, json.dumps(settings, sort_keys=True)])[:12]

    def write(path: Path) -> None:
        examples = make()
        (inputs,) = examples.inputs
        with path.open("wb") as file:
            np.savez_compressed(file, symbols=inputs.symbols, starts=inputs.starts, labels=examples.labels)

    with np.load(cached_file(f"lra-{name}-{key}.npz", write)) as stored:
        return Examples((Sequences(stored["symbols"], stored["starts"]),), stored["labels"])


def in_blocks(
    name: str, block: Callable[[int, int], Arrays], count: int, *, size: int, workers: int | None = None
) -> Arrays:
    """The arrays of block(index, how many), joined, for as many blocks as hold `count` examples, made side by side.

    `block` must be picklable: a function of a module, or a partial of one. By default there is a worker for each core.
    """
    jobs = [(index, min(size, count - start)) for index, start in enumerate(range(0, count, size))]
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    blocks: list[Arrays] = []
    with Progress(f"making {name}", len(jobs)) as bar:
        if workers < 2:
            for job in jobs:
                blocks.append(block(*job))
                bar.advance()
        else:
            # Not by fork: it would copy a process in which torch may have started threads.
            with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
                try:
                    # The processes inherit this: Ctrl-C, which reaches all of them, is for this process alone.
                    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                    try:
                        results = pool.map(block, *zip(*jobs, strict=True))
                    finally:
                        signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    for made in results:
                        blocks.append(made)
                        bar.advance()
                except BrokenProcessPool as error:
                    raise RuntimeError(
                        f"a process that was making {name} ended. A script that generates data must do so under "
                        "`if __name__ == '__main__':`, because the processes import it"
                    ) from error
    return {key: np.concatenate([made[key] for made in blocks]) for key in blocks[0]}
