"""Linear Log-Normal attention: linear time and memory, matched to softmax attention by its moments."""

from lln import reference
from lln.functional import (
    attention_matrix,
    block_diagonal_attention,
    lln_attention,
    lln_diag_attention,
    match_moments,
)
from lln.multihead import MultiheadAttention
from lln.nn import LLNAttention, LLNDiagAttention
from lln.state import LLNState

__all__ = [
    "LLNAttention",
    "LLNDiagAttention",
    "LLNState",
    "MultiheadAttention",
    "attention_matrix",
    "block_diagonal_attention",
    "lln_attention",
    "lln_diag_attention",
    "match_moments",
    "reference",
]
