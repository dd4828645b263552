"""What all attention modules on (query, key, value) have in common, and how two branches are put together."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from lln import functional, neighbors
from lln.checks import check_choice
from lln.masks import read_padding
from lln.neighbors import Past, log_far_mass, next_log_far_mass
from lln.problem import Near, TokenOptions
from lln.state import LLNState

Combine = Literal["average", "ratio", "gate", "replace", "mass", "scale"]
Branches = Literal["both", "far", "near"]


class Mechanism(nn.Module):
    """Base of all attention modules on (query, key, value), those of this file and those of `lln.zoo`.

    Its attributes and methods describe what the rest of the library may do with it: whether it takes grouped heads as
    they are, what a state of it is, and what an instrument may read. B batch, H heads, N queries, M keys.
    """

    takes_grouped_heads: ClassVar[bool] = False  # or else keys and values are repeated for it
    averages_branches: bool = True  # `join` is the mean of its branches, which a state computes by itself
    description: ClassVar[Any]  # the `lln.zoo.Description` of a registered class
    num_heads: int
    head_dim: int
    # What attends where several processes hold parts of each sequence: set by `lln.distributed.parallelize`.
    parallel: Any = None

    def _function(self, name: str) -> Callable[..., Any]:
        """A function of `lln` or `lln.neighbors`, over several processes if they hold parts of each sequence."""
        here = functional if hasattr(functional, name) else neighbors
        function: Callable[..., Any] = getattr(here if self.parallel is None else self.parallel, name)
        return function

    def init_state(
        self, batch: int, *, key_heads: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LLNState | None:
        """The state before the first token, for generation.

        Args:
            batch: samples.
            key_heads: heads of the key and the value.
            value_dim: features of a value.
            dtype: of the tokens.
            device: of the tokens.

        Returns:
            The state; None: the mechanism has no state of constant size.
        """
        return None

    def far_inputs(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inputs of LLN attention in a state; attention among neighbours takes `query` and `key` as they are.

        Args:
            query: (B, H, N, D).
            key: (B, H_k, N, D).

        Returns:
            The query and key of LLN attention, and log-weights (B, H, N) of the keys or None.
        """
        return query, key, None

    def key_weight(self, key: Tensor) -> Tensor | None:
        """Log-weights that keys have for all queries alike.

        Args:
            key: (B, H_k, N, D).

        Returns:
            (B, H, N); None: the keys have no such weights.
        """
        return None

    def log_features(
        self, query: Tensor, key: Tensor, keep_query: Tensor | None = None, keep_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The features of an attention P_ij ~ sum_l exp(a_il + b_jl).

        Args:
            query: (B, H, N, D).
            key: (B, H_k, M, D).
            keep_query: (B, N) bool with True = keep; None if all are kept.
            keep_key: (B, M), likewise.

        Returns:
            a (B, H, N, F) and b (B, H, M, F); None: it is no such attention.
        """
        return None

    def recorded_options(self, query: Tensor, key: Tensor) -> dict[str, Any] | None:
        """The options of `lln.attention_matrix` that give this attention, for instruments.

        Args:
            query: (B, H, N, D).
            key: (B, H_k, M, D).

        Returns:
            The options; None: the attention is not one of its kinds.
        """
        return None


class JoinedBranches(nn.Module):
    """The outputs of LLN attention (the far branch) and of softmax attention among neighbours (the near one), joined.

    - `combine="average"`: half of each, the paper's layer;
    - `combine="ratio"`: a learned share r of LLN for each head and 1 - r of the blocks;
    - `combine="gate"`: such a share for each query, sigmoid(g . q_i + c + ln(far / near)_i) with g and c of each head,
      from g = 0. Near is the sum of softmax attention's weights before they are normalised over the neighbours, far the
      sum of the weights that keys have for all queries alike over the other tokens that the query attends to, or else
      their number: `lln.neighbors`. Where nothing is far, the output is that of softmax attention;
    - `combine="replace"`: as a gate, with LLN attention to the far tokens alone, so that no token counts twice. In the
      place of ln(far / near) is its mean, with weights that each head learns, with the ratio that LLN attention itself
      has, `lln.neighbors.beyond_neighbors`. Not for causal attention;
    - `combine="mass"`: nothing is learned. The share of LLN for each query is sigmoid(ln(far / near)_i) with an
      estimate of ln far from the mean and covariance of the keys (`lln.neighbors.log_mean_exp`): the part of softmax
      attention's weight that lies far away, if scores are Gaussian. Not for causal attention;
    - `combine="scale"`: a learned factor for each branch, head and value feature.

    `share` is what LLN has at first where it is learned.
    """

    near: Near
    block_size: int

    def _prepare_join(self, combine: Combine, share: float, num_heads: int, head_dim: int, value_dim: int) -> None:
        check_choice("combine", combine, get_args(Combine))
        if not 0.0 < share < 1.0:
            raise ValueError(f"share must be between 0 and 1, got {share}")
        if combine == "average" and share != 0.5:
            raise ValueError(f'an average has a share of 0.5, got {share}; use combine="ratio" or "scale"')
        if combine == "mass" and share != 0.5:
            raise ValueError(f'combine="mass" estimates the share, got {share}; leave it out, or use combine="ratio"')
        self.combine: Combine = combine
        self.branches: Branches = "both"
        self.averages_branches = combine == "average"
        if combine in ("ratio", "gate", "replace"):
            self.ratio_logit = nn.Parameter(torch.full((num_heads,), math.log(share / (1 - share))))
            if combine != "ratio":
                self.gate = nn.Parameter(torch.zeros(num_heads, head_dim))
            if combine == "replace":
                self.ratio_mix = nn.Parameter(torch.full((num_heads,), 0.5))
        elif combine == "scale":
            self.far_scale = nn.Parameter(torch.full((num_heads, 1, value_dim), share))
            self.near_scale = nn.Parameter(torch.full((num_heads, 1, value_dim), 1 - share))

    def join(self, far: Tensor, near: Tensor, ratio: Tensor | None = None, *, query: Tensor) -> Tensor:
        """The output from those of the two branches, the query (B, H, N, D) and the ratio of a gate."""
        if self.branches != "both":
            return far if self.branches == "far" else near
        if self.combine == "average":
            return (far + near) / 2
        share = self.far_share(query.to(far.dtype), ratio)
        if share is not None:
            return torch.lerp(near, far, share)
        return self.far_scale.to(far.dtype) * far + self.near_scale.to(far.dtype) * near

    def far_share(self, query: Tensor, ratio: Tensor | None) -> Tensor | None:
        """The share of the far branch, (1, H, 1, 1) or (B, H, N, 1), for the query (B, H, N, D).

        None where it is a half, or where features are scaled one by one.
        """
        if self.combine == "mass":
            assert ratio is not None
            return ratio.to(query.dtype)[..., None].sigmoid()
        if self.combine not in ("ratio", "gate", "replace"):
            return None
        logit = self.ratio_logit.to(query.dtype)[None, :, None, None]
        if self.combine != "ratio":
            assert ratio is not None
            logit = logit + query @ self.gate.to(query.dtype)[..., None] + ratio.to(query.dtype)[..., None]
        return logit.sigmoid()

    def near_branch(
        self, query: Tensor, key: Tensor, value: Tensor, **tokens: Unpack[TokenOptions]
    ) -> tuple[Tensor, Tensor | None]:
        """Softmax attention among neighbours, and for a gate or a mass ln(far / near) of each query, (B, H, N)."""
        options: dict[str, Any] = {"near": self.near, "block_size": self.block_size, **tokens}
        if tokens.get("is_causal") and self.combine in ("mass", "replace"):
            raise ValueError(f'combine="{self.combine}" measures all keys of a sequence; causal attention takes "gate"')
        if self.combine in ("gate", "replace"):
            found: tuple[Tensor, Tensor] = self._function("near_with_mass_ratio")(
                query, key, value, self.key_weight(key), **options
            )
            return found
        if self.combine == "mass":
            return neighbors.near_with_mass_ratio(query, key, value, from_moments=True, **options)
        return self._function("block_diagonal_attention")(query, key, value, **options), None

    def joined_branches(
        self, far: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, **tokens: Unpack[TokenOptions]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `join` takes; `far` computes the far branch's attention to all tokens, where that is what it takes."""
        near, ratio = self.near_branch(query, key, value, **tokens)
        if self.combine != "replace" or self.branches != "both":
            return far(), near, ratio
        keep = read_padding(tokens.get("key_padding_mask"), key)
        features = self.log_features(query, key, keep, keep)
        if features is None:
            raise ValueError(
                'combine="replace" leaves the neighbours out of the far branch, whose weights must be products of '
                'features: LLN attention with statistics="learned", or such a mechanism in a hybrid; use "gate"'
            )
        options: dict[str, Any] = {name: x for name, x in tokens.items() if name != "is_causal"}
        options |= {"near": self.near, "block_size": self.block_size}
        beyond, own = self._function("beyond_neighbors")(*features, value, **options)
        assert ratio is not None
        is_far = (own > -math.inf) & (ratio > -math.inf)  # where nothing is far, or has no weight
        own, ratio = (x.to(own.dtype).where(is_far, 0.0) for x in (own, ratio))
        mix = self.ratio_mix.to(own.dtype)[:, None]
        return beyond, near, torch.lerp(ratio, own, mix).masked_fill(~is_far, -math.inf)

    def log_far_mass(self, key: Tensor, keep: Tensor | None, state: LLNState) -> Tensor | None:
        """ln(far) of the next tokens of a state, (B, H, N), before it is advanced; None: the branches have no gate.

        Less the log-sum-exp that `LLNState.branches` gives it is the ratio.
        """
        if self.combine != "gate":
            return None
        assert state.recent_key is not None
        recent = self.key_weight(state.recent_key.to(key.dtype))
        # The features of a key with a weight sum to that weight.
        total = None if recent is None else state.mass.logsumexp(dim=-1)
        if recent is not None and total is not None and key.shape[2] == 1 and keep is None:
            return next_log_far_mass(recent, total, state.count, near=self.near)
        weight = self.key_weight(key)
        if weight is None:
            weight = state.mass.new_zeros(key.shape[0], 1, key.shape[2])
        options: dict[str, Any] = {"near": self.near, "block_size": self.block_size, "is_causal": True}
        return log_far_mass(weight, keep, **options, past=Past(state.count, recent, total))

    if TYPE_CHECKING:

        def _function(self, name: str) -> Callable[..., Any]: ...

        def key_weight(self, key: Tensor) -> Tensor | None: ...

        def log_features(
            self, query: Tensor, key: Tensor, keep_query: Tensor | None = None, keep_key: Tensor | None = None
        ) -> tuple[Tensor, Tensor] | None: ...

    def share_parameters(self) -> list[nn.Parameter]:
        """The parameters that decide how the branches are joined."""
        names = ("ratio_logit", "gate", "ratio_mix", "far_scale", "near_scale")
        return [parameter for name, parameter in self.named_parameters(recurse=False) if name in names]
