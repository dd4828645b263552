"""DeltaNet: linear attention whose memory is corrected, key by key, instead of summed up."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lln.backends.torch.causal import CAUSAL_CHUNK
from lln.zoo.linear import recurrent_attention
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import blocks, join_blocks


@register(
    name="delta",
    title="DeltaNet",
    paper="Schlag, Irie, Schmidhuber: Linear Transformers Are Secretly Fast Weight Programmers (2021); Yang et al.: "
    "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
    year=2024,
    time="N D²",
    memory="N D",
    learned="strengths from the keys of a head: a vector of D features and a bias",
    causal=True,
    padding=True,
    cross=False,
    checked_against="transformers 5.22.2 (torch_chunk_gated_delta_rule and torch_recurrent_gated_delta_rule of "
    "Qwen3-Next, without decay), the explicit recurrence (both directions)",
    left_outside="the short convolutions and the activation of queries, keys and values, the norm of the output; "
    "strengths from the input of the layer (here from the keys of the head). The published form is causal; without a "
    "causal mask a second pass from the end is added",
)
class Delta(PeerMechanism):
    """S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)ᵀ k_t)ᵀ, out_t = S_tᵀ q_t, with q and k of length 1.

    The value S_(t-1)ᵀ k_t that the state holds for a key is moved to v_t by a share beta_t = sigmoid(w . k_t + b), with
    learned w and b and the key as it is given. There is no sum of weights to divide by.

    Without a causal mask a token also reads, and adds, the state of a second pass from the end after the tokens that
    follow it. Padding changes no state.

    Chunks of C tokens pass at once (Yang et al.): with B = diag(beta) and L the lower triangle of B K Kᵀ without its
    diagonal, the corrections of a chunk are (I + L)^(-1) B (V - K S), S being the state before it.
    """

    def __init__(self, *, num_heads: int, head_dim: int, max_len: int | None = None) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, 1).uniform_(-1, 1) * head_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, 1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        def step(
            q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None, state: Tensor | None, own: bool
        ) -> tuple[Tensor, Tensor]:
            beta = torch.sigmoid(k @ self.weight.to(k.dtype) + self.bias.to(k.dtype))
            return delta_sums(normalize(q, dim=-1), normalize(k, dim=-1), v, beta, state, own=own)

        return recurrent_attention(query, key, value, keep, is_causal, step=step)


def delta_sums(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None, *, own: bool
) -> tuple[Tensor, Tensor]:
    """S_tᵀ q_t for each token, (B, H, T, V), and the state (B, H, D, V) after the last; beta is (B, H, T, 1).

    With `own=False` a token reads S_(t-1), the state before itself.
    """
    tokens, width = q.shape[2], v.shape[3]
    size = min(tokens, CAUSAL_CHUNK)
    q, k, v, beta = (blocks(x, size) for x in (q, k, v, beta))
    # Corrections are `written` - `read` S, and with them the output is linear in the state before the chunk, too.
    system = (beta * (k @ k.mT)).tril(-1)
    solved = torch.linalg.solve_triangular(system, beta * torch.cat((v, k), dim=-1), upper=False, unitriangular=True)
    written, read = solved[..., :width], solved[..., width:]
    weights = (q @ k.mT).tril(0 if own else -1)
    before = [torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]) if state is None else state]
    for added, removed in zip((k.mT @ written).unbind(dim=2), (k.mT @ read).unbind(dim=2), strict=True):
        before.append(before[-1] + added - removed @ before[-1])
    output = weights @ written + (q - weights @ read) @ torch.stack(before[:-1], dim=2)
    return join_blocks(output, tokens), before[-1]
