"""Modules: LLN attention on (query, key, value), and a drop-in for torch.nn.MultiheadAttention."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from lln.checks import check_block_size, check_choice, check_scale, check_values
from lln.curves import MATCHINGS, Matching
from lln.functional import block_diagonal_attention, lln_attention, lln_diag_attention
from lln.moments import SCOPES, Moments, Scope, measure_moments

Statistics = Literal["live", "running"]
Combine = Literal["average", "ratio", "scale"]
RUNNING = ("sigma_q", "sigma_k", "row_variance", "num_keys")


class LLNAttention(nn.Module):
    """Linear Log-Normal attention with its settings, see `lln.lln_attention`.

    Where alpha and beta come from, unless they are given:

    - `statistics="live"`: from the moments of each input, in training and evaluation alike;
    - `statistics="running"`: as BatchNorm, from each input while training, when moving averages of the moments of each
      head are kept (`momentum`), and from those averages in evaluation. A sequence is then encoded with the same alpha
      and beta however it is split, and generation needs no statistics. Before the first training step the averages are
      those of a standard Gaussian. Under data parallelism each process keeps its own, as BatchNorm's do.
    """

    sigma_q: Tensor
    sigma_k: Tensor
    row_variance: Tensor
    num_keys: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        matching: Matching = "variance",
        scope: Scope = "sample",
        statistics: Statistics = "live",
        momentum: float = 0.1,
        alpha: float | None = None,
        beta: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("matching", matching, MATCHINGS)
        check_choice("scope", scope, SCOPES)
        check_choice("statistics", statistics, get_args(Statistics))
        if num_heads < 1 or head_dim < 1:
            raise ValueError(f"at least one head and one feature are needed, got {num_heads} heads of {head_dim}")
        for name, scale in (("alpha", alpha), ("beta", beta)):
            check_scale(name, scale, batch=1, heads=num_heads, tokens=1)
        if not 0.0 < momentum <= 1.0:
            raise ValueError(
                f"momentum must be above 0 and at most 1, got {momentum}; 0.1 follows the last ten batches"
            )
        self.num_heads, self.head_dim = num_heads, head_dim
        self.matching: Matching = matching
        self.scope: Scope = scope
        self.statistics: Statistics = statistics
        self.momentum, self.alpha, self.beta = momentum, alpha, beta
        if statistics == "running":
            for name in RUNNING:
                self.register_buffer(name, torch.ones(num_heads))
            self.num_keys.fill_(1024.0)
            self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The attention of query (B, H, N, D) over key and value, (B, H, N, Dv)."""
        self._check_heads(query)
        alpha, beta = self.scales(query, key, key_padding_mask=key_padding_mask, query_padding_mask=query_padding_mask)
        return lln_attention(
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            query_padding_mask=query_padding_mask,
            is_causal=is_causal,
            alpha=alpha,
            beta=beta,
            matching=self.matching,
            scope=self.scope,
        )

    def scales(
        self,
        query: Tensor,
        key: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[float | Tensor | None, float | Tensor | None]:
        """alpha and beta that do not follow from this input: the given ones, or in evaluation the running ones.

        None stands for one that is to be matched to the input. While training this updates the running averages.
        """
        if self.statistics == "live" or (self.alpha is not None and self.beta is not None):
            return self.alpha, self.beta
        if self.training and query.numel() == 0:
            return self.alpha, self.beta  # nothing to measure
        if self.training:
            moments = measure_moments(
                query,
                key,
                scope=self.scope,
                key_padding_mask=key_padding_mask,
                query_padding_mask=query_padding_mask,
            )
            self._track(moments)
            return self.alpha, self.beta
        moments = Moments(self.sigma_q, self.sigma_k, self.row_variance, self.row_variance, self.num_keys)
        alpha, beta = moments.scales(head_dim=self.head_dim, matching=self.matching)
        return (alpha if self.alpha is None else self.alpha), (beta if self.beta is None else self.beta)

    def _track(self, moments: Moments) -> None:
        weight = torch.where(self.num_batches_tracked == 0, 1.0, self.momentum)
        real = (moments.num_keys > 0).expand_as(moments.sigma_q)  # a sample without kept tokens says nothing
        for name in RUNNING:
            average, values = getattr(self, name), getattr(moments, name).expand_as(moments.sigma_q)
            new = values.where(real, 0.0).sum(dim=0) / real.sum(dim=0).clamp(min=1)
            new = torch.where(real.any(dim=0), new.to(average.dtype), average)
            average.lerp_(new, weight.to(average.dtype))
        self.num_batches_tracked.add_(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LLNAttention":
        """Moves as any module, but keeps the running averages in float32, because a variance overflows float16."""
        before = {name: getattr(self, name) for name in RUNNING if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, average in before.items():
            moved = getattr(self, name)
            self._buffers[name] = average.to(moved.device, torch.promote_types(moved.dtype, torch.float32))
        return self

    def _check_heads(self, query: Tensor) -> None:
        if query.dim() == 4 and (query.shape[1], query.shape[3]) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"built for num_heads={self.num_heads} and head_dim={self.head_dim}, got query {tuple(query.shape)}, "
                "which should be (batch, heads, tokens, features)"
            )

    def extra_repr(self) -> str:
        given = "" if self.alpha is None and self.beta is None else f", alpha={self.alpha}, beta={self.beta}"
        return (
            f"{self.num_heads}, {self.head_dim}, matching={self.matching!r}, scope={self.scope!r}, "
            f"statistics={self.statistics!r}{given}"
        )


class JoinedBranches(nn.Module):
    """What LLN attention says of the far and block-diagonal attention of the near, put together.

    - `combine="average"`: half of each, the paper's layer;
    - `combine="ratio"`: a learned share r of LLN for each head and 1 - r of the blocks;
    - `combine="scale"`: a learned factor for each branch, head and value feature.

    `share` is what LLN has at first where it is learned.
    """

    def _prepare_join(self, combine: Combine, share: float, num_heads: int, value_dim: int) -> None:
        check_choice("combine", combine, get_args(Combine))
        if not 0.0 < share < 1.0:
            raise ValueError(f"share must be between 0 and 1, got {share}")
        if combine == "average" and share != 0.5:
            raise ValueError(f'an average has a share of 0.5, got {share}; use combine="ratio" or "scale"')
        self.combine: Combine = combine
        if combine == "ratio":
            self.ratio_logit = nn.Parameter(torch.full((num_heads,), math.log(share / (1 - share))))
        elif combine == "scale":
            self.far_scale = nn.Parameter(torch.full((num_heads, 1, value_dim), share))
            self.near_scale = nn.Parameter(torch.full((num_heads, 1, value_dim), 1 - share))

    def join(self, far: Tensor, near: Tensor) -> Tensor:
        """The output from those of the two branches."""
        if self.combine == "average":
            return (far + near) / 2
        if self.combine == "ratio":
            share = self.ratio_logit.sigmoid().to(far.dtype)[:, None, None]
            return share * far + (1 - share) * near
        return self.far_scale.to(far.dtype) * far + self.near_scale.to(far.dtype) * near


class LLNDiagAttention(LLNAttention, JoinedBranches):
    """LLN attention for what is far and block-diagonal softmax attention for what is near (figure 3).

    `combine` and `share` say how the two are put together, see `JoinedBranches`; `combine="scale"` needs `value_dim`
    where it is not `head_dim`.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        block_size: int = 64,
        combine: Combine = "average",
        share: float = 0.5,
        value_dim: int | None = None,
        matching: Matching = "variance",
        scope: Scope = "sample",
        statistics: Statistics = "live",
        momentum: float = 0.1,
        alpha: float | None = None,
        beta: float | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_dim,
            matching=matching,
            scope=scope,
            statistics=statistics,
            momentum=momentum,
            alpha=alpha,
            beta=beta,
        )
        check_block_size(block_size)
        self.block_size = block_size
        self._prepare_join(combine, share, num_heads, value_dim or head_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
        if self.combine == "average" and query_padding_mask is None:  # one call, which a fused kernel takes whole
            self._check_heads(query)
            alpha, beta = self.scales(query, key, key_padding_mask=key_padding_mask)
            scales: dict[str, Any] = {"alpha": alpha, "beta": beta, "matching": self.matching, "scope": self.scope}
            return lln_diag_attention(query, key, value, block_size=self.block_size, **masks, **scales)
        near = block_diagonal_attention(query, key, value, block_size=self.block_size, **masks)
        return self.join(super().forward(query, key, value, query_padding_mask=query_padding_mask, **masks), near)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}, combine={self.combine!r}"


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
        # fast path; it does not where queries, keys and values differ in width, so that is what this module says.
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
        """Inputs (N, B, E), or (B, N, E) with `batch_first`, or (N, E); outputs alike, and the weights if asked for."""
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
        """Look at the attention once more without counting the input twice in its running averages."""
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
