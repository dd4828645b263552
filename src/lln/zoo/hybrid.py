"""Hybrid: any mechanism for what is far, softmax attention among neighbours for what is near."""

from typing import Any

from torch import Tensor

from lln.checks import check_block_size, check_choice
from lln.mechanism import Combine, JoinedBranches
from lln.problem import NEARS, Near
from lln.zoo.registry import PeerMechanism, build, register


@register(
    name="hybrid",
    title="Linear + window",
    paper="Zhang et al.: LoLCATs: On Low-Rank Linearizing of Large Language Models",
    year=2024,
    time="N D (D + C)",
    memory="N (D + C)",
    learned="those of the far mechanism, and the shares of both",
    causal=True,
    padding=True,
    cross=False,
    checked_against="the explicit sum of its two branches",
    left_outside="one softmax over both branches, in place of which heads learn the shares",
)
class Hybrid(JoinedBranches, PeerMechanism):
    """r_i far_i + (1 - r_i) near_i, shares as in `lln.mechanism.JoinedBranches`; `far` names a mechanism of the zoo."""

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        far: str = "elu",
        far_options: dict[str, Any] | None = None,
        near: Near = "window",
        block_size: int = 64,
        combine: Combine = "gate",
        share: float = 0.5,
        value_dim: int | None = None,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_block_size(block_size)
        check_choice("near", near, NEARS)
        self.near: Near = near
        self.block_size = block_size
        self.far = build(far, num_heads=num_heads, head_dim=head_dim, max_len=max_len, **far_options or {})
        self._prepare_join(combine, share, num_heads, head_dim, value_dim or head_dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        tokens: Any = {"key_padding_mask": keep, "is_causal": is_causal}
        joined = self.joined_branches(lambda: self.far(query, key, value, **tokens), query, key, value, **tokens)
        return self.join(*joined, query=query)

    def log_features(
        self, query: Tensor, key: Tensor, keep_query: Tensor | None = None, keep_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        return self.far.log_features(query, key, keep_query, keep_key)
