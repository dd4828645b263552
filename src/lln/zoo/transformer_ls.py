"""Transformer-LS (long-short): a window for what is near, a learned summary of all keys for what is far."""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from lln.backends.torch.summary import mask_value
from lln.checks import check_at_least
from lln.masks import fill_padding, kept_tokens
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import (
    Extra,
    check_value_width,
    join_heads,
    on_kept_tokens,
    split_heads,
    window_attention,
)


@register(
    name="transformer_ls",
    title="Transformer-LS",
    paper="Zhu et al.: Long-Short Transformer: Efficient Transformers for Language and Vision",
    year=2021,
    time="N (w + r) D",
    memory="N (w + r)",
    learned="projection H D r, two layer norms of H D features",
    causal=False,
    padding=True,
    cross=False,
    left_outside=(
        "the causal form, which attends to r summaries of each earlier segment, growing with the square of the length; "
        "projection weights from the input of the layer (here from the keys of the head)"
    ),
)
class TransformerLS(PeerMechanism):
    """One softmax over two kinds of keys,

        out_i = softmax(q_i . [K'_S(i), K*] / sqrt(D)) [V'_S(i), V*]
        K' = LN_short(K)    K* = LN_long(Pᵀ K')    P = softmax over tokens of K W      (and the same for V)

    where S(i) is the segment of w tokens that i is in and w / 2 tokens on each side of it, and W (D x r) is learned for
    each head. The layer norms run over the features of all heads, as in the authors' code, and are the same for keys
    and values. Segments count kept tokens. The authors take w = 8 and r = 32 for the Long Range Arena; the defaults
    are that rank, and segments as long as the blocks of the other mechanisms.
    """

    def __init__(
        self, *, num_heads: int, head_dim: int, max_len: int | None = None, segment: int = 64, rank: int = 32
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(1, segment=segment, rank=rank)
        self.segment = segment
        # No bias: it would be the same for all tokens, and cancel in the softmax over tokens.
        self.projection = nn.Parameter(torch.randn(num_heads, head_dim, rank) * head_dim**-0.5)
        self.short_norm = nn.LayerNorm(num_heads * head_dim)
        self.long_norm = nn.LayerNorm(num_heads * head_dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        check_value_width("transformer_ls", value, self.head_dim)
        return on_kept_tokens(self._mix, query, key, value, keep)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None) -> Tensor:
        scores = key @ self.projection.to(key.dtype)
        summary = torch.softmax(fill_padding(scores, kept, mask_value(scores.dtype)), dim=2).mT  # (B, H, r, N)
        key, value = _normalise(key, self.short_norm), _normalise(value, self.short_norm)
        long_key, long_value = (_normalise(summary @ x, self.long_norm) for x in (key, value))
        visible = kept_tokens(kept, query)
        half = max(self.segment // 2, 1)
        return window_attention(
            query,
            key,
            value,
            visible,
            block=self.segment,
            before=half,
            after=half,
            may_attend=lambda i, j: torch.ones_like(i - j, dtype=torch.bool),
            extra=Extra(long_key, long_value, visible.any(dim=1)[:, None, None].expand(-1, -1, summary.shape[2])),
        )


def _normalise(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Layer norm of (B, H, N, D) over the features of all heads, in the dtype of `x` whatever the parameters have."""
    weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    return split_heads(layer_norm(join_heads(x), norm.normalized_shape, weight, bias, norm.eps), x.shape[1])
