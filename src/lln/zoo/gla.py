"""Gated linear attention, and sums that decay from token to token.

    S_t = diag(g_t) S_(t-1) + k_t v_tᵀ        out_t = S_tᵀ q_t

or, written as a sum, out_i = sum over j <= i of (q_i * g_(j+1) * ... * g_i) . k_j v_j. Quotients of running products
would be matrix products at once, but they overflow where gates are small. So tokens are joined to blocks, and blocks to
blocks of twice the size: the keys of a block carry the gates from them to its end, its queries the gates from its start
to them, and the weights between a right and a left half are a matrix product of these. All factors are gates.

Shapes: B batch, H heads, D features of a head, V value width, R rank; T tokens of a piece, n chunks of C tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from lln.backends.torch.causal import CAUSAL_CHUNK
from lln.checks import check_at_least
from lln.masks import fill_padding
from lln.zoo.linear import recurrent_attention
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import blocks, join_blocks

# The paper's tau: gates are its root of a sigmoid, which brings them closer to 1.
TEMPERATURE = 16.0
# sigmoid(4)^(1/16) = 0.999: a new mechanism decays slowly. The published layer starts at 0.5^(1/16) = 0.96.
FIRST_BIAS = 4.0


@register(
    name="gla",
    title="Gated Linear Attention",
    paper="Yang et al.: Gated Linear Attention Transformers with Hardware-Efficient Training",
    year=2023,
    time="N D²",
    memory="N D",
    learned="gates from the keys of a head: projections D R and R D, bias D",
    causal=True,
    padding=True,
    cross=False,
    checked_against="transformers 5.22.2 (recurrent_kimi_delta_attention, its correction made negligible), "
    "the explicit matrix of the formula (both directions)",
    left_outside="the norm and the gate of the output; gates from the input of the layer (here from the keys of the "
    "head). The published form is causal; without a causal mask a second pass from the end is added",
)
class GLA(PeerMechanism):
    """S_t = diag(g_t) S_(t-1) + k_t v_tᵀ, out_t = S_tᵀ q_t / sqrt(D), with a gate for each feature of the key

        g_t = sigmoid(k_t W_1 W_2 + b)^(1/16)

    through `rank` features, all learned. There is no sum of weights to divide by.

    Without a causal mask a token also reads, and adds, the state of a second pass from the end after the tokens that
    follow it: a token j > i reaches i through the gates g_i to g_(j-1). Padding has a gate of 1 and adds nothing, so
    decay counts kept tokens.
    """

    def __init__(self, *, num_heads: int, head_dim: int, max_len: int | None = None, rank: int = 16) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(1, rank=rank)
        self.down = nn.Parameter(torch.empty(num_heads, head_dim, rank).uniform_(-1, 1) * head_dim**-0.5)
        self.up = nn.Parameter(torch.empty(num_heads, rank, head_dim).uniform_(-1, 1) * rank**-0.5)
        self.bias = nn.Parameter(torch.full((num_heads, 1, head_dim), FIRST_BIAS))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        def step(
            q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None, state: Tensor | None, own: bool
        ) -> tuple[Tensor, Tensor]:
            return gated_sums(q * self.head_dim**-0.5, k, v, fill_padding(self.gates(k), kept, 1.0), state, own=own)

        return recurrent_attention(query, key, value, keep, is_causal, step=step)

    def gates(self, k: Tensor) -> Tensor:
        """g of keys (B, H, T, D), of the same shape, between 0 and 1."""
        logits = k @ self.down.to(k.dtype) @ self.up.to(k.dtype) + self.bias.to(k.dtype)
        return (logsigmoid(logits) / TEMPERATURE).exp()


def gated_sums(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None, *, own: bool
) -> tuple[Tensor, Tensor]:
    """S_tᵀ q_t for each token, (B, H, T, V), and the state (B, H, D, V) after the last.

    `gate` is (B, H, T, D), or (B, H, T, 1) for one gate a token. With `own=False` a token reads S_t - k_t v_tᵀ, the
    state without itself.
    """
    tokens = q.shape[2]
    size = 1 << (min(tokens, CAUSAL_CHUNK) - 1).bit_length()
    q, k, v = (blocks(x, size) for x in (q, k, v))
    # What fills up the last chunk does not change the state: gates of 1, keys and values of 0.
    gate = blocks(pad(gate, (0, 0, 0, -tokens % size), value=1.0), size)
    weights, reading, writing, decay = _join(q, k, gate, own)
    own_sums = writing.mT @ v  # (B, H, n, D, V)
    before = [torch.zeros_like(own_sums[:, :, 0]) if state is None else state]
    for chunk_sums, chunk_decay in zip(own_sums.unbind(dim=2), decay.unbind(dim=2), strict=True):
        before.append(torch.addcmul(chunk_sums, before[-1], chunk_decay[..., None]))
    output = weights @ v + reading @ torch.stack(before[:-1], dim=2)
    return join_blocks(output, tokens), before[-1]


def _join(q: Tensor, k: Tensor, gate: Tensor, own: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights inside chunks (B, H, n, C, C), queries that read the state before the chunk, keys for the state after it,
    (B, H, n, C, D), and the decay over the chunk (B, H, n, D), for q, k and gates (B, H, n, C, D).
    """
    reading, writing, decay = (x[..., None, :] for x in (q * gate, k, gate))  # blocks of one token
    weights = ((q * k).sum(dim=-1) if own else torch.zeros_like(q[..., 0]))[..., None, None]
    while weights.shape[3] > 1:
        (q_left, q_right), (k_left, k_right), (d_left, d_right), (left, right) = (
            torch.unflatten(x, 3, (-1, 2)).unbind(dim=4) for x in (reading, writing, decay, weights)
        )
        upper = torch.cat((left, torch.zeros_like(left)), dim=-1)
        weights = torch.cat((upper, torch.cat((q_right @ k_left.mT, right), dim=-1)), dim=-2)
        reading = torch.cat((q_left, q_right * d_left), dim=-2)
        writing = torch.cat((k_left * d_right, k_right), dim=-2)
        decay = d_left * d_right
    return weights[:, :, :, 0], reading[:, :, :, 0], writing[:, :, :, 0], decay[:, :, :, 0, 0]
