"""Linear attention: weights that are inner products of feature vectors, summed in linear time.

    out_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)

over the kept keys j, with a causal mask over those up to i. The sums over j come first: all that is kept of the keys
is one F x (V + 1) matrix, so time is O(N F V). A query without any weight gets zeros.

Tokens pass through in pieces, features and all, so that nothing but the output grows with their number.

Shapes: B batch, H heads, N queries, M keys, F features, V value width; T tokens of a piece, n chunks of C tokens.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.kernels.plain import CAUSAL_CHUNK, collect
from lln.masks import blank
from lln.moments import accumulator, chunks

Features = Callable[[Tensor, slice], Tensor]  # of a piece (B, H, T, D), and where in the sequence it lies
Finish = Callable[[Tensor, Tensor, slice], Tensor]  # of the sums (B, H, T, V) and (B, H, T, 1), and where they lie


def weighted_mean(weighted: Tensor, total: Tensor) -> Tensor:
    """weighted / total, and 0 where the weights sum to nothing."""
    some = total > torch.finfo(total.dtype).tiny
    # Dividing by 1 where there is nothing keeps the gradient finite there, which dividing by something tiny would not.
    return (weighted / torch.where(some, total, 1.0)).masked_fill(~some, 0.0)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    is_causal: bool,
    *,
    query_features: Features,
    key_features: Features,
    finish: Finish = lambda weighted, total, _: weighted_mean(weighted, total),
) -> Tensor:
    """Attention with the weights phi(q) . phi(k), (B, H, N, V) in the dtype of `value`; sums are in at least float32.

    `finish` makes the output of the sums of the weighted values and of the weights. The one it has unless told
    otherwise wants weights that are not negative.
    """
    dtype = accumulator(value.dtype)

    def queries(part: slice) -> Tensor:
        return query_features(query[:, :, part].to(dtype), part)

    def keys(part: slice) -> tuple[Tensor, Tensor]:
        kept = None if keep is None else keep[:, part]
        k, v = (blank(x[:, :, part].to(dtype), kept) for x in (key, value))
        # A last value that is always 1 sums the weights.
        return blank(key_features(k, part), kept), pad(v, (0, 1), value=1.0)

    def parts() -> Iterator[Tensor]:
        state: Tensor | None = None  # (B, H, F, V + 1)
        if not is_causal:
            for part in chunks(key.shape[2]):
                k, v = keys(part)
                state = k.mT @ v if state is None else state + k.mT @ v
        for part in chunks(query.shape[2]):
            q = queries(part)
            if is_causal:
                sums, state = _causal_sums(q, *keys(part), state)
            else:
                assert state is not None
                sums = q @ state
            yield finish(sums[..., :-1], sums[..., -1:], part).to(value.dtype)

    return collect(parts(), query, value.shape[3])


def _causal_sums(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums up to each token, and the state after the last.

    What came before a chunk comes through the sums at its start, the tokens inside it pair by pair.
    """
    tokens = q.shape[2]
    size = min(tokens, CAUSAL_CHUNK)
    q, k, v = (pad(x, (0, 0, 0, -tokens % size)).reshape(*x.shape[:2], -1, size, x.shape[3]) for x in (q, k, v))
    own = k.mT @ v  # (B, H, n, F, V + 1)
    first = torch.zeros_like(own[:, :, :1]) if state is None else state[:, :, None]
    # Shifted, not subtracted: nothing of the future can remain.
    before = torch.cat((first, own), dim=2).cumsum(dim=2)
    sums = q @ before[:, :, :-1] + (q @ k.mT).tril() @ v
    return sums.flatten(2, 3)[:, :, :tokens], before[:, :, -1]
