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


def run_world(size, cases, *arguments, timeout=60.0):
    """Run `cases(*arguments)`, pairs of a name and a function of the group, in `size` processes.

    Returns what went wrong, {name: {rank: error}}.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.get_context("forkserver").set_forkserver_preload(["lln", "lln.distributed"])  # imports torch once for all
        mp.start_processes(_work, (size, folder, timeout, cases, *arguments), size, start_method="forkserver")
        failed = {}
        for rank in range(size):
            for name, error in torch.load(Path(folder) / f"{rank}.pt").items():
                failed.setdefault(name, {})[rank] = error
    return failed


def report(failed):
    return "\n".join(
        f"{name}: rank {rank}: {error}" for name, ranks in failed.items() for rank, error in sorted(ranks.items())
    )


def _work(rank, size, folder, timeout, cases, *arguments):
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
    dist.barrier()
    dist.destroy_process_group()
