"""The mechanisms of this library and softmax attention, under the interface of the zoo."""

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.checks import check_block_size
from lln.functional import block_diagonal_attention
from lln.masks import fill_padding
from lln.nn import LLNAttention, LLNDiagAttention
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import on_kept_tokens

PAPER = "Nahshan, Kampeas, Haleva: Linear Log-Normal Attention with Unbiased Concentration"


@register(
    name="softmax",
    title="Softmax attention",
    paper="Vaswani et al.: Attention Is All You Need",
    year=2017,
    time="N² D",
    memory="N D",
    causal=True,
    padding=True,
    cross=True,
)
class Softmax(PeerMechanism):
    """out = softmax(q . k / sqrt(D)) v, by torch's scaled_dot_product_attention.

    With a causal mask, padding gets zeros.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        if keep is None:
            return scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        if is_causal:  # with the kept tokens in front no mask of pairs is needed

            def mix(query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None) -> Tensor:
                return scaled_dot_product_attention(query, key, value, is_causal=True)

            return on_kept_tokens(mix, query, key, value, keep)
        allowed = keep[:, None, None, :]  # broadcasts: a row for each query would take N x M
        some = allowed.any(dim=-1, keepdim=True)  # SDPA gives NaN where everything is masked; here it is zero
        output = scaled_dot_product_attention(
            query, fill_padding(key, keep), fill_padding(value, keep), attn_mask=allowed | ~some
        )
        return output.masked_fill(~some, 0.0)

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        return {"kind": "softmax"}


@register(
    name="block_diagonal",
    title="Block-diagonal attention",
    paper="Qin et al.: The Devil in Linear Transformer",
    year=2022,
    time="N C D",
    memory="N C",
    causal=True,
    padding=True,
    cross=False,
)
class BlockDiagonal(PeerMechanism):
    """Softmax attention inside blocks of C tokens."""

    def __init__(self, *, num_heads: int, head_dim: int, max_len: int | None = None, block_size: int = 64) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_block_size(block_size)
        self.block_size = block_size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        return block_diagonal_attention(
            query, key, value, block_size=self.block_size, key_padding_mask=keep, is_causal=is_causal
        )

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        return {"kind": "block_diagonal", "block_size": self.block_size}


register(
    name="lln",
    title="LLN Attention",
    paper=PAPER,
    year=2023,
    time="N D²",
    memory="N D",
    causal=True,
    padding=True,
    cross=True,
)(LLNAttention)

register(
    name="lln_diag",
    title="LLN+Diag Attention",
    paper=PAPER,
    year=2023,
    time="N D (D + C)",
    memory="N (D + C)",
    causal=True,
    padding=True,
    cross=False,
)(LLNDiagAttention)
