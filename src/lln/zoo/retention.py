"""Retention, the token mixing of RetNet: linear attention that fades at a fixed rate."""

import torch
from torch import Tensor

from lln.masks import fill_padding
from lln.precision import accumulator
from lln.zoo.gla import gated_sums
from lln.zoo.linear import recurrent_attention
from lln.zoo.registry import PeerMechanism, register


@register(
    name="retention",
    title="Retention (RetNet)",
    paper="Sun et al.: Retentive Network: A Successor to Transformer for Large Language Models",
    year=2023,
    time="N D²",
    memory="N D",
    causal=True,
    padding=True,
    cross=False,
    checked_against="transformers 5.22.2 (MiniMaxLightningAttention with these decays), "
    "the explicit matrix of the formula (both directions)",
    left_outside="the group norm and the gate of the output, and the scaling of scores that this norm takes out again; "
    "the rotation of queries and keys (xPos). The published form is causal; without a causal mask the decay counts the "
    "distance in both directions",
)
class Retention(PeerMechanism):
    """out_i = sum over j <= i of gamma^(i - j) q_i . k_j / sqrt(D) v_j

    with gamma = 1 - 2^(-5 - h) in head h = 0, 1, ... There is no sum of weights to divide by. Without a causal mask the
    sum is over all j, with gamma^|i - j|. Distances count kept tokens.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        heads = torch.arange(self.num_heads, dtype=torch.float64)
        gamma = (1 - 2.0 ** (-5 - heads)).to(query.device, accumulator(query.dtype))[None, :, None, None]

        def step(
            q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None, state: Tensor | None, own: bool
        ) -> tuple[Tensor, Tensor]:
            gate = fill_padding(gamma.expand(*k.shape[:3], 1), kept, 1.0)
            return gated_sums(q * self.head_dim**-0.5, k, v, gate, state, own=own)

        return recurrent_attention(query, key, value, keep, is_causal, step=step)
