"""Modules: LLN attention, alone and with its companion, on (query, key, value)."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from lln.checks import check_at_least, check_block_size, check_choice, check_scale
from lln.curves import FORMS, MATCHINGS, Form, Matching
from lln.forms import token_mean
from lln.functional import block_diagonal_attention, lln_attention, lln_diag_attention
from lln.masks import read_paddings
from lln.moments import SCOPES, Moments, Scope, measure_moments
from lln.problem import NEARS, Centers, Near, QueryOptions
from lln.state import LLNState

Statistics = Literal["live", "running"]
Combine = Literal["average", "ratio", "scale"]
RUNNING = ("sigma_q", "sigma_k", "row_variance", "num_keys")
CENTERS = ("center_q", "center_k")


class Mechanism(nn.Module):
    """Base of all attention modules on (query, key, value), those of this file and those of `lln.zoo`.

    A mechanism says itself what the rest of the library may do with it: whether it takes grouped heads as they are,
    what a state of it is, and what an instrument may read.
    """

    takes_grouped_heads: ClassVar[bool] = False  # or else keys and values are repeated for it
    record: ClassVar[Any]  # what `lln.zoo` knows about it
    num_heads: int
    head_dim: int

    def init_state(
        self, batch: int, *, key_heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LLNState | None:
        """The state before the first token, for generation; None: the mechanism has no state of constant size."""
        return None

    def join(self, far: Tensor, near: Tensor) -> Tensor:
        """The output from those of the two branches of a state."""
        return (far + near) / 2

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        """The options of `lln.attention_matrix` that give this attention; None: it is not one of its kinds."""
        return None


class LLNAttention(Mechanism):
    """Linear Log-Normal attention with its settings, see `lln.lln_attention`.

    Where alpha and beta come from, unless they are given:

    - `statistics="live"`: from the moments of each input, in training and evaluation alike;
    - `statistics="running"`: as BatchNorm, from each input while training, when moving averages of the moments of each
      head are kept (`momentum`), and from those averages in evaluation. A sequence is then encoded with the same alpha
      and beta however it is split, and generation needs no statistics. Before the first training step the averages are
      those of a standard Gaussian. Under data parallelism each process keeps its own, as BatchNorm's do.

    `form="decomposed"` has centres too: means of each sample, or with `statistics="running"` moving averages of them in
    evaluation, and in causal attention always. `num_key_heads` is then needed where there are fewer key heads.
    """

    takes_grouped_heads = True

    sigma_q: Tensor
    sigma_k: Tensor
    row_variance: Tensor
    num_keys: Tensor
    center_q: Tensor
    center_k: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        matching: Matching = "variance",
        scope: Scope = "sample",
        form: Form = "paper",
        statistics: Statistics = "live",
        momentum: float = 0.1,
        alpha: float | None = None,
        beta: float | None = None,
        num_key_heads: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("matching", matching, MATCHINGS)
        check_choice("scope", scope, SCOPES)
        check_choice("form", form, FORMS)
        check_choice("statistics", statistics, get_args(Statistics))
        if num_heads < 1 or head_dim < 1:
            raise ValueError(f"at least one head and one feature are needed, got {num_heads} heads of {head_dim}")
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        check_at_least(1, num_key_heads=num_key_heads)
        if num_heads % num_key_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_key_heads={num_key_heads}")
        for name, scale in (("alpha", alpha), ("beta", beta)):
            check_scale(name, scale, batch=1, heads=num_heads, tokens=1)
        if not 0.0 < momentum <= 1.0:
            raise ValueError(
                f"momentum must be above 0 and at most 1, got {momentum}; 0.1 follows the last ten batches"
            )
        self.num_heads, self.head_dim, self.num_key_heads = num_heads, head_dim, num_key_heads
        self.matching: Matching = matching
        self.scope: Scope = scope
        self.form: Form = form
        self.statistics: Statistics = statistics
        self.momentum, self.alpha, self.beta = momentum, alpha, beta
        if statistics == "running":
            for name in RUNNING:
                self.register_buffer(name, torch.ones(num_heads))
            self.num_keys.fill_(1024.0)
            if form == "decomposed":
                self.register_buffer("center_q", torch.zeros(num_heads, head_dim))
                self.register_buffer("center_k", torch.zeros(num_key_heads, head_dim))
            self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **tokens: Unpack[QueryOptions]) -> Tensor:
        """The attention of query (B, H, N, D) over key and value, (B, H, N, Dv).

        Args:
            query, key, value: as in `lln.lln_attention`.
            **tokens: `key_padding_mask`, `query_padding_mask`, `cu_seqlens` and `is_causal`.
        """
        return lln_attention(query, key, value, **self._options(query, key, tokens))

    def _options(self, query: Tensor, key: Tensor, tokens: Any) -> dict[str, Any]:
        """The options of `lln.lln_attention` for these tokens; while training this updates the running averages."""
        self._check_heads(query)
        unknown = tokens.keys() - {"key_padding_mask", "query_padding_mask", "cu_seqlens", "is_causal"}
        if unknown:
            raise TypeError(f"{type(self).__name__} was not built to be called with {', '.join(sorted(unknown))}")
        masks = {name: tokens.get(name) for name in ("key_padding_mask", "query_padding_mask")}
        alpha, beta = self.scales(query, key, **masks)
        options: dict[str, Any] = {"alpha": alpha, "beta": beta, "matching": self.matching, "scope": self.scope}
        if self.form != "paper":
            options["form"] = self.form
            options["centers"] = self.centers(is_causal=tokens.get("is_causal", False))
        return {**tokens, **options}

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
        are_given = self.alpha is not None and self.beta is not None
        if self.statistics == "live" or (are_given and self.form != "decomposed"):
            return self.alpha, self.beta
        if self.training:
            if query.numel() > 0:
                self._track(query, key, key_padding_mask, query_padding_mask)
            return self.alpha, self.beta
        moments = Moments(self.sigma_q, self.sigma_k, self.row_variance, self.row_variance, self.num_keys)
        alpha, beta = moments.scales(head_dim=self.head_dim, matching=self.matching, form=self.form)
        return (alpha if self.alpha is None else self.alpha), (beta if self.beta is None else self.beta)

    def centers(self, *, is_causal: bool) -> Centers | None:
        """The centres of the decomposed form that do not follow from the input; None: those of each sample."""
        if self.form != "decomposed" or self.statistics == "live" or (self.training and not is_causal):
            return None
        return self.center_q, self.center_k

    def _track(self, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> None:
        weight = torch.where(self.num_batches_tracked == 0, 1.0, self.momentum)
        query, key = query.detach(), key.detach()
        keep_query, keep_key = read_paddings(query, key, key_mask, query_mask)
        if self.form == "decomposed":
            for name, x, keep in zip(CENTERS, (query, key), (keep_query, keep_key), strict=True):
                mean = token_mean(x, keep)
                real = torch.ones_like(mean[:, :1, :1]) if keep is None else keep.any(dim=1).to(mean)[:, None, None]
                new = (mean * real).sum(dim=0) / real.sum(dim=0).clamp(min=1)
                self._update(name, new, real.any(), weight)
            query, key = (x - token_mean(x, keep)[:, :, None] for x, keep in ((query, keep_query), (key, keep_key)))
        moments = measure_moments(
            query, key, scope=self.scope, key_padding_mask=keep_key, query_padding_mask=keep_query
        )
        real = (moments.num_keys > 0).expand_as(moments.sigma_q)  # a sample without kept tokens says nothing
        for name in RUNNING:
            values = getattr(moments, name).expand_as(moments.sigma_q)
            new = values.where(real, 0.0).sum(dim=0) / real.sum(dim=0).clamp(min=1)
            self._update(name, new, real.any(dim=0), weight)
        self.num_batches_tracked.add_(1)

    def _update(self, name: str, new: Tensor, real: Tensor, weight: Tensor) -> None:
        average = getattr(self, name)
        average.lerp_(torch.where(real, new.to(average.dtype), average), weight.to(average.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LLNAttention":
        """Moves as any module, but keeps the running averages in float32, because a variance overflows float16."""
        before = {name: getattr(self, name) for name in (*RUNNING, *CENTERS) if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, average in before.items():
            moved = getattr(self, name)
            self._buffers[name] = average.to(moved.device, torch.promote_types(moved.dtype, torch.float32))
        return self

    def init_state(
        self, batch: int, *, key_heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LLNState | None:
        if self.form != "paper":
            return None
        like = torch.empty(batch, self.num_heads, 0, self.head_dim, dtype=dtype, device=device)
        alpha, beta = (self.alpha, self.beta) if self.training else self.scales(like, like)
        return LLNState.empty(
            batch,
            self.num_heads,
            self.head_dim,
            value_dim,
            key_heads=key_heads,
            alpha=alpha,
            beta=beta,
            matching=self.matching,
            dtype=dtype,
            device=device,
        )

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        # While training `scales` would update the running averages.
        alpha, beta = (self.alpha, self.beta) if self.training else self.scales(query, key)
        options: dict[str, Any] = {"kind": "lln", "matching": self.matching, "scope": self.scope, "form": self.form}
        if (centers := self.centers(is_causal=False)) is not None:
            options["centers"] = centers
        return options | {"alpha": alpha, "beta": beta}

    def _check_heads(self, query: Tensor) -> None:
        if query.dim() == 4 and (query.shape[1], query.shape[3]) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"{type(self).__name__} was built for num_heads={self.num_heads} and head_dim={self.head_dim}, got "
                f"query {tuple(query.shape)}, which should be (batch, heads, tokens, features)"
            )

    def extra_repr(self) -> str:
        given = "" if self.alpha is None and self.beta is None else f", alpha={self.alpha}, beta={self.beta}"
        return (
            f"{self.num_heads}, {self.head_dim}, matching={self.matching!r}, scope={self.scope!r}, "
            f"form={self.form!r}, statistics={self.statistics!r}{given}"
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


class LLNDiagAttention(JoinedBranches, LLNAttention):
    """LLN attention for what is far and softmax attention among neighbours for what is near (figure 3).

    The neighbours are those of a block or of a sliding window: `near` and `block_size`, see
    `lln.block_diagonal_attention`. `combine` and `share` say how the two are put together, see `JoinedBranches`;
    `combine="scale"` needs `value_dim` where it is not `head_dim`. Other options are those of `LLNAttention`.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        block_size: int = 64,
        near: Near = "blocks",
        combine: Combine = "average",
        share: float = 0.5,
        value_dim: int | None = None,
        matching: Matching = "variance",
        scope: Scope = "sample",
        form: Form = "paper",
        statistics: Statistics = "live",
        momentum: float = 0.1,
        alpha: float | None = None,
        beta: float | None = None,
        num_key_heads: int | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_dim,
            matching=matching,
            scope=scope,
            form=form,
            statistics=statistics,
            momentum=momentum,
            alpha=alpha,
            beta=beta,
            num_key_heads=num_key_heads,
        )
        check_block_size(block_size)
        check_choice("near", near, NEARS)
        self.block_size = block_size
        self.near: Near = near
        self._prepare_join(combine, share, num_heads, value_dim or head_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **tokens: Unpack[QueryOptions]) -> Tensor:
        near: dict[str, Any] = {"block_size": self.block_size, "near": self.near}
        options = self._options(query, key, tokens)
        if self.combine == "average" and tokens.get("query_padding_mask") is None:  # one call, which a backend fuses
            options.pop("query_padding_mask", None)
            return lln_diag_attention(query, key, value, **near, **options)
        for name in ("key_padding_mask", "cu_seqlens", "is_causal"):
            if name in tokens:
                near[name] = tokens.get(name)
        far = lln_attention(query, key, value, **options)
        return self.join(far, block_diagonal_attention(query, key, value, **near))

    def init_state(
        self, batch: int, *, key_heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LLNState | None:
        shape: dict[str, Any] = {"key_heads": key_heads, "value_dim": value_dim, "dtype": dtype, "device": device}
        far = super().init_state(batch, **shape)
        if far is None or self.near == "window":
            return None
        options: dict[str, Any] = {"alpha": far.alpha, "beta": far.beta, "matching": self.matching}
        return LLNState.empty(batch, self.num_heads, self.head_dim, **shape, **options, block_size=self.block_size)

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        far = super().recorded_options(query, key)
        if far is None or self.combine == "scale":  # which leaves no one matrix: its LLN branch is read then
            return far
        if self.near == "window":
            return None
        return far | {"kind": "lln_diag", "block_size": self.block_size}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, near={self.near!r}, block_size={self.block_size}, combine={self.combine!r}"
