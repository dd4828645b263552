"""Hedgehog: linear attention with a learned feature map that is as spiky as softmax."""

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from lln.backends.torch.summary import repeat_heads
from lln.functional import lln_attention
from lln.masks import fill_padding, zero_nonfinite_padding
from lln.precision import accumulator, in_full_precision
from lln.zoo.registry import PeerMechanism, register


@register(
    name="hedgehog",
    title="Hedgehog",
    paper="Zhang, Bhatia, Kumbong, Ré: The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
    year=2024,
    time="N D²",
    memory="N D",
    learned="two maps of each head, for queries and for keys, D² each",
    causal=True,
    padding=True,
    cross=True,
    left_outside="the training of the maps on the weights of softmax attention",
)
class Hedgehog(PeerMechanism):
    """P_ij ~ phi_q(q_i) . phi_k(k_j) with phi(x) = (softmax(x W), softmax(-x W)), each softmax over the D features.

    W is a matrix for each head, one for queries and one for keys, and starts as the identity. The paper writes the map
    with exponentials; softmaxes, no bias and a map of its own for each side are the authors' code (`softmax_dim`).

    Normalised over the keys this is the form of LLN attention with the logarithms of the features: no weight
    underflows, and no epsilon enters.
    """

    def __init__(self, *, num_heads: int, head_dim: int, max_len: int | None = None) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        identity = torch.eye(head_dim).expand(num_heads, -1, -1)
        self.map_query, self.map_key = nn.Parameter(identity.clone()), nn.Parameter(identity.clone())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        # With as many queries as keys these are the same tokens, as everywhere in this library (lln.masks).
        query = zero_nonfinite_padding(query, keep if query.shape[2] == key.shape[2] else None)
        return _attend(query, fill_padding(key, keep), value, keep, is_causal, self.map_query, self.map_key)

    def log_features(
        self, query: Tensor, key: Tensor, keep_query: Tensor | None = None, keep_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        groups = query.shape[1] // key.shape[1]
        key = repeat_heads(fill_padding(key, keep_key), groups)
        return _log_features(fill_padding(query, keep_query) @ self.map_query), _log_features(key @ self.map_key)


@in_full_precision
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    is_causal: bool,
    map_query: Tensor,
    map_key: Tensor,
) -> Tensor:
    dtype = accumulator(value.dtype)
    a, b = (_log_features(x.to(dtype) @ w.to(dtype)) for x, w in ((query, map_query), (key, map_key)))
    output = lln_attention(a, b, value.to(dtype), key_padding_mask=keep, is_causal=is_causal, alpha=1.0, beta=1.0)
    return output.to(value.dtype)


def _log_features(x: Tensor) -> Tensor:
    return torch.cat((log_softmax(x, dim=-1), log_softmax(-x, dim=-1)), dim=-1)
