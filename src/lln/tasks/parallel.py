"""Several processes that share each sequence of an experiment."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lln.distributed import parallelize
from lln.tasks.config import TrainConfig
from lln.tasks.run import processes


def share_sequences(model: nn.Module, sharers: int, config: TrainConfig) -> int:
    """Split the tokens of the model over groups of `sharers` processes; returns how many groups there are.

    Raises:
        ValueError: the processes do not divide into such groups, or the batch does not divide into parts for them.
    """
    state: Any = processes()
    batch_size, gradient_accumulation = config.batch_size, config.gradient_accumulation
    if state.num_processes % sharers:
        raise ValueError(
            f"sequence_parallel {sharers} does not divide {state.num_processes} processes; start a multiple of it with "
            "torchrun --nproc-per-node"
        )
    groups = int(state.num_processes // sharers)
    pieces = groups * gradient_accumulation
    if batch_size % pieces:
        parts = f"{groups} groups of {sharers} processes" if sharers > 1 else f"{groups} processes"
        raise ValueError(
            f"batch_size {batch_size} does not divide into {pieces} equal parts, {parts} with {gradient_accumulation} "
            "pieces each"
        )
    if sharers > 1:
        mesh = init_device_mesh(state.device.type, (groups, sharers), mesh_dim_names=("data", "sequence"))
        parallelize(model, mesh["sequence"])
    return groups
