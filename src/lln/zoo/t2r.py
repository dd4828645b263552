"""T2R: linear attention with a learned feature map."""

import torch
from torch import Tensor, nn

from lln.checks import check_at_least
from lln.zoo.feature_maps import FeatureMap
from lln.zoo.registry import register


@register(
    name="t2r",
    title="T2R",
    paper="Kasai et al.: Finetuning Pretrained Transformers into RNNs",
    year=2021,
    time="N F D",
    memory="N (F + D)",
    learned="a map of each head, D F, and its bias, F",
    causal=True,
    padding=True,
    cross=True,
)
class T2R(FeatureMap):
    """phi(x) = relu(x W + b) with W and b of each head, the same for queries and keys; F = `num_features`, or D.

    A query without any feature in common with the keys gets zeros.
    """

    def __init__(
        self, *, num_heads: int, head_dim: int, max_len: int | None = None, num_features: int | None = None
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        self.num_features = head_dim if num_features is None else num_features
        check_at_least(1, num_features=self.num_features)
        bound = head_dim**-0.5  # as in torch.nn.Linear
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, self.num_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_heads, 1, self.num_features).uniform_(-bound, bound))

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight.to(x.dtype) + self.bias.to(x.dtype))
