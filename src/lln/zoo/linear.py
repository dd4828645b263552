"""Linear attention: weights that are inner products of feature vectors, summed in linear time.

    out_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)

over the kept keys j, with a causal mask over those up to i. The sums over j come first: all that is kept of the keys
is one F x (V + 1) matrix, so time is O(N F V). A query without any weight gets zeros.

`recurrent_attention` is for a matrix that is more than a sum: it decays from token to token, or is corrected.

Tokens pass through in pieces, features and all, so that nothing but the output grows with their number.

Shapes: B batch, H heads, N queries, M keys, F features, V value width; T tokens of a piece, n chunks of C tokens.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.backends.torch.causal import CAUSAL_CHUNK
from lln.backends.torch.summary import join_pieces
from lln.checks import is_readable
from lln.masks import fill_padding, zero_nonfinite_padding
from lln.matching.moments import chunks, not_finite, pieces
from lln.precision import accumulator, in_full_precision

Features = Callable[[Tensor, slice], Tensor]  # of a piece (B, H, T, D), and where in the sequence it lies
Finish = Callable[[Tensor, Tensor, slice], Tensor]  # of the sums (B, H, T, V) and (B, H, T, 1), and where they lie
# Of query, key and value of a piece, its kept tokens (B, T), the state before it (None if it is the first one) and
# whether a token reads the state with itself in it: the output of the piece, and the state after it.
Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool], tuple[Tensor, Tensor]]


def weighted_mean(weighted: Tensor, total: Tensor) -> Tensor:
    """weighted / total, and 0 where the weights sum to nothing."""
    nothing = total <= torch.finfo(total.dtype).tiny  # false for NaN, which must not be hidden
    # Dividing by 1 where there is nothing keeps the gradient finite there, which dividing by something tiny would not.
    return (weighted / torch.where(nothing, 1.0, total)).masked_fill(nothing, 0.0)


@in_full_precision
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

    `finish` makes the output of the sums of the weighted values and of the weights. The default
    needs weights that are not negative.
    """
    dtype = accumulator(value.dtype)
    # With as many queries as keys these are the same tokens, as everywhere in this library (lln.masks).
    query = zero_nonfinite_padding(query, keep if query.shape[2] == key.shape[2] else None)

    def queries(part: slice) -> Tensor:
        return query_features(query[:, :, part].to(dtype), part)

    def keys(part: slice) -> tuple[Tensor, Tensor]:
        kept = None if keep is None else keep[:, part]
        k, v = (fill_padding(x[:, :, part].to(dtype), kept) for x in (key, value))
        # A last value that is always 1 sums the weights.
        return fill_padding(key_features(k, part), kept), pad(v, (0, 1), value=1.0)

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

    return join_pieces(parts(), query, value.shape[3])


def _causal_sums(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums up to each token, and the state after the last.

    What came before a chunk comes through the sums at its start, the tokens inside it pair by pair.
    """
    tokens = q.shape[2]
    size = min(tokens, CAUSAL_CHUNK)
    k, v, odd = _finite_tokens(k, v)
    q, k, v = (pad(x, (0, 0, 0, -tokens % size)).reshape(*x.shape[:2], -1, size, x.shape[3]) for x in (q, k, v))
    own = k.mT @ v  # (B, H, n, F, V + 1)
    first = torch.zeros_like(own[:, :, :1]) if state is None else state[:, :, None]
    # Shifted, not subtracted: nothing of the future can remain.
    before = torch.cat((first, own), dim=2).cumsum(dim=2)
    sums = q @ before[:, :, :-1] + (q @ k.mT).tril() @ v
    sums, state = sums.flatten(2, 3)[:, :, :tokens], before[:, :, -1]
    return (sums, state) if odd is None else (sums + odd, state + odd[:, :, -1:])


@in_full_precision
def recurrent_attention(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool, *, step: Step
) -> Tensor:
    """Self-attention by a state that is passed on from token to token, (B, H, N, V) in the dtype of `value`.

    A token reads the state after the tokens up to it. Without a causal mask it also reads, and adds, the state of a
    second pass from the end of the sequence after the tokens that follow it: each token counts once. `step` runs in at
    least float32 and gets padding blanked; it must leave the state as it is there.
    """

    def scan(*inputs: Tensor, kept: Tensor | None, own: bool) -> Tensor:
        def parts() -> Iterator[Tensor]:
            state: Tensor | None = None
            for (q, kept_part), (k, _), (v, _) in zip(*(pieces(x, kept) for x in inputs), strict=True):
                k, v, odd = _finite_tokens(k, v)
                output, state = step(q, k, v, kept_part, state, own)
                if odd is not None:
                    output, state = output + odd, state + odd[:, :, -1:]
                yield output

        return join_pieces(parts(), inputs[0], value.shape[3])

    output = scan(query, key, value, kept=keep, own=True)
    if not is_causal:
        backwards = [x.flip(2) for x in (query, key, value)]
        output = output + scan(*backwards, kept=None if keep is None else keep.flip(1), own=False).flip(2)
    return output.to(value.dtype)


def _finite_tokens(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with zeros for tokens that are not finite, and NaN (B, H, T, 1) from these on, 0 before.

    A product with a lower triangle takes later tokens times 0, which is NaN if these are not finite. None instead of
    the last one: all are known to be finite.
    """
    odd = not_finite(k, -1) + not_finite(v, -1)
    if is_readable(some := odd.isnan().any()) and not bool(some):
        return k, v, None
    k, v = (x.masked_fill(odd.isnan(), 0.0) for x in (k, v))
    return k, v, odd.cumsum(dim=2)
