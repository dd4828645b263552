"""A drop-in for torch.nn.MultiheadAttention with linear attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from lln.checks import check_choice, check_values
from lln.nn import LLNAttention, LLNDiagAttention


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with linear attention: the same constructor, parameters, inputs and outputs.

    `attention="lln_diag"` (self-attention, the default) or `"lln"` (also cross attention); further options go to
    `LLNDiagAttention` or `LLNAttention`. A state dict moves across both ways.

    Masks follow torch: **True = ignore** in `key_padding_mask` here, while the rest of this library has True = keep; an
    additive float mask of zeros and -inf is understood too. Of `attn_mask` only a causal one can be honoured. What
    differs from torch, because there is no attention matrix:

    - alpha and beta follow from all queries and keys of a sample. In the cross attention of a decoder that means: from
      later target tokens too, so give `statistics="running"` (frozen in evaluation) or `alpha=` and `beta=` there; and
      a `query_padding_mask` (True = ignore) if queries are padded, or N = M and the keys' padding is not theirs;
    - learned ratios or scales and running averages are further entries of the state dict, under `attention.`;
    - `need_weights=True` (torch's default) makes that matrix for the occasion, in O(N²) memory: pass False;
    - `dropout` drops value rows, for all queries of a head alike, instead of single attention weights;
    - `add_bias_kv` and `add_zero_attn` are refused.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            torch.nn.MultiheadAttention.
        attention: "lln_diag" or "lln".
        **options: of `LLNDiagAttention` or `LLNAttention`.

    Raises:
        TypeError, ValueError: options that cannot be honoured or do not fit each other.

    Example:
        >>> layer = lln.MultiheadAttention(64, 4, batch_first=True, near="window", block_size=32)
        >>> x = torch.randn(2, 100, 64)
        >>> layer(x, x, x, need_weights=False)[0].shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: Literal["lln_diag", "lln"] = "lln_diag",
        **options: Any,
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn add keys that are no tokens, which this attention has not")
        check_choice("attention", attention, ("lln_diag", "lln"))
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        kind = LLNDiagAttention if attention == "lln_diag" else LLNAttention
        self.attention = kind(num_heads, self.head_dim, **options).to(device=device, dtype=dtype)
        # nn.TransformerEncoderLayer computes softmax attention from our parameters, past our forward, when it takes its
        # fast path; it does not where queries, keys and values differ in width, so that is what this module reports.
        self._one_projection = self._qkv_same_embed_dim
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of query over key and value, as torch.nn.MultiheadAttention.

        Args:
            query, key, value: (N, B, E), or (B, N, E) with `batch_first`, or (N, E).
            key_padding_mask, query_padding_mask: (B, tokens) or (tokens,), True = ignore.
            need_weights, average_attn_weights: return the attention matrix, too, of all heads or their mean.
            attn_mask, is_causal: a causal mask, or that there is one.

        Returns:
            The output in the layout of the query, and the attention matrix or None.

        Raises:
            TypeError, ValueError: masks that cannot be honoured, with what to use instead.
        """
        if query.is_nested:  # what nn.TransformerEncoder makes of a padded batch in evaluation
            return self._forward_nested(query, key, value, need_weights, attn_mask, is_causal)
        batched = query.dim() == 3
        if not batched:
            if query.dim() != 2:
                raise ValueError(f"query must be (tokens, width) or a batch of it, got shape {tuple(query.shape)}")
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            query_padding_mask = None if query_padding_mask is None else query_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        masks = {
            "key_padding_mask": _keep_from_torch("key_padding_mask", key_padding_mask, key),
            "query_padding_mask": _keep_from_torch("query_padding_mask", query_padding_mask, query),
        }
        is_causal = _is_causal_mask(attn_mask, query.shape[1], key.shape[1]) or is_causal

        heads = [
            x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x in self._project(query, key, value)
        ]
        if self.training and self.dropout > 0:
            ones = heads[2].new_ones(*heads[2].shape[:3], 1)
            heads[2] = heads[2] * dropout(ones, self.dropout)
        output = self.attention(*heads, is_causal=is_causal, **masks)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        weights = self._weights(heads, masks, is_causal) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not self.batch_first:
            output = output.transpose(0, 1)
        if not batched:
            output = output.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        weights = (
            self.in_proj_weight.chunk(3)
            if self._one_projection
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _weights(self, heads: list[Tensor], masks: dict[str, Tensor | None], is_causal: bool) -> Tensor:
        """The attention matrix (B, H, N, M): what the attention makes of the identity."""
        query, key, _ = heads
        identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], key.shape[2])
        if isinstance(self.attention, LLNDiagAttention) and self.attention.combine == "scale":
            raise ValueError(
                'combine="scale" weighs each value feature differently, so there is no one matrix; need_weights=False'
            )
        with self._not_tracking():
            weights: Tensor = self.attention(query, key, identity, is_causal=is_causal, **masks)
        return weights

    @contextmanager
    def _not_tracking(self) -> Iterator[None]:
        """Compute the attention once more without counting the input twice in its running averages."""
        averages = {name: x.clone() for name, x in self.attention.named_buffers()}
        yield
        for name, average in averages.items():
            getattr(self.attention, name).copy_(average)

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, None]:
        if query is not key or key is not value or need_weights or attn_mask is not None or not self.batch_first:
            raise ValueError(
                "nested tensors are understood for self-attention with batch_first=True, need_weights=False and no "
                "attn_mask; turn others into padded ones with torch.nested.to_padded_tensor"
            )
        lengths = torch.tensor([len(sample) for sample in query.unbind()], device=query.device)
        padded = torch.nested.to_padded_tensor(query, 0.0)
        ignore = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        output, _ = self(padded, padded, padded, key_padding_mask=ignore, need_weights=False, is_causal=is_causal)
        return torch.nested.as_nested_tensor([x[:n] for x, n in zip(output, lengths.tolist(), strict=True)]), None

    def _reset_parameters(self) -> None:
        packed, self._qkv_same_embed_dim = self._qkv_same_embed_dim, self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = packed


def _keep_from_torch(name: str, mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """True = keep from torch's masks, where True = ignore, and an additive mask is 0 for keep and -inf for ignore."""
    if mask is None:
        return None
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool with True = ignore, or additive float, got {mask.dtype}")
    if mask.shape != tokens.shape[:2]:
        raise ValueError(f"{name} must be {tuple(tokens.shape[:2])} with True = ignore, got shape {tuple(mask.shape)}")
    if mask.dtype is torch.bool:
        return ~mask
    keep = mask == 0
    check_values(
        keep | (mask == -torch.inf),
        f"a float {name} must be 0 for keep and -inf for ignore; a score bias cannot be honoured",
    )
    return keep


def _is_causal_mask(mask: Tensor | None, queries: int, keys: int) -> bool:
    """Whether `attn_mask` is the causal one, the only one that linear attention can honour; None is not."""
    if mask is None:
        return False
    remedy = (
        "only a causal attn_mask can be honoured in linear time: pass is_causal=True, or padding as key_padding_mask"
    )
    if mask.shape != (queries, keys):
        raise ValueError(f"{remedy}; got attn_mask {tuple(mask.shape)} for {queries} queries and {keys} keys")
    if mask.device.type == "meta":  # its values decide what is computed, so nothing may be assumed about them
        raise ValueError(f"{remedy}; an attn_mask on the meta device has no values to check")
    future = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1)
    ignored = mask if mask.dtype is torch.bool else mask == -torch.inf
    rest_is_zero = True if mask.dtype is torch.bool else (mask == 0) | ignored
    check_values((ignored == future) & rest_is_zero, f"{remedy}; this attn_mask is another one")
    return True
