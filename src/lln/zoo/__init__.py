"""Every mechanism in the paper's tables and figures under one interface: `build`, `names`, `describe`.

Importing a file enters its mechanisms, in the order of the tables.
"""

from lln.zoo import core  # noqa: F401
from lln.zoo.registry import Mechanism, Record, build, describe, names

__all__ = ["Mechanism", "Record", "build", "describe", "names"]
