"""TNN: tokens mixed by a Toeplitz matrix of relative positions, whatever they hold."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from lln.backends.torch.causal import CAUSAL_CHUNK
from lln.checks import check_at_least
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import blocks, check_value_width, join_blocks, on_kept_tokens, rms_norm, split_heads


@register(
    name="tnn",
    title="TNN",
    paper="Qin et al.: Toeplitz Neural Network for Sequence Modeling",
    year=2023,
    time="N log N D (causal: N log² N D)",
    memory="N D",
    learned="relative position network, about W (W layers + H D)",
    causal=True,
    padding=True,
    cross=False,
    left_outside="the projections of gate and value, the gated feed-forward part; key takes no part in it",
)
class TNN(PeerMechanism):
    """out_i = silu(q_i) * sum_j t(i - j) silu(v_j), feature by feature: the gated Toeplitz unit, with q as its gate.

        t(p) = decay^|p| network(p)         no j > i with a causal mask

    The network is the authors': the position itself into W = `width` features, `layers` times (root mean square norm,
    relu, linear), then norm, relu and a linear map to one coefficient for each head and feature. It serves any length.
    Positions count kept tokens. Queries gate and keys take no part: the mixing depends on positions only. Defaults are
    those of the authors' language models (OpenNLPLab/fairseq-evo, roberta_tnn_decay_99).

    The sum is a convolution, by fast Fourier transform. With a causal mask one transform of the whole sequence would
    mix every token into every other and rely on rounding to take the future out again: so halves are mixed into the
    halves after them, and blocks of C tokens, at the end, pair by pair. No bit of the past depends on the future.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        width: int = 64,
        layers: int = 6,
        decay: float = 0.99,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(1, width=width, layers=layers)
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be above 0 and at most 1, got {decay}")
        self.decay = decay
        widths = [1] + [width] * (layers + 1) + [num_heads * head_dim]
        self.network = nn.ModuleList(nn.Linear(w_in, w_out) for w_in, w_out in pairwise(widths))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        check_value_width("tnn", value, self.head_dim)

        def mix(query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None) -> Tensor:
            first = 0 if is_causal else 1 - query.shape[2]
            t = self.coefficients(torch.arange(first, query.shape[2], device=query.device), query.dtype)
            return silu(query) * (causal_toeplitz if is_causal else toeplitz)(t, silu(value))

        return on_kept_tokens(mix, query, key, value, keep)

    def coefficients(self, position: Tensor, dtype: torch.dtype) -> Tensor:
        """t(p) for each head, position and feature, (H, positions, D)."""
        x = position.to(dtype)[:, None]
        for depth, layer in enumerate(self.network):
            assert isinstance(layer, nn.Linear)
            if depth > 0:
                x = torch.relu(rms_norm(x))
            x = linear(x, layer.weight.to(dtype), layer.bias.to(dtype))
        decay = torch.pow(self.decay, position.abs().to(dtype))
        return split_heads((x * decay[:, None])[None], self.num_heads)[0]


def toeplitz(t: Tensor, x: Tensor) -> Tensor:
    """out_i = sum_j t_(i - j) x_j for x (..., H, N, D) and t (H, 2N - 1, D), from t_(1 - N) to t_(N - 1)."""
    tokens = x.shape[-2]
    size = 1 << (2 * tokens - 2).bit_length()  # at least 2N - 1: what wraps around falls on what is cut off
    spectrum = torch.fft.rfft(t, n=size, dim=-2) * torch.fft.rfft(x, n=size, dim=-2)
    output: Tensor = torch.fft.irfft(spectrum, n=size, dim=-2)
    return output[..., tokens - 1 : 2 * tokens - 1, :]


def causal_toeplitz(t: Tensor, x: Tensor) -> Tensor:
    """out_i = sum over j <= i of t_(i - j) x_j for x (B, H, N, D) and t (H, N, D), from t_0 to t_(N - 1)."""
    tokens = x.shape[2]
    half = min(tokens, CAUSAL_CHUNK)
    distance = torch.arange(half, device=x.device)[:, None] - torch.arange(half, device=x.device)
    matrix = t[:, distance.clamp(min=0)].masked_fill((distance < 0)[:, :, None], 0.0)  # (H, C, C, D)
    output = join_blocks(torch.einsum("hijd,bhnjd->bhnid", matrix, blocks(x, half)), tokens)
    while half < tokens:
        earlier = blocks(x, 2 * half)[:, :, :, :half].transpose(1, 2)  # (B, n, H, half, D), blocks beside the batch
        between = pad(t, (0, 0, 0, max(0, 2 * half - tokens)))[:, 1 : 2 * half]  # i - j, from 1 on, up to 2 half - 1
        gained = toeplitz(between, earlier).transpose(1, 2)
        output = output + join_blocks(pad(gained, (0, 0, half, 0)), tokens)
        half *= 2
    return output
