"""cosFormer: linear attention with larger weights for near tokens."""

import math

import torch
from torch import Tensor

from lln.masks import kept_tokens
from lln.precision import accumulator
from lln.zoo.linear import Features, linear_attention
from lln.zoo.registry import PeerMechanism, register


@register(
    name="cosformer",
    title="cosFormer",
    paper="Qin et al.: cosFormer: Rethinking Softmax in Attention",
    year=2022,
    time="N D²",
    memory="N D",
    causal=True,
    padding=True,
    cross=True,
)
class CosFormer(PeerMechanism):
    """P_ij ~ relu(q_i) . relu(k_j) cos(pi/2 (i - j) / L), linear because cos(x - y) = cos x cos y + sin x sin y.

    Positions i and j count kept tokens. L is `max_len` or, without it, the number of tokens in the sample, as in the
    paper's code; causal attention needs `max_len`, since the length of the whole sequence belongs to the future.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        longest = max(query.shape[2], key.shape[2])
        if self.max_len is None and is_causal:
            raise ValueError("causal cosformer would depend on the length of its future: build it with max_len=")
        if self.max_len is not None and longest > self.max_len:
            raise ValueError(f"cosformer was built for max_len={self.max_len} tokens, got {longest}; build it for more")
        dtype = accumulator(query.dtype)
        kept_keys = kept_tokens(keep, key)
        # With as many queries as keys these are the same tokens, as everywhere in this library (lln.masks).
        kept_queries = kept_keys if query.shape[2] == key.shape[2] else kept_tokens(None, query)
        if self.max_len is None:
            length = torch.maximum(kept_queries.sum(dim=1), kept_keys.sum(dim=1)).clamp(min=1)[:, None].to(dtype)
        else:
            length = torch.full((1, 1), self.max_len, dtype=dtype, device=query.device)

        def features(kept: Tensor) -> Features:
            angles = math.pi / 2 * (kept.cumsum(dim=1) - 1).to(dtype) / length

            def of_piece(x: Tensor, part: slice) -> Tensor:
                angle = angles[:, None, part, None]
                return torch.cat((x.relu() * angle.cos(), x.relu() * angle.sin()), dim=-1)

            return of_piece

        return linear_attention(
            query,
            key,
            value,
            keep,
            is_causal,
            query_features=features(kept_queries),
            key_features=features(kept_keys),
        )
