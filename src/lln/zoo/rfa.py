"""Random feature attention: the Gaussian kernel by trigonometric random features."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lln.masks import kept_tokens
from lln.precision import accumulator
from lln.zoo.linear import linear_attention, weighted_mean
from lln.zoo.performer import RandomFeatures
from lln.zoo.registry import register


@register(
    name="rfa",
    title="Random Feature Attention",
    paper="Peng et al.: Random Feature Attention",
    year=2021,
    time="N F D",
    memory="N F",
    learned="a scale for each head and feature",
    causal=True,
    padding=True,
    cross=True,
    random=True,
    left_outside="the recency gate",
)
class RFA(RandomFeatures):
    """phi(x) = (cos(w . s x^), sin(w . s x^)) / sqrt(F) over the w, with x^ = x / |x| and a learned scale s.

    The mean of phi(q) . phi(k) is the Gaussian kernel exp(-|s (q^ - k^)|²/2), which for a uniform s is proportional to
    exp(s² q^ . k^): softmax attention of unit vectors. Estimates may be negative while the kernel between unit vectors
    is at least exp(-2 max(s)²); a sum of weights below what that allows is raised to it.
    """

    def add_parameters(self) -> None:
        self.scale = nn.Parameter(torch.ones(self.num_heads, self.head_dim))

    def default_features(self) -> int:
        """2 D: with a cosine and a sine each, phi is four times as wide as a head."""
        return 2 * self.head_dim

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        dtype = accumulator(query.dtype)
        scale = self.scale.to(dtype)[:, None]
        w = self.current_projection(dtype) * scale

        def features(x: Tensor, _: slice) -> Tensor:
            angle = normalize(x, dim=-1) @ w.mT
            return torch.cat((angle.cos(), angle.sin()), dim=-1) / math.sqrt(self.num_features)

        kept = kept_tokens(keep, key).to(dtype)
        count = kept.cumsum(dim=1) if is_causal else kept.sum(dim=1, keepdim=True)
        smallest = (-2 * scale.detach().square().amax(dim=-1, keepdim=True)).exp()  # (H, 1, 1)

        def finish(weighted: Tensor, total: Tensor, part: slice) -> Tensor:
            kept_so_far = (count[:, part] if is_causal else count)[:, None, :, None]
            return weighted_mean(weighted, torch.maximum(total, kept_so_far * smallest))

        return linear_attention(
            query, key, value, keep, is_causal, query_features=features, key_features=features, finish=finish
        )
