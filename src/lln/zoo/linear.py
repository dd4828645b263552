"""Linear attention: weights that are inner products of feature vectors, summed in linear time.

    out_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)

over the kept keys j, with a causal mask over those up to i. The sums over j come first: all that is kept of the keys
is one F x (V + 1) matrix, so time is O(N F V). A query without any weight gets zeros.

Shapes: B batch, H heads, N queries, M keys, F features, V value width; n chunks of C tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.kernels.plain import CAUSAL_CHUNK
from lln.masks import blank
from lln.moments import accumulator


def linear_attention(phi_q: Tensor, phi_k: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
    """Attention with the weights phi_q . phi_k, which must not be negative: (B, H, N, V) in the dtype of `value`."""
    weighted, total = linear_sums(phi_q, phi_k, value, keep, is_causal)
    return weighted_mean(weighted, total).to(value.dtype)


def linear_sums(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Sums (B, H, N, V) of the weighted values and (B, H, N, 1) of the weights, in at least float32."""
    dtype = accumulator(value.dtype)
    q, k = phi_q.to(dtype), blank(phi_k.to(dtype), keep)
    v = pad(blank(value.to(dtype), keep), (0, 1), value=1.0)  # a last feature that is always 1 sums the weights
    sums = _causal_sums(q, k, v) if is_causal else q @ (k.mT @ v)
    return sums[..., :-1], sums[..., -1:]


def weighted_mean(weighted: Tensor, total: Tensor) -> Tensor:
    """weighted / total, and 0 where the weights sum to nothing."""
    some = total > torch.finfo(total.dtype).tiny
    # Dividing by 1 where there is nothing keeps the gradient finite there, which dividing by something tiny would not.
    return (weighted / torch.where(some, total, 1.0)).masked_fill(~some, 0.0)


def _causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What came before a chunk through the sums at its start, the tokens inside it pair by pair."""
    tokens = q.shape[2]
    size = min(tokens, CAUSAL_CHUNK)
    q, k, v = (pad(x, (0, 0, 0, -tokens % size)).reshape(*x.shape[:2], -1, size, x.shape[3]) for x in (q, k, v))
    after = (k.mT @ v).cumsum(dim=2)  # (B, H, n, F, V + 1)
    before = pad(after[:, :, :-1], (0, 0, 0, 0, 1, 0))  # shifted, not subtracted: nothing of the future can remain
    sums = q @ before + (q @ k.mT).tril() @ v
    return sums.flatten(2, 3)[:, :, :tokens]
