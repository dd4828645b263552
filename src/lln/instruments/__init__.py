"""What attention does: temperature, entropy, spectral gap, log-normality and bias, of a matrix or of query and key.

    entropy(P)                                                    an explicit stochastic matrix (..., N, M)
    entropy(query, key, kind="softmax", key_padding_mask=keep)    (B, H, N, D), and the options of lln.attention_matrix

Every instrument takes both forms and returns tensors over the leading dimensions; from query and key none of them holds
an N x M matrix. docs/instruments.md explains each to an engineer.
"""

from lln.instruments.bias import Concentration, bias, concentration
from lln.instruments.branches import Branches, branches
from lln.instruments.entropy import entropy, variance
from lln.instruments.lognormality import LogNormality, lognormality
from lln.instruments.recorder import Recorder
from lln.instruments.records import read_records, write_table
from lln.instruments.spectral_gap import spectral_gap
from lln.instruments.temperature import temperature

__all__ = [
    "Branches",
    "Concentration",
    "LogNormality",
    "Recorder",
    "bias",
    "branches",
    "concentration",
    "entropy",
    "lognormality",
    "read_records",
    "spectral_gap",
    "temperature",
    "variance",
    "write_table",
]
