"""Longformer: a sliding window, and a few tokens that attend to all tokens and that all tokens attend to."""

from functools import partial

import torch
from torch import Tensor

from lln.checks import check_at_least
from lln.masks import kept_tokens
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import Extra, masked_softmax, on_kept_tokens, window_attention


@register(
    name="longformer",
    title="Longformer",
    paper="Beltagy, Peters, Cohan: Longformer: The Long-Document Transformer",
    year=2020,
    time="N (w + g) D",
    memory="N (w + g)",
    causal=True,
    padding=True,
    cross=False,
    checked_against="transformers 5.22.2 (LongformerSelfAttention), local-attention 1.11.2 (causal)",
    left_outside="projections of their own for the global tokens; dilated windows",
)
class Longformer(PeerMechanism):
    """out_i = sum over j in S_i of softmax(q_i . k_j / sqrt(D)) v_j, where

        S_i = {j : |i - j| <= w or j < g}  for i >= g      S_i = everything  for i < g

    with w = `window` tokens on each side and g = `global_tokens`, and no j > i with a causal mask. Positions count kept
    tokens. The paper has w = 256 and chooses its global tokens by the task; 64 makes it cost about as much as the
    blocks of the other mechanisms, and one global token is the classification token of BERT.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        window: int = 64,
        global_tokens: int = 1,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(0, window=window, global_tokens=global_tokens)
        self.window, self.global_tokens = window, global_tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        return on_kept_tokens(partial(self._mix, is_causal=is_causal), query, key, value, keep)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, *, is_causal: bool) -> Tensor:
        num_global = min(self.global_tokens, query.shape[2])
        visible = kept_tokens(kept, query)
        position = torch.arange(query.shape[2], device=query.device)

        def may_attend(i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j <= self.window) if is_causal else (i - j).abs() <= self.window

        allowed = visible[:, None, :num_global]
        if is_causal:
            allowed = allowed & (position[:, None] >= position[:num_global])
        output = window_attention(
            query,
            key,
            value,
            visible & (position >= num_global),  # a global token counts once, also when it lies in the window
            block=max(self.window, 1),
            before=self.window,
            after=0 if is_causal else self.window,
            may_attend=may_attend,
            extra=Extra(key[:, :, :num_global], value[:, :, :num_global], allowed),
        )
        if is_causal or num_global == 0:  # all that a global token may attend to with a causal mask is global too
            return output
        scores = query[:, :, :num_global] * self.head_dim**-0.5 @ key.mT
        everything = masked_softmax(scores, visible[:, None, None]) @ value
        return torch.cat((everything, output[:, :, num_global:]), dim=2)
