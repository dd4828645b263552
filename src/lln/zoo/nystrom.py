"""Nyströmformer: attention through a few landmarks, and the pieces that other Nyström methods share.

Shapes: B batch, H heads, N queries, M keys, D features of a head, L landmarks.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from lln.backends.torch.summary import mask_value
from lln.checks import check_at_least
from lln.masks import fill_padding, front_order, kept_tokens, take_tokens
from lln.precision import accumulator
from lln.zoo.registry import PeerMechanism, register

# Landmarks and steps of the iteration in the Nyströmformer paper, which found six steps to be enough.
LANDMARKS = 64
ITERATIONS = 6


def landmarks(x: Tensor, keep: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    """Means (B, H, L, D) of `number` segments of the kept tokens, and which of them exist (B, L).

    Segments differ by at most one token in length. With fewer tokens than landmarks each token is its own.
    """
    kept = kept_tokens(keep, x)
    count = kept.sum(dim=1, keepdim=True)  # (B, 1)
    used = count.clamp(max=number)
    segment = (kept.cumsum(dim=1) - 1) * used // count.clamp(min=1)
    index = torch.arange(number, device=x.device)
    member = ((segment[:, None, :] == index[:, None]) & kept[:, None, :]).to(x.dtype)  # (B, L, tokens)
    mean = member / member.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return mean[:, None] @ fill_padding(x, keep), index < used


def refine_inverse(matrix: Tensor, start: Tensor, iterations: int) -> Tensor:
    """The pseudo-inverse of `matrix` (..., L, L) by the third-order iteration that the Nyströmformer paper uses.

    Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, which converges if |A A+ - A start| < 1.
    """
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = start
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product))) / 4
    return inverse


@register(
    name="nystrom",
    title="Nyströmformer",
    paper="Xiong et al.: Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
    year=2021,
    time="N L D",
    memory="N L",
    learned="with conv_kernel: a convolution kernel for each head",
    causal=False,
    padding=True,
    cross=True,
    checked_against="nystrom-attention 0.0.14 and transformers 5.22.2 (NystromformerSelfAttention), unpadded",
)
class Nystrom(PeerMechanism):
    """out = softmax(q k~ᵀ) softmax(q~ k~ᵀ)+ softmax(q~ kᵀ) v, scores over sqrt(D), with landmarks q~ and k~.

    Landmarks are means of segments of kept tokens. With `conv_kernel` a depthwise convolution of the values along the
    tokens is added, as in the paper. Unlike in the published code the iteration starts from the norm of each matrix
    by itself, so that a result does not depend on the rest of the batch.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        num_landmarks: int = LANDMARKS,
        iterations: int = ITERATIONS,
        conv_kernel: int | None = None,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(1, num_landmarks=num_landmarks, iterations=iterations)
        if conv_kernel is not None and conv_kernel % 2 == 0:
            raise ValueError(f"conv_kernel must be odd, to be centred on a token, got {conv_kernel}")
        self.num_landmarks, self.iterations = num_landmarks, iterations
        self.conv = None
        if conv_kernel is not None:
            check_at_least(1, conv_kernel=conv_kernel)
            self.conv = nn.Parameter(torch.empty(num_heads, 1, conv_kernel, 1))
            nn.init.kaiming_uniform_(self.conv, a=5**0.5)  # as torch's own convolutions start

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        if self.conv is not None and query.shape[2] != key.shape[2]:
            raise ValueError("the convolution of the values needs as many queries as keys; leave conv_kernel out")
        dtype = accumulator(query.dtype)
        q, k, v = (x.to(dtype) for x in (query, fill_padding(key, keep), fill_padding(value, keep)))
        q = q * self.head_dim**-0.5
        keep_query = keep if query.shape[2] == key.shape[2] else None  # these are the same tokens (lln.masks)
        middle_q, real_q = landmarks(q, keep_query, self.num_landmarks)
        middle_k, real_k = landmarks(k, keep, self.num_landmarks)

        def weights(left: Tensor, right: Tensor, allowed: Tensor | None) -> Tensor:
            scores = left @ right.mT
            if allowed is not None:
                scores = scores.masked_fill(~allowed[:, None, None, :], mask_value(dtype))
            return torch.softmax(scores, dim=-1)

        # Landmarks that do not exist are rows and columns of zeros, which are zeros in the pseudo-inverse as well.
        middle = fill_padding(weights(middle_q, middle_k, real_k), real_q) * real_k[:, None, None, :]
        norm = middle.sum(dim=-2).amax(dim=-1) * middle.sum(dim=-1).amax(dim=-1)  # |A|_1 |A|_inf, at least |A|²
        start = middle.mT / norm.clamp(min=torch.finfo(dtype).tiny)[..., None, None]
        context = refine_inverse(middle, start, self.iterations) @ (weights(middle_q, k, keep) @ v)
        output = weights(q, middle_k, real_k) @ context
        return (output if self.conv is None else output + self._convolve(v, keep)).to(value.dtype)

    def _convolve(self, value: Tensor, keep: Tensor | None) -> Tensor:
        """The values, blank where not kept, convolved along the kept tokens."""
        assert self.conv is not None
        order = None if keep is None else front_order(keep)
        value = value if order is None else take_tokens(value, order)
        output = conv2d(
            value, self.conv.to(value.dtype), padding=(self.conv.shape[2] // 2, 0), groups=self.conv.shape[0]
        )
        return output if order is None else take_tokens(output, order.argsort(dim=1))
