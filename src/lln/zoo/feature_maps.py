"""Attention by simple kernels: linear ones, phi(q) . phi(k), and the figure 2 kernels that these are counterparts of.

    elu         phi(x) = elu(x) + 1           relu_kernel         P_ij ~ relu(q_i . k_j / sqrt(D))
    relu        phi(x) = relu(x)              quadratic_kernel    P_ij ~ (q_i . k_j)²
    quadratic   phi(x) = x²

Rows of P are normalised to sum to 1; a row without any weight gives zeros.
"""

from functools import partial

import torch
from torch import Tensor

from lln.masks import fill_padding
from lln.precision import accumulator
from lln.zoo.core import PAPER
from lln.zoo.linear import linear_attention, weighted_mean
from lln.zoo.registry import PeerMechanism, register

# The figure 2 kernels and their linear counterparts, all of which can do everything.
_register = partial(register, paper=PAPER, year=2023, causal=True, padding=True, cross=True)
register_map = partial(_register, time="N D²", memory="N D")
register_kernel = partial(_register, time="N² D", memory="N²")


class FeatureMap(PeerMechanism):
    """Linear attention with a feature map that works on each entry by itself."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        def features(x: Tensor, _: slice) -> Tensor:
            return self.features(x)

        return linear_attention(query, key, value, keep, is_causal, query_features=features, key_features=features)

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@register(
    name="elu",
    title="Linear Transformer (ELU)",
    paper="Katharopoulos, Vyas, Pappas, Fleuret: Transformers are RNNs",
    year=2020,
    time="N D²",
    memory="N D",
    causal=True,
    padding=True,
    cross=True,
    checked_against="performer-pytorch 1.1.4 (its linear attention with this feature map)",
)
class Elu(FeatureMap):
    """phi(x) = elu(x) + 1: x + 1 above zero, exp(x) below."""

    def features(self, x: Tensor) -> Tensor:
        # Not elu(x) + 1 as written: exp(x) - 1 + 1 rounds to 0 from x = -17 on in float32.
        return torch.where(x > 0, x + 1, x.clamp(max=0.0).exp())


@register_map(name="relu", title="Linear ReLU")
class Relu(FeatureMap):
    """phi(x) = max(x, 0): the linear counterpart of `relu_kernel`."""

    def features(self, x: Tensor) -> Tensor:
        return x.relu()


@register_map(name="quadratic", title="Linear quadratic")
class Quadratic(FeatureMap):
    """phi(x) = x²: the linear counterpart of `quadratic_kernel`."""

    def features(self, x: Tensor) -> Tensor:
        return x.square()


class Kernel(PeerMechanism):
    """Attention with weights that are a function of each score q . k / sqrt(D), by the explicit matrix."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        q, k, v = (x.to(accumulator(x.dtype)) for x in (query, fill_padding(key, keep), fill_padding(value, keep)))
        weights = self.weights(q @ k.mT * query.shape[3] ** -0.5)
        if keep is not None:
            weights = weights.masked_fill(~keep[:, None, None, :], 0.0)
        if is_causal:
            weights = weights.tril()
        return weighted_mean(weights @ v, weights.sum(dim=-1, keepdim=True)).to(value.dtype)

    def weights(self, scores: Tensor) -> Tensor:
        raise NotImplementedError


@register_kernel(name="relu_kernel", title="ReLU kernel")
class ReluKernel(Kernel):
    """P_ij ~ max(q_i . k_j / sqrt(D), 0)."""

    def weights(self, scores: Tensor) -> Tensor:
        return scores.relu()


@register_kernel(name="quadratic_kernel", title="Quadratic kernel")
class QuadraticKernel(Kernel):
    """P_ij ~ (q_i . k_j)²."""

    def weights(self, scores: Tensor) -> Tensor:
        return scores.square()
