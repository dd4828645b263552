"""How much of softmax attention is among the neighbours of a token, and how much further away.

With scores s_ij = q_i . k_j / sqrt(D) and log-weights w_j of the keys, which all queries share,

    ln(far / near)_i  =  ln sum over far j of exp(w_j)  -  ln sum over near j of exp(s_ij)

The sum over the near tokens is exact, and softmax attention among them has it already. That over the far tokens, which
must take linear time, leaves out the part of a score that depends on the query: a learned gate adds it, or the moments
of the keys do, `log_mean_exp`.

A linear attention whose weights w_ij = sum_l exp(a_il + b_jl) are known one by one can also leave the neighbours out,
`beyond_neighbors`: it is attention to what is far alone then, and has a ratio ln(far / near) of its own.

Shapes: B batch, H heads, a multiple of H_k key heads, N tokens, D features of a head, V value width, C block size, F
features of a linear attention; n tiles of T queries, and the S keys of the tiles that hold their neighbours.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln import backends
from lln.backends.torch.blocks import join_blocks
from lln.backends.torch.summary import repeat_heads
from lln.forms import token_mean
from lln.masks import fill_padding, front_order, read_padding, take_tokens
from lln.packed import packed_outputs
from lln.precision import accumulator, in_full_precision, sum_dtype
from lln.problem import Near, Problem, autocast_like_sdpa

# Of a query to all that is far or near, where its largest feature has 1: below it, what is left is taken for nothing.
SMALLEST_WEIGHT = 1e-30


class Past(NamedTuple):
    """The tokens before those of a call: what `lln.LLNState` keeps of them."""

    tokens: Tensor  # (B,) kept tokens
    key_weight: Tensor | None  # (B, H, C) of the last ones, token t at place t % C; None: zeros
    log_weight: Tensor | None  # (B, H) ln of the sum of all weights; None: of their number


def near_with_mass_ratio(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_weight: Tensor | None = None,
    *,
    near: Near,
    block_size: int,
    from_moments: bool = False,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention among neighbours (B, H, N, V), and ln(far / near) of each query, (B, H, N).

    The ratio is -inf where all that a query may attend to is near; of a token that is not kept it means nothing.

    Args:
        query, key, value: (B, H, N, D), (B, H_k, N, D) and (B, H_k, N, V).
        key_weight: log-weights (B, H, N) of the keys; left out, 0.
        from_moments: add to ln(far) the part of it that depends on the query, `log_mean_exp`.
        near, block_size, is_causal, key_padding_mask, cu_seqlens: as in `lln.block_diagonal_attention`.
    """
    options: dict[str, Any] = {"near": near, "block_size": block_size, "is_causal": is_causal}

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_weight: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        problem = Problem.make(query, key, value, far=False, key_padding_mask=key_padding_mask, **options)
        output, lse = backends.near_with_lse(problem)
        weight = lse.new_zeros(len(lse), 1, lse.shape[2]) if key_weight is None else key_weight
        keep = read_padding(key_padding_mask, key)
        far = log_far_mass(weight, keep, **options)
        if from_moments:
            far = far + log_mean_exp(query, key, keep)
        return output, (far - lse)[..., None]

    def attend_all(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if cu_seqlens is None:
            return attend(query, key, value, key_weight, key_padding_mask)
        given: dict[str, Any] = {"key_weight": key_weight, "key_padding_mask": key_padding_mask}
        output, ratio = packed_outputs(attend, query, key, value, cu_seqlens, **given)
        return output, ratio

    output, ratio = autocast_like_sdpa(attend_all, query, key, value)
    return output, ratio[..., 0]


def beyond_neighbors(
    a: Tensor,
    b: Tensor,
    value: Tensor,
    *,
    near: Near,
    block_size: int,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with weights w_ij = sum_l exp(a_il + b_jl) to the tokens that are not near, (B, H, N, V), and its
    ln(far / near), (B, H, N).

    Every sum has terms of one sign: those of whole tiles of tokens before and after, and those of the keys that lie in
    the tiles of a query's neighbours, one by one. Nothing is subtracted, so that the far attention is a mean of values
    whatever its part of the weight is. Not for causal attention.

    Args:
        a, b: (B, H, N, F).
        value: (B, H_k, N, V).
        near, block_size, key_padding_mask, cu_seqlens: as in `lln.block_diagonal_attention`.

    Returns:
        The attention, 0 where nothing is far, and the ratio, there -inf; of a token that is not kept they mean nothing.
    """

    def attend(a: Tensor, b: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keep = read_padding(key_padding_mask, a)
        found = sums_beyond_neighbors(a, b, value, keep, near=near, block_size=block_size)
        nothing = torch.zeros_like(a[:, :1, :, 0])
        is_far = log_far_mass(nothing, keep, near=near, block_size=block_size, is_causal=False) > -math.inf
        return found.output, (found.far - found.near).masked_fill(~is_far[..., None], -math.inf)

    with torch.autocast(a.device.type, enabled=False):
        dtype, value = value.dtype, repeat_heads(value.to(a.dtype), a.shape[1] // value.shape[1])
        if cu_seqlens is None:
            output, ratio = attend(a, b, value, key_padding_mask)
        else:
            output, ratio = packed_outputs(attend, a, b, value, cu_seqlens)
        return output.to(dtype), ratio[..., 0]


class Beyond(NamedTuple):
    """Attention to what is far, and of its weight and that of the neighbours the logarithms less `unit`."""

    output: Tensor  # (B, H, N, V)
    far: Tensor  # (B, H, N, 1)
    near: Tensor
    unit: Tensor


def sums_beyond_neighbors(
    a: Tensor, b: Tensor, value: Tensor, keep: Tensor | None, *, near: Near, block_size: int
) -> Beyond:
    """What `beyond_neighbors` is made of; value is (B, H, N, V)."""
    tokens, value = a.shape[2], pad(value, (0, 1), value=1.0)
    if keep is not None:
        b = b.masked_fill(~keep[:, None, :, None], -math.inf)
        a, value = (fill_padding(x, keep) for x in (a, value))
    # exp(a_i + b_j), summed over the features, as a product of matrices whose entries are at most 1.
    top = b.detach().amax(dim=2, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    a = a + top
    unit = a.detach().amax(dim=3, keepdim=True)
    a, b = (a - unit).exp(), (b - top).exp()
    reach = 1 if near == "window" else 0
    if (2 * reach + 1) * min(block_size, tokens) >= tokens:
        far, of_near = _sums_in_one_tile(a, b, value, keep, near=near, block_size=block_size)
    elif keep is None:
        far, of_near = _sums_in_tiles(a, b, value, reach=reach, block_size=block_size)
    else:  # kept tokens in front, as their neighbours are counted
        order = front_order(keep)
        a, b, value = (take_tokens(x, order) for x in (a, b, value))
        back = order.argsort(dim=1)
        sums = _sums_in_tiles(a, b, value, reach=reach, block_size=block_size)
        far, of_near = (take_tokens(x, back) for x in sums)
    total = far[..., -1:].clamp(min=SMALLEST_WEIGHT)
    return Beyond(far[..., :-1] / total, total.log(), of_near.clamp(min=SMALLEST_WEIGHT).log(), unit)


def _sums_in_one_tile(
    a: Tensor, b: Tensor, value: Tensor, keep: Tensor | None, *, near: Near, block_size: int
) -> tuple[Tensor, Tensor]:
    """Sums of weights times values (B, H, N, V) over what is far, and of weights (B, H, N, 1) over the neighbours."""
    place = torch.arange(a.shape[2], device=a.device)[None] if keep is None else keep.cumsum(dim=1) - 1
    if near == "blocks":
        block = place // block_size
        is_near = block[:, :, None] == block[:, None]
    else:
        is_near = _in_window(place[:, None] - place[:, :, None], block_size)
    weights = a @ b.mT
    return (
        weights.masked_fill(is_near[:, None], 0.0) @ value,
        weights.masked_fill(~is_near[:, None], 0.0).sum(dim=3, keepdim=True),
    )


def _sums_in_tiles(a: Tensor, b: Tensor, value: Tensor, *, reach: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The same in linear time, for kept tokens in front; neighbours lie in `reach` tiles before and after a query's."""
    tokens, size = a.shape[2], block_size
    tiles = (tokens + size - 1) // size
    a, b, value = (pad(x, (0, 0, 0, tiles * size - tokens)) for x in (a, b, value))
    a = torch.unflatten(a, 2, (tiles, size))  # (B, H, n, T, F)

    # What lies in other tiles than those of the neighbours: the tiles before them and those after them.
    b_tiles, value_tiles = (torch.unflatten(x, 2, (tiles, size)) for x in (b, value))
    sums = b_tiles.mT @ value_tiles  # (B, H, n, F, V + 1)
    before = pad(sums.cumsum(dim=2), (0, 0, 0, 0, reach + 1, 0))[:, :, :tiles]
    after = pad(sums.flip(2).cumsum(dim=2), (0, 0, 0, 0, reach + 1, 0))[:, :, :tiles].flip(2)
    far = a @ (before + after)

    # What lies in them, key by key.
    span = (2 * reach + 1) * size
    b, value = (pad(x, (0, 0, reach * size, reach * size)).unfold(2, span, size) for x in (b, value))
    weights = a @ b  # (B, H, n, T, S)
    if reach:
        distance = torch.arange(span, device=a.device) - torch.arange(size, device=a.device)[:, None] - reach * size
        is_near = _in_window(distance, block_size)
        far = far + weights.masked_fill(is_near, 0.0) @ value.mT
        weights = weights.masked_fill(~is_near, 0.0)
    return join_blocks(far, tokens), join_blocks(weights.sum(dim=4, keepdim=True), tokens)


def _in_window(distance: Tensor, block_size: int) -> Tensor:
    """Whether keys are in the window of a query that they follow by so many tokens."""
    right = block_size // 2
    return (distance <= right) & (distance > right - block_size)


@in_full_precision
def log_mean_exp(query: Tensor, key: Tensor, keep: Tensor | None = None) -> Tensor:
    """ln of the mean over the keys of exp(s_ij), (B, H, N), to second order: mean and half the variance of the scores.

        q_i . m / sqrt(D)  +  q_i^T C q_i / (2 D)         m and C: mean and covariance of the keys

    It is exact for Gaussian keys, and takes O(N D^2).

    Args:
        query, key: (B, H, N, D) and (B, H_k, N, D).
        keep: (B, N) bool; what a token that is not kept gets means nothing.
    """
    dtype, scale = accumulator(query.dtype), query.shape[3] ** -0.5
    query, key = (fill_padding(x, keep).to(dtype) for x in (query, key))
    mean = token_mean(key, keep)
    rest = fill_padding(key - mean[:, :, None], keep)
    number = key.shape[2] if keep is None else keep.sum(dim=1).clamp(min=1)[:, None, None, None]
    moments = torch.cat((mean[..., None], rest.mT @ rest / number), dim=3)  # (B, H_k, D, 1 + D)
    products = query @ repeat_heads(moments, query.shape[1] // key.shape[1])
    found: Tensor = products[..., 0] * scale + (products[..., 1:] * query).sum(dim=3) * (scale**2 / 2)
    return found


@in_full_precision
def log_far_mass(
    weight: Tensor,
    keep: Tensor | None = None,
    *,
    near: Near,
    block_size: int,
    is_causal: bool,
    past: Past | None = None,
) -> Tensor:
    """ln of the sum of exp(weight) over the tokens that each query may attend to and that are not near, (B, H, N).

    Sums run over all tokens before the neighbours and over all after them, in float64, in which weights may differ by
    700: so no sum is the small difference of two large ones.

    Args:
        weight: (B, H, N).
        keep: (B, N) bool; what a token that is not kept gets means nothing.
        near, block_size: which tokens are near, see `lln.block_diagonal_attention`.
        is_causal: tokens attend only to those before them.
        past: tokens before the first one, for causal attention.

    Returns:
        In at least float32, -inf where there is no such token.
    """
    dtype, tokens = accumulator(weight.dtype), weight.shape[2]
    if tokens == 0:
        return weight.to(dtype)
    weight, order = weight.to(sum_dtype(weight.device)), None
    if keep is not None:  # kept tokens in front, as their neighbours are counted
        order = front_order(keep)[:, None].expand_as(weight)
        weight = weight.masked_fill(~keep[:, None], -math.inf).gather(2, order)
    recent, total = None, None
    if past is not None:
        recent, total = _recent_weights(past, weight, block_size)
        weight = torch.cat((recent, weight), dim=2)
    highest = weight.detach().amax(dim=2, keepdim=True).clamp(min=torch.finfo(weight.dtype).min)
    if total is not None:
        highest = torch.maximum(highest, total.detach())
    mass = (weight - highest).exp()
    before = pad(mass, (1, 0))  # at place 0: all tokens that are not recent
    if past is not None and recent is not None and total is not None:
        older = (total - highest).exp() - mass[:, :, : recent.shape[2]].sum(dim=2, keepdim=True)
        is_older = (past.tokens > recent.shape[2])[:, None, None]
        before = torch.cat((older.clamp(min=0.0).where(is_older, 0.0), mass), dim=2)
    first, end = _neighbors(near, block_size, is_causal, tokens, past, weight.device)
    far = _take(before.cumsum(dim=2), first)
    if not is_causal:
        after = pad(mass.flip(2).cumsum(dim=2).flip(2), (0, 1))
        far = far + _take(after, end)
    is_far = far > 0  # elsewhere logarithms and their gradients would not be finite
    found = (far.where(is_far, 1.0).log() + highest).to(dtype).masked_fill(~is_far, -math.inf)
    return found if order is None else found.gather(2, order.argsort(dim=2))


@in_full_precision
def next_log_far_mass(recent: Tensor, log_weight: Tensor, tokens: Tensor, *, near: Near) -> Tensor:
    """`log_far_mass` of one kept token, (B, H, 1), with few operations: for generation.

    Args:
        recent: log-weights (B, H, C) of the last of the tokens before, token t at place t % C.
        log_weight: (B, H) ln of the sum of the weights of all of them.
        tokens: (B,) their number.
        near: where the neighbours of a token are; C is the block size.
    """
    places, tokens = torch.arange(recent.shape[2], device=recent.device), tokens[:, None]
    is_near = places < tokens % recent.shape[2]
    if near == "window":  # all that there are, but not the one whose place the token takes
        is_near = (places < tokens) & (places != tokens % recent.shape[2])
    is_near = is_near[:, None]
    share = (recent - log_weight[..., None]).exp().where(is_near, 0.0).sum(dim=2, keepdim=True)
    is_far = (tokens[..., None] > is_near.sum(dim=2, keepdim=True)) & (share < 1)
    return (log_weight[..., None] + torch.log1p(-share)).masked_fill(~is_far, -math.inf)


def _neighbors(
    near: Near, block_size: int, is_causal: bool, tokens: int, past: Past | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The places of the first neighbour of each token and after its last one, (N,) or (B, N).

    Places are those of tokens with `block_size` recent ones before them if there is a past.
    """
    place = torch.arange(tokens, device=device)
    recent = 0 if past is None else block_size
    if near == "window":
        right = 0 if is_causal else block_size // 2
        first, end = place + recent - (block_size - 1 - right), place + right + 1
    else:
        number = place if past is None else place + past.tokens.to(place.dtype)[:, None]
        first = place + recent - number % block_size
        end = first + block_size
    return first.clamp(min=0), end.clamp(max=tokens)


def _recent_weights(past: Past, like: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Log-weights of the last tokens, from the oldest to the newest, -inf where there is none, and of all together."""
    ages = torch.arange(-block_size, 0, device=like.device)
    numbers = past.tokens[:, None].long() + ages  # (B, C)
    shape = (*like.shape[:2], block_size)
    weight = like.new_zeros(shape)
    if past.key_weight is not None:
        weight = past.key_weight.to(like.dtype).gather(2, (numbers % block_size)[:, None].expand(shape))
    weight = weight.masked_fill((numbers < 0)[:, None], -math.inf)
    total = past.tokens.to(like.dtype).log()[:, None] if past.log_weight is None else past.log_weight.to(like.dtype)
    return weight, total.expand(like.shape[:2])[..., None]


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Entries of x (B, H, ...) at places (N,) or (B, N)."""
    if places.dim() == 1:
        return x.index_select(2, places)
    return x.gather(2, places[:, None].expand(-1, x.shape[1], -1))
