"""Skyformer: a Gaussian kernel in place of softmax, through landmarks."""

import torch
from torch import Tensor

from lln.backends.torch.summary import join_pieces
from lln.checks import check_at_least
from lln.masks import fill_padding
from lln.matching.moments import chunks, pieces
from lln.precision import accumulator
from lln.zoo.nystrom import ITERATIONS, LANDMARKS, landmarks, refine_inverse
from lln.zoo.registry import PeerMechanism, register

# Added to the diagonal of the landmarks' kernel matrix, which is 1: landmarks that nearly coincide make it singular.
# A tenth of the smallest eigenvalue that six steps of the iteration resolve, (13/4)^-6 = 8e-4, so that it costs no
# accuracy beside what the iteration costs; more `iterations` come closer to the exact inverse.
RIDGE = 1e-4


@register(
    name="skyformer",
    title="Skyformer",
    paper="Chen, Zeng, Ji, Yang: Skyformer: Remodel Self-Attention with Gaussian Kernel and Nyström Method",
    year=2021,
    time="N L D",
    memory="N L",
    causal=False,
    padding=True,
    cross=True,
    left_outside="the sampling of landmarks: here they are means of segments of kept tokens",
)
class Skyformer(PeerMechanism):
    """out = C v with C_ij = exp(-|q_i - k_j|² / (2 sqrt(D))), not normalised, approximated by landmarks z as

        C ~ G(q, z) (G(z, z) + ridge I)^-1 G(z, k)

    where G is that kernel: C is a corner of the positive matrix of all pairs of queries and keys, so z holds landmarks
    of both. The paper samples them; here they are means of segments of kept tokens, L of each, which draws no random
    numbers. The inverse is iterated after scaling by the row sums, which brings all eigenvalues into (0, 1].
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        num_landmarks: int = LANDMARKS,
        iterations: int = ITERATIONS,
        ridge: float = RIDGE,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(1, num_landmarks=num_landmarks, iterations=iterations)
        if ridge <= 0:
            raise ValueError(f"ridge must be positive, got {ridge}: it is what makes the matrix invertible")
        self.num_landmarks, self.iterations, self.ridge = num_landmarks, iterations, ridge

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        dtype = accumulator(query.dtype)
        q, k = (x.to(dtype) * self.head_dim**-0.25 for x in (query, fill_padding(key, keep)))
        keep_query = keep if query.shape[2] == key.shape[2] else None  # these are the same tokens (lln.masks)
        halves = landmarks(q, keep_query, self.num_landmarks), landmarks(k, keep, self.num_landmarks)
        z, real = torch.cat([means for means, _ in halves], dim=2), torch.cat([exist for _, exist in halves], dim=1)

        # A landmark that does not exist has the kernel 0 with the others, and no part in the result.
        eye = torch.eye(z.shape[2], dtype=dtype, device=z.device)
        middle = fill_padding(fill_padding(gaussian(z, z), real).mT, real) + self.ridge * eye
        root = middle.sum(dim=-1, keepdim=True).rsqrt()  # (B, H, 2 L, 1)
        inverse = refine_inverse(root * middle * root.mT, eye.expand_as(middle), self.iterations)
        context = torch.zeros((), dtype=dtype, device=z.device)
        for part, (v, _) in zip(chunks(key.shape[2]), pieces(value, keep), strict=True):
            context = context + gaussian(z, k[:, :, part]) @ v
        context = fill_padding(root * (inverse @ (root * context)), real)
        parts = ((gaussian(q[:, :, part], z) @ context).to(value.dtype) for part in chunks(query.shape[2]))
        return join_pieces(parts, query, value.shape[3])


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_i - y_j|² / 2), (B, H, N, M)."""
    squares = x.square().sum(dim=-1)[..., :, None] + y.square().sum(dim=-1)[..., None, :]
    return (x @ y.mT - squares / 2).exp()
