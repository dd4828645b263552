"""TransNormer: softmax or rectified attention in blocks for the first layers, normalised linear attention for the rest.

The published model has `layer="diag"` in the first half of its layers and `layer="linear"` in the other half. Facts
from the authors' code (OpenNLPLab/lra: transnormer.yaml, norm_local_attention.py; Transnormer: script_lra.py):

    variant   diag: weights in a block of 64       linear: feature map
    T1        relu(q . k / sqrt(D)), then norm     elu(x)
    T2        softmax(q . k / sqrt(D)), no norm    1 + elu(x)
"""

from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, layer_norm

from lln.checks import check_at_least, check_choice
from lln.functional import block_diagonal_attention
from lln.zoo.linear import linear_attention
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import (
    blocks,
    check_value_width,
    join_blocks,
    join_heads,
    on_kept_tokens,
    rms_norm,
    split_heads,
)

Layer = Literal["diag", "linear"]
Norm = Literal["rms", "srms", "layer"]

LAYER_EPSILON = 1e-5  # torch.nn.LayerNorm's

RECORD = {
    "paper": "Qin et al.: The Devil in Linear Transformer",
    "year": 2022,
    "time": "N D² (linear), N C D (diag)",
    "memory": "N D (linear), N C (diag)",
    "learned": "scale (and offset) of the norm, H D",
    "causal": True,
    "padding": True,
    "cross": False,
    "left_outside": "which layers are diag and which linear (layer=); position encoding; the gated feed-forward part",
}


class TransNormer(PeerMechanism):
    """One layer of it:

        linear   out = norm(sum_j (phi(q_i) . phi(k_j)) v_j)        the norm takes the place of the sum of the weights
        diag     out = attention inside blocks of C kept tokens

    norm over the features of all heads: "rms" x / rms(x) with a learned scale, "srms" the same without one, "layer" a
    layer norm. The paper leaves the choice open, and its code has settings with each kind. Blocks of 64 are its code's.
    """

    rectified: ClassVar[bool]
    shift: ClassVar[float]

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        layer: Layer = "linear",
        norm: Norm = "rms",
        block_size: int = 64,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_choice("layer", layer, get_args(Layer))
        check_choice("norm", norm, get_args(Norm))
        check_at_least(1, block_size=block_size)
        self.layer, self.norm, self.block_size = layer, norm, block_size
        normed = layer == "linear" or self.rectified
        width = num_heads * head_dim
        self.scale = nn.Parameter(torch.ones(width)) if normed and norm != "srms" else None
        self.offset = nn.Parameter(torch.zeros(width)) if normed and norm == "layer" else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        if self.layer == "diag" and not self.rectified:
            return block_diagonal_attention(
                query, key, value, block_size=self.block_size, key_padding_mask=keep, is_causal=is_causal
            )
        check_value_width(self.description.name, value, self.head_dim)
        mix = self._linear if self.layer == "linear" else self._rectified
        return on_kept_tokens(partial(mix, is_causal=is_causal), query, key, value, keep)

    def _linear(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, *, is_causal: bool) -> Tensor:
        def features(x: Tensor, _: slice) -> Tensor:
            return elu(x) + self.shift

        return linear_attention(
            query,
            key,
            value,
            kept,
            is_causal,
            query_features=features,
            key_features=features,
            finish=lambda weighted, total, _: self._normalise(weighted),
        )

    def _rectified(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, *, is_causal: bool) -> Tensor:
        # Padding comes blanked: whatever its weight, its values add nothing.
        q, k, v = (blocks(x, min(self.block_size, query.shape[2])) for x in (query, key, value))
        weights = torch.relu(q * self.head_dim**-0.5 @ k.mT)
        return self._normalise(join_blocks((weights.tril() if is_causal else weights) @ v, query.shape[2]))

    def _normalise(self, x: Tensor) -> Tensor:
        joined = join_heads(x)
        scale, offset = (None if p is None else p.to(x.dtype) for p in (self.scale, self.offset))
        if self.norm == "layer":
            joined = layer_norm(joined, joined.shape[2:], scale, offset, LAYER_EPSILON)
        else:
            joined = rms_norm(joined) if scale is None else rms_norm(joined) * scale
        return split_heads(joined, x.shape[1])


@register(name="transnormer_t1", title="TransNormer T1", **RECORD)
class TransNormerT1(TransNormer):
    """Rectified attention (ReLA) in blocks, then the norm; elu features in linear layers."""

    rectified = True
    shift = 0.0


@register(name="transnormer_t2", title="TransNormer T2", **RECORD)
class TransNormerT2(TransNormer):
    """Softmax attention in blocks; 1 + elu features in linear layers."""

    rectified = False
    shift = 1.0
