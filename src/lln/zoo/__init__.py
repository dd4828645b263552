"""Every mechanism in the paper's tables and figures under one interface: `build`, `names`, `describe`.

Importing a file enters its mechanisms.
"""

from lln.zoo import (  # noqa: F401
    core,
    cosformer,
    feature_maps,
    flash,
    linformer,
    longformer,
    nystrom,
    performer,
    reformer,
    rfa,
    skyformer,
    tnn,
    transformer_ls,
    transnormer,
)
from lln.zoo.registry import Mechanism, Record, build, describe, names

__all__ = ["Mechanism", "Record", "build", "describe", "names"]
