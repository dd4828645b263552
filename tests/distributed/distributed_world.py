"""Several processes that run a list of cases together, so that torch is imported once in each."""

import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by a process of which all others are copies.
PRELOADED = ["lln", "lln.distributed", "transformers", "lln.hf"]


def run_world(size, cases, *arguments, timeout=60.0, together=True):
    """Run `cases(*arguments)`, pairs of a name and a function of the group, in `size` processes.

    Without `together`, processes may end at different times, also without a result. Returns what went wrong,
    {name: {rank: error}}.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
        mp.start_processes(_work, (size, folder, timeout, together, cases, *arguments), size, start_method="forkserver")
        failed = {}
        for rank in range(size):
            found = Path(folder) / f"{rank}.pt"
            assert found.exists() or not together, f"rank {rank} ended early"
            for name, error in torch.load(found).items() if found.exists() else ():
                failed.setdefault(name, {})[rank] = error
    return failed


def report(failed):
    return "\n".join(
        f"{name}: rank {rank}: {error}" for name, ranks in failed.items() for rank, error in sorted(ranks.items())
    )


def _work(rank, size, folder, timeout, together, cases, *arguments):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), size)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    failed = {}
    for name, case in cases(*arguments):
        torch.manual_seed(0)
        try:
            case(dist.group.WORLD)
        except Exception as error:
            failed[name] = "".join(traceback.format_exception(error))[-1500:]
    torch.save(failed, os.path.join(folder, f"{rank}.pt"))
    if not together:
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()
