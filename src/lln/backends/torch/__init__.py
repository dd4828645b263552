"""Plain torch, linear in the number of tokens, on any device.

Everything rests on the two-softmax form of eq. 9. With a = alpha q, b = beta k and the log-mass of each feature
L_l = logsumexp_j b_jl over the keys,

    A = softmax over features of (a + L)      B = softmax over keys of b      out = A (Bᵀ V)

No epsilon is needed and nothing overflows, however long the sequence. Tokens pass through in pieces, so that beside
inputs, output and gradients only a piece's worth is in memory; the backward pass computes A and B again.

Full attention is in `full`, causal attention in `causal`, softmax attention among neighbours in `blocks` and `window`,
what is kept of the keys in `summary`, and the next tokens of a state in `advance`.
"""

from typing import Any

from torch import Tensor

from lln.backends.base import Backend
from lln.backends.torch.advance import advance
from lln.backends.torch.blocks import block_diagonal_attention
from lln.backends.torch.causal import causal_attention
from lln.backends.torch.full import full_attention
from lln.backends.torch.recompute import Tensors
from lln.backends.torch.summary import empty_summary
from lln.backends.torch.window import window_attention
from lln.forms import in_paper_form
from lln.masks import zero_nonfinite_padding
from lln.problem import Problem
from lln.recurrence import Advance, Recurrence


class TorchBackend(Backend):
    """Any device, dtype and width; also what records, transforms or differentiates twice."""

    name = "torch"
    has_lse = True

    def why_not(self, problem: Problem) -> str | None:
        return None

    def far(self, problem: Problem) -> Tensor:
        problem = in_paper_form(problem)
        alpha, beta = (x[..., None] for x in problem.scales())
        query = zero_nonfinite_padding(problem.query, problem.queries.keep)
        tokens = (query, problem.key, problem.value, alpha, beta, problem.keys.keep)
        if not problem.is_causal:
            return full_attention(*tokens, problem.key_weight)
        batch, heads, _, head_dim = query.shape
        summary = empty_summary(batch, heads, head_dim, problem.value.shape[3], like=query)
        return causal_attention(*tokens, summary, problem.key_weight)[0]

    def near(self, problem: Problem) -> Tensor:
        return _near(problem, with_lse=False)[0]

    def near_with_lse(self, problem: Problem) -> tuple[Tensor, Tensor]:
        output, lse = _near(problem, with_lse=True)
        return output.to(problem.query.dtype), lse[..., 0]

    def average(self, problem: Problem) -> Tensor:
        far = self.far(problem)  # in place: at a million tokens each copy counts
        return far.add_(self.near(problem)).mul_(0.5)

    def why_not_advance(self, recurrence: Recurrence) -> str | None:
        return None

    def advance(self, recurrence: Recurrence) -> Advance:
        return advance(recurrence)


def _near(problem: Problem, *, with_lse: bool) -> Tensors:
    attention = window_attention if problem.near == "window" else block_diagonal_attention
    tokens = (problem.query, problem.key, problem.value, problem.keys.keep)
    options: Any = {"block_size": problem.block_size, "is_causal": problem.is_causal}
    return attention(*tokens, **options, with_lse=with_lse)
