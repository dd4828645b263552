"""Linformer: keys and values projected along the tokens to a fixed number of rows."""

import torch
from torch import Tensor, nn

from lln.backends.torch.summary import join_pieces
from lln.checks import check_at_least
from lln.masks import fill_padding, front_order, take_tokens
from lln.matching.moments import chunks
from lln.precision import accumulator
from lln.zoo.registry import PeerMechanism, register

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
    checked_against="linformer 0.2.3 with the same projections",
    needs_max_len=True,
)
class Linformer(PeerMechanism):
    """out = softmax(q (E k)ᵀ / sqrt(D)) (F v) with learned E and F, R x max_len; column j is for the j-th kept token.

    With `share_kv` E and F are the same.
    """

    def __init__(
        self, *, num_heads: int, head_dim: int, max_len: int | None = None, rank: int = RANK, share_kv: bool = False
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        assert max_len is not None  # the registry requires it
        check_at_least(1, rank=rank)
        # Entries of variance 1 / R keep inner products on average: the random projection of the paper's theorem.
        self.project_key = nn.Parameter(torch.randn(rank, max_len) * rank**-0.5)
        if not share_kv:
            self.project_value = nn.Parameter(torch.randn(rank, max_len) * rank**-0.5)
        self.share_kv = share_kv

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        dtype, tokens = accumulator(query.dtype), key.shape[2]
        if keep is not None:
            order = front_order(keep)
            key, value = (take_tokens(fill_padding(x, keep), order) for x in (key, value))

        def rows(projection: Tensor, x: Tensor) -> Tensor:  # (B, H, R, features), piece by piece
            total = torch.zeros((), dtype=dtype, device=x.device)
            for part in chunks(tokens):
                total = total + projection[:, part].to(dtype) @ x[:, :, part].to(dtype)
            return total

        project_value = self.project_key if self.share_kv else self.project_value
        k, v = rows(self.project_key, key) * self.head_dim**-0.5, rows(project_value, value)
        queries = (query[:, :, part].to(dtype) for part in chunks(query.shape[2]))
        parts = ((torch.softmax(q @ k.mT, dim=-1) @ v).to(value.dtype) for q in queries)
        return join_pieces(parts, query, value.shape[3])
