"""The mechanisms of this library and softmax attention, under the interface of the zoo."""

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.curves import Matching
from lln.functional import block_diagonal_attention, lln_attention, lln_diag_attention
from lln.masks import blank
from lln.moments import Scope
from lln.nn import Combine, JoinedBranches
from lln.zoo.registry import Mechanism, register
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
class Softmax(Mechanism):
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
        some = allowed.any(dim=-1, keepdim=True)  # SDPA gives NaN where nothing may be seen; here it is zero
        output = scaled_dot_product_attention(query, blank(key, keep), blank(value, keep), attn_mask=allowed | ~some)
        return output.masked_fill(~some, 0.0)


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
class BlockDiagonal(Mechanism):
    """Softmax attention inside blocks of C tokens."""

    def __init__(self, *, num_heads: int, head_dim: int, max_len: int | None = None, block_size: int = 64) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        self.block_size = block_size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        return block_diagonal_attention(
            query, key, value, block_size=self.block_size, key_padding_mask=keep, is_causal=is_causal
        )


@register(
    name="lln",
    title="LLN Attention",
    paper=PAPER,
    year=2023,
    time="N D²",
    memory="N D",
    causal=True,
    padding=True,
    cross=True,
)
class LLN(Mechanism):
    """exp(alpha q) . exp(beta k), normalised, with alpha and beta from moment matching or given."""

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        matching: Matching = "variance",
        scope: Scope = "sample",
        alpha: float | None = None,
        beta: float | None = None,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        self.matching, self.scope, self.alpha, self.beta = matching, scope, alpha, beta

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        return lln_attention(
            query,
            key,
            value,
            key_padding_mask=keep,
            is_causal=is_causal,
            alpha=self.alpha,
            beta=self.beta,
            matching=self.matching,
            scope=self.scope,
        )


@register(
    name="lln_diag",
    title="LLN+Diag Attention",
    paper=PAPER,
    year=2023,
    time="N D (D + C)",
    memory="N (D + C)",
    causal=True,
    padding=True,
    cross=False,
)
class LLNDiag(LLN, JoinedBranches):
    """LLN attention and softmax attention inside blocks of C tokens: their average, or a learned mixture."""

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        block_size: int = 64,
        combine: Combine = "average",
        share: float = 0.5,
        matching: Matching = "variance",
        scope: Scope = "sample",
        alpha: float | None = None,
        beta: float | None = None,
    ) -> None:
        super().__init__(
            num_heads=num_heads,
            head_dim=head_dim,
            max_len=max_len,
            matching=matching,
            scope=scope,
            alpha=alpha,
            beta=beta,
        )
        self.block_size = block_size
        self._prepare_join(combine, share, num_heads, head_dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        masks: dict[str, Any] = {"key_padding_mask": keep, "is_causal": is_causal}
        if self.combine != "average":
            near = block_diagonal_attention(query, key, value, block_size=self.block_size, **masks)
            return self.join(super().attend(query, key, value, keep, is_causal), near)
        return lln_diag_attention(
            query,
            key,
            value,
            block_size=self.block_size,
            alpha=self.alpha,
            beta=self.beta,
            matching=self.matching,
            scope=self.scope,
            **masks,
        )
