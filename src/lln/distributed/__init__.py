"""One sequence over several processes, on torch.distributed: traffic does not grow with the length.

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))
    output = lln.distributed.lln_attention(query, key, value, group=mesh["sequence"])     # a part on each process

What LLN attention keeps of a shard of keys is D (Dv + 1) numbers a head, however long the shard. Models are split by
`parallelize`. Start processes with torchrun.
"""

from lln.distributed.functional import (
    beyond_neighbors,
    block_diagonal_attention,
    lln_attention,
    lln_diag_attention,
    near_with_mass_ratio,
)
from lln.distributed.models import parallelize, prefill, split_tokens
from lln.distributed.ranks import MissingRankError, Traffic, record_traffic

__all__ = [
    "MissingRankError",
    "Traffic",
    "beyond_neighbors",
    "block_diagonal_attention",
    "lln_attention",
    "lln_diag_attention",
    "near_with_mass_ratio",
    "parallelize",
    "prefill",
    "record_traffic",
    "split_tokens",
]
