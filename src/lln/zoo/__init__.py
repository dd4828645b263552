"""Every mechanism in the paper's tables and figures, and later ones, under one interface: `build`, `names`, `describe`.

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

# isort: split
# Later than the paper's own, so that they are listed after these.
from lln.mechanism import Mechanism
from lln.zoo import based, delta, gla, hedgehog, hybrid, retention, t2r  # noqa: F401
from lln.zoo.registry import Description, PeerMechanism, build, describe, names

__all__ = ["Description", "Mechanism", "PeerMechanism", "build", "describe", "names"]
