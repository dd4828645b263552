"""The one place that reads masks and lengths.

A padding mask marks the tokens that are real. It is either

    a bool tensor (B, tokens), True = keep      as a Hugging Face attention mask, or SDPA's bool mask
    an integer tensor (B,) of lengths           the first so many tokens of each sample are kept

`torch.nn.MultiheadAttention` means the opposite by its masks (True = ignore): `lln.MultiheadAttention` follows torch
and turns them round on the way in.
"""

import torch
from torch import Tensor

from lln.checks import check_values, is_readable
from lln.precision import accumulator

# As in the C code: far above what queries hold, far below what overflows with any alpha.
LARGEST_PADDING = 1e15
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def read_padding(mask: Tensor | None, like: Tensor, *, name: str = "key_padding_mask") -> Tensor | None:
    """The kept tokens of `like` (B, heads, tokens, features) as a (B, tokens) bool tensor; None if all are kept."""
    if mask is None:
        return None
    batch, tokens = like.shape[0], like.shape[2]
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be {_wanted(like)}, got {type(mask).__name__}")
    if mask.device != like.device:
        raise ValueError(f"{name} is on {mask.device} but the tokens are on {like.device}; move it there")
    if mask.dim() > 2:
        raise ValueError(
            f"{name} must be {_wanted(like)}, got shape {tuple(mask.shape)}: a mask for each pair of tokens cannot be "
            "honoured in linear time; give which keys are padding, and is_causal=True for a causal mask"
        )
    if mask.dim() == 1 and mask.dtype in INTEGERS:
        return _read_lengths(mask, batch, tokens, name)
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"{name} must be {_wanted(like)}, got {mask.dtype} of shape {tuple(mask.shape)}; "
            "turn a 0/1 mask into bool with mask.bool(), an additive mask with mask == 0"
        )
    if mask.shape != (batch, tokens):
        raise ValueError(f"{name} must be {_wanted(like)}, got shape {tuple(mask.shape)}")
    return mask


def _wanted(like: Tensor) -> str:  # made only when needed: text makes torch.compile fix the sizes
    batch, tokens = like.shape[0], like.shape[2]
    return f"a bool tensor ({batch}, {tokens}) with True = keep, or an integer tensor ({batch},) of lengths"


def _read_lengths(lengths: Tensor, batch: int, tokens: int, name: str) -> Tensor:
    if lengths.shape != (batch,):
        raise ValueError(f"{name} holds {lengths.shape[0]} lengths for a batch of {batch}")
    fits = (lengths >= 0) & (lengths <= tokens)
    # Under torch.compile a number in the message would fix the length.
    limit = "the number of tokens" if torch.compiler.is_compiling() else tokens
    check_values(fits, f"{name} must hold lengths between 0 and {limit}", lengths)
    return torch.arange(tokens, device=lengths.device) < lengths.long()[:, None]


def read_paddings(
    query: Tensor, key: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The kept queries and the kept keys, (B, N) and (B, M).

    With as many queries as keys and no mask for the queries this is taken for self-attention: the same tokens are
    padding on both sides. For cross attention between equally long sequences, give `query_padding_mask`.
    """
    keep_key = read_padding(key_padding_mask, key)
    if query_padding_mask is not None:
        return read_padding(query_padding_mask, query, name="query_padding_mask"), keep_key
    return (keep_key if query.shape[2] == key.shape[2] else None), keep_key


def fill_padding(x: Tensor, keep: Tensor | None, value: float = 0.0) -> Tensor:
    """`x` (B, heads, tokens, features) with `value` in place of the tokens that are not kept."""
    return x if keep is None else x.masked_fill(~keep[:, None, :, None], value)


def zero_nonfinite_padding(query: Tensor, keep: Tensor | None) -> Tensor:
    """`query` with zeros in place of padding that is not finite, or so large that it would not be once it is scaled.

    0 times NaN would reach gradients of kept tokens.
    """
    if keep is None:
        return query
    # In float16 the limit itself would be infinite.
    largest = query.detach().abs().amax(dim=-1, keepdim=True).to(accumulator(query.dtype))
    usable = (largest <= LARGEST_PADDING) | keep[:, None, :, None]  # not so for NaN
    if is_readable(everything := usable.all()) and bool(everything):
        return query  # without a copy
    return query.masked_fill(~usable, 0.0)


def kept_tokens(keep: Tensor | None, like: Tensor) -> Tensor:
    """The kept tokens of `like` as a (B, tokens) bool tensor, also when all are kept."""
    return torch.ones_like(like[:, 0, :, 0], dtype=torch.bool) if keep is None else keep


def front_order(keep: Tensor) -> Tensor:
    """The order (B, tokens) that moves kept tokens to the front and leaves them in sequence."""
    return torch.argsort(~keep, dim=1, stable=True)


def take_tokens(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of `x` (B, heads, tokens, features) in the order (B, tokens) given for each sample."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
