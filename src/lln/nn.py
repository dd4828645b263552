"""Modules: LLN attention, alone and with its companion, on (query, key, value)."""

from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from lln.backends.torch.summary import repeat_heads
from lln.checks import check_at_least, check_block_size, check_choice, check_scale
from lln.features import HeadFeatures
from lln.masks import read_paddings
from lln.matching.curves import FORMS, MATCHINGS, Form, Matching
from lln.matching.moments import SCOPES, Moments, Scope
from lln.mechanism import Combine, JoinedBranches
from lln.precision import accumulator
from lln.problem import NEARS, Centers, Near, QueryOptions
from lln.running import RunningAverages
from lln.state import LLNState

Statistics = Literal["live", "running", "learned"]


class LLNAttention(RunningAverages):
    """Linear Log-Normal attention with its settings, see `lln.lln_attention`.

    Where alpha and beta come from, unless they are given:

    - `statistics="live"`: from the moments of each input, in training and evaluation alike;
    - `statistics="running"`: as BatchNorm, from each input while training, when moving averages of the moments of each
      head are kept, and from those averages in evaluation. A sequence is then encoded with the same alpha and beta
      however it is split, and generation needs no statistics. Before the first training step the averages are those of
      a standard Gaussian. Under data parallelism each process keeps its own, as BatchNorm's do.
    - `statistics="learned"`: from none. Scales and centres of each head are parameters, and with `projection` so are
      the features that queries and keys are mapped to: see `lln.features`. `lln.linearize` finds them for a pretrained
      model.

    Args:
        num_heads, head_dim: H and D.
        matching, scope, form, alpha, beta: as in `lln.lln_attention`; alpha and beta are numbers. `form="decomposed"`
            has centres too: means of each sample, or with `statistics="running"` moving averages of them in evaluation,
            and in causal attention always.
        statistics: see above.
        momentum: the share of a new batch in the averages.
        num_key_heads: H_k, by default H; needed for centres and learned features where there are fewer key heads.
        projection, feature_dim: learned maps to that many features, D by default.
        signed: each learned feature and its negative.

    Raises:
        TypeError, ValueError: options that do not fit each other.

    Example:
        >>> attention = lln.LLNAttention(8, 64, statistics="running")
        >>> attention(*torch.randn(3, 2, 8, 100, 64), is_causal=True).shape
        torch.Size([2, 8, 100, 64])
    """

    takes_grouped_heads = True

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
        projection: bool = False,
        signed: bool = False,
        feature_dim: int | None = None,
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
        if (projection or signed) and statistics != "learned":
            raise ValueError(f'projection and signed are for statistics="learned", got {statistics!r}')
        if feature_dim is not None:
            check_at_least(1, feature_dim=feature_dim)
            if not projection:
                raise ValueError("feature_dim is the number of features that a projection maps to; set projection=True")
        self.features: HeadFeatures | None = None
        if statistics == "learned":
            if alpha is not None or beta is not None:
                raise ValueError('with statistics="learned" alpha and beta are parameters; leave them out')
            options: dict[str, Any] = {
                "form": form,
                "projection": projection,
                "signed": signed,
                "feature_dim": feature_dim,
            }
            self.features = HeadFeatures(num_heads, head_dim, num_key_heads=num_key_heads, **options)
        if statistics == "running":
            self._register_averages()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **tokens: Unpack[QueryOptions]) -> Tensor:
        """The attention of query (B, H, N, D) over key and value, (B, H, N, Dv).

        Args:
            query, key, value: as in `lln.lln_attention`.
            **tokens: `key_padding_mask`, `query_padding_mask`, `cu_seqlens` and `is_causal`.

        Raises:
            TypeError, ValueError: as `lln.lln_attention`, and tokens of other heads than those of the module.
        """
        return self._far(query, key, value, tokens)

    def _far(self, query: Tensor, key: Tensor, value: Tensor, tokens: Any) -> Tensor:
        """LLN attention."""
        if self.features is None:
            output: Tensor = self._function("lln_attention")(query, key, value, **self._options(query, key, tokens))
            return output
        self._check(query, tokens)
        masks = (tokens.get(name) for name in ("key_padding_mask", "query_padding_mask"))
        a, b, weight = self._features(query, key, *read_paddings(query, key, *masks))
        options: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "form": "paper" if self.form == "paper" else "unbiased"}
        output = self._function("lln_attention")(a, b, value.to(a.dtype), **tokens, **options, key_weight=weight)
        return output.to(value.dtype)

    def _features(
        self, query: Tensor, key: Tensor, keep_query: Tensor | None = None, keep_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self.features is not None
        dtype = accumulator(query.dtype)
        features: tuple[Tensor, Tensor, Tensor | None] = self.features(
            query.to(dtype), key.to(dtype), keep_query, keep_key
        )
        return features

    def far_inputs(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return (query, key, None) if self.features is None else self._features(query, key)

    def key_weight(self, key: Tensor) -> Tensor | None:
        return None if self.features is None else self.features.key_weight(key.to(accumulator(key.dtype)))

    def log_features(
        self, query: Tensor, key: Tensor, keep_query: Tensor | None = None, keep_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        if self.features is None:
            return None
        a, b, weight = self._features(query, key, keep_query, keep_key)
        if self.form != "paper":
            b = b - b.logsumexp(dim=-1, keepdim=True)
        b = repeat_heads(b, query.shape[1] // key.shape[1])
        return a, b if weight is None else b + weight[..., None]

    def _options(self, query: Tensor, key: Tensor, tokens: Any) -> dict[str, Any]:
        """The options of `lln.lln_attention` for these tokens; while training this updates the running averages."""
        self._check(query, tokens)
        if tokens.get("cu_seqlens") is not None and self.training and self.statistics == "running":
            raise ValueError(
                'statistics="running" are averages over samples, which packed sequences (cu_seqlens) are not; while '
                'training pad the sequences, or use statistics="live"'
            )
        if self.parallel is not None and self.training and self.statistics == "running":
            raise ValueError('averages of statistics="running" are of whole sequences; train parts with "live" ones')
        masks = {name: tokens.get(name) for name in ("key_padding_mask", "query_padding_mask")}
        alpha, beta = self.scales(query, key, **masks)
        options: dict[str, Any] = {"alpha": alpha, "beta": beta, "matching": self.matching, "scope": self.scope}
        if self.form != "paper":
            options["form"] = self.form
            options["centers"] = self.centers(is_causal=tokens.get("is_causal", False))
        return {**tokens, **options}

    def _check(self, query: Tensor, tokens: Any) -> None:
        self._check_heads(query)
        unknown = tokens.keys() - {"key_padding_mask", "query_padding_mask", "cu_seqlens", "is_causal"}
        if unknown:
            raise TypeError(f"{type(self).__name__} was not built to be called with {', '.join(sorted(unknown))}")

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

    def init_state(
        self, batch: int, *, key_heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LLNState | None:
        if self.features is not None:
            near = self._near_options()
            near |= {"near_dim": self.head_dim} if near else {}
            return LLNState.empty(
                batch,
                self.num_heads,
                self.features.num_features,
                value_dim,
                key_heads=key_heads,
                alpha=1.0,
                beta=1.0,
                form="paper" if self.form == "paper" else "unbiased",
                dtype=dtype,
                device=device,
                **near,
            )
        centers = self.centers(is_causal=True)
        if self.form == "decomposed" and centers is None:  # means of a sample depend on later tokens
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
            form=self.form,
            centers=None if centers is None else (centers[0].to(device), centers[1].to(device)),
            dtype=dtype,
            device=device,
            **self._near_options(),
        )

    def _near_options(self) -> dict[str, Any]:
        """The options of a state that are those of softmax attention among neighbours."""
        return {}

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        if self.features is not None:
            return {"kind": "lln", "features": self.log_features(query, key)}
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


class LLNDiagAttention(JoinedBranches, LLNAttention):
    """LLN attention for what is far and softmax attention among neighbours for what is near (figure 3).

    Args:
        num_heads, head_dim, **options: those of `LLNAttention`.
        near, block_size: where the neighbours of a token are, see `lln.block_diagonal_attention`.
        combine, share: how the two are put together, see `lln.mechanism.JoinedBranches`.
        value_dim: for `combine="scale"`, where it is not `head_dim`.

    Raises:
        TypeError, ValueError: options that do not fit each other.

    Example:
        >>> attention = lln.LLNDiagAttention(8, 64, near="window", combine="gate")
        >>> attention(*torch.randn(3, 2, 8, 100, 64)).shape
        torch.Size([2, 8, 100, 64])
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
        projection: bool = False,
        signed: bool = False,
        feature_dim: int | None = None,
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
            projection=projection,
            signed=signed,
            feature_dim=feature_dim,
        )
        check_block_size(block_size)
        check_choice("near", near, NEARS)
        self.block_size = block_size
        self.near: Near = near
        if combine == "replace" and statistics != "learned":
            raise ValueError(f'combine="replace" is for statistics="learned", got {statistics!r}; use "gate" or "mass"')
        self._prepare_join(combine, share, num_heads, head_dim, value_dim or head_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **tokens: Unpack[QueryOptions]) -> Tensor:
        near = self._near_options()
        is_average = self.combine == "average" and self.branches == "both" and self.features is None
        if is_average and tokens.get("query_padding_mask") is None:  # one call, which a backend fuses
            options = self._options(query, key, tokens)
            options.pop("query_padding_mask", None)
            output: Tensor = self._function("lln_diag_attention")(query, key, value, **near, **options)
            return output
        shared: Any = {name: x for name, x in tokens.items() if name in ("key_padding_mask", "cu_seqlens", "is_causal")}
        joined = self.joined_branches(lambda: self._far(query, key, value, tokens), query, key, value, **shared)
        return self.join(*joined, query=query)

    def _near_options(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "near": self.near}

    def init_state(self, batch: int, **options: Any) -> LLNState | None:
        # Shares that depend on all keys of a sequence are refused in causal attention.
        return None if self.combine in ("mass", "replace") else super().init_state(batch, **options)

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        far = super().recorded_options(query, key)
        if far is None or self.combine == "scale":  # which leaves no one matrix: its LLN branch is read then
            return far
        return far | {"kind": "lln_diag", "block_size": self.block_size, "near": self.near}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, near={self.near!r}, block_size={self.block_size}, combine={self.combine!r}"
