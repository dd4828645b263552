"""The paper's formula (eq. 8 and 10) in plain torch, as a reader of the paper would first write it, for comparison.

Features are exponentials as they stand, statistics are those of the whole tensors, and a small number keeps the
normaliser from zero. It overflows where `lln.lln_attention` does not, and has neither masks nor a causal form.
"""

import torch
from torch import Tensor

from lln.matching.curves import linear_constants

EPSILON = 1e-6


def paper_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Shapes: b batch, h heads, n queries, m keys, d features, v value features."""
    a, b = linear_constants(query.shape[-1])
    with torch.no_grad():
        sigma_q, sigma_k = query.std(), key.std()
        s = (((sigma_q * sigma_k).square() - b) / a).sqrt()
        alpha, beta = s / (2**0.5 * sigma_q), s / (2**0.5 * sigma_k)
    phi_q, phi_k = torch.exp(alpha * query), torch.exp(beta * key)
    context = torch.einsum("bhmd,bhmv->bhdv", phi_k, value)
    normaliser = 1 / (torch.einsum("bhnd,bhd->bhn", phi_q, phi_k.sum(dim=2)) + EPSILON)
    return torch.einsum("bhnd,bhdv->bhnv", phi_q, context) * normaliser[..., None]
