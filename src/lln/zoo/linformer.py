"""Linformer: keys and values projected along the tokens to a fixed number of rows."""

import torch
from torch import Tensor, nn

from lln.masks import blank, front_order, take_tokens
from lln.moments import accumulator
from lln.zoo.registry import Mechanism, register
from lln.zoo.window import check_at_least

# The paper's experiments use 128 and 256 rows for 512 tokens.
RANK = 128


@register(
    name="linformer",
    title="Linformer",
    paper="Wang et al.: Linformer: Self-Attention with Linear Complexity",
    year=2020,
    time="N R D",
    memory="N R",
    learned="two projections of max_len tokens to R rows, shared by the heads",
    causal=False,
    padding=True,
    cross=True,
    random=False,
    checked_against="linformer 0.2.3 with the same projections",
    needs_max_len=True,
)
class Linformer(Mechanism):
    """out = softmax(q (E k)ᵀ / sqrt(D)) (F v) with learned E and F, R x max_len; column j is for the j-th kept token.

    With `share_kv` E and F are the same.
    """

    def __init__(
        self, *, num_heads: int, head_dim: int, max_len: int | None = None, rank: int = RANK, share_kv: bool = False
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        assert max_len is not None  # the registry has asked for it
        check_at_least(1, rank=rank)
        # Entries of variance 1 / R keep inner products on average: the random projection of the paper's theorem.
        self.project_key = nn.Parameter(torch.randn(rank, max_len) * rank**-0.5)
        self.project_value = self.project_key if share_kv else nn.Parameter(torch.randn(rank, max_len) * rank**-0.5)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        dtype, tokens = accumulator(query.dtype), key.shape[2]
        if keep is not None:
            order = front_order(keep)
            key, value = (take_tokens(blank(x, keep), order) for x in (key, value))
        k = self.project_key[:, :tokens].to(dtype) @ key.to(dtype)
        v = self.project_value[:, :tokens].to(dtype) @ value.to(dtype)
        weights = torch.softmax(query.to(dtype) @ k.mT * self.head_dim**-0.5, dim=-1)
        return (weights @ v).to(value.dtype)
