"""Performer: softmax attention by positive orthogonal random features, and the base of all random features.

A kernel is replaced by an average over random vectors w, drawn when the module is built and kept in a buffer. Draws are
seeded: the same `seed` gives the same vectors, and again the same ones after as many calls of `redraw`.

Shapes: B batch, H heads, N queries, M keys, D features of a head, F random vectors.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lln.backends.torch.causal import causal_attention
from lln.backends.torch.summary import attend_summary, empty_summary, join_pieces, merge, summarize
from lln.checks import check_at_least
from lln.masks import fill_padding
from lln.matching.moments import chunks
from lln.precision import accumulator
from lln.zoo.registry import PeerMechanism, register


class RandomFeatures(PeerMechanism):
    """Owner of the random vectors `projection` (H, F, D)."""

    projection: Tensor
    calls: Tensor
    draws: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        num_features: int | None = None,
        seed: int | None = None,
        redraw_every: int | None = None,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        self.num_features = self.default_features() if num_features is None else num_features
        check_at_least(1, num_features=self.num_features)
        if redraw_every is not None:
            check_at_least(1, redraw_every=redraw_every)
        # Without a seed the layers of a model differ, and torch.manual_seed decides.
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        self.redraw_every = redraw_every
        self.register_buffer("projection", torch.empty(num_heads, self.num_features, head_dim))
        self.register_buffer("calls", torch.tensor(0))  # forward passes in training since the last draw
        self.register_buffer("draws", torch.tensor(0))
        self.add_parameters()
        self.redraw()

    def add_parameters(self) -> None:
        """For mechanisms with parameters beside their random vectors."""

    def default_features(self) -> int:
        raise NotImplementedError

    def draw(self, generator: torch.Generator) -> Tensor:
        """Random vectors (H, F, D), each distributed as N(0, I)."""
        shape = (self.num_heads, self.num_features, self.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    @torch.no_grad()
    def redraw(self) -> None:
        """Replace the random vectors by the next ones of this seed."""
        # A large prime keeps the draws of neighbouring seeds apart; torch takes seeds of 64 bits.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + int(self.draws)) % 2**63)
        self.projection = self.draw(generator).to(self.projection)  # not in place: a graph may still need the old ones
        self.draws += 1
        self.calls.zero_()

    def current_projection(self, dtype: torch.dtype) -> Tensor:
        """The vectors for this forward pass: new ones each `redraw_every` passes in training, never in evaluation."""
        if self.training and self.redraw_every is not None:
            if int(self.calls) >= self.redraw_every:
                self.redraw()
            self.calls += 1
        return self.projection.to(dtype)


@register(
    name="performer",
    title="Performer (FAVOR+)",
    paper="Choromanski et al.: Rethinking Attention with Performers",
    year=2020,
    time="N F D",
    memory="N F",
    causal=True,
    padding=True,
    cross=True,
    random=True,
    checked_against="performer-pytorch 1.1.4 with the same projection, its epsilon set to 0",
)
class Performer(RandomFeatures):
    """exp(q . k / sqrt(D)) as the mean over w of exp(w . q' - |q'|²/2) exp(w . k' - |k'|²/2), with x' = x / D^(1/4).

    The w of a head are orthogonal in blocks of D and as long as Gaussian vectors are. Normalised over the keys this is
    sum_w exp(a_iw) exp(b_jw) with a = w . q' and b = w . k' - |k'|²/2, which is the form of LLN attention: its two
    softmaxes are the stabiliser, so no maximum over other tokens and no epsilon enters any result.
    """

    def default_features(self) -> int:
        """D ln D, the order of what the paper's theorem on uniform convergence requires."""
        return max(self.head_dim, int(self.head_dim * math.log(self.head_dim)))

    def draw(self, generator: torch.Generator) -> Tensor:
        gaussian = super().draw(generator)
        blocks = math.ceil(self.num_features / self.head_dim)
        square = torch.randn(
            self.num_heads, blocks, self.head_dim, self.head_dim, generator=generator, dtype=torch.float64
        )
        orthogonal, triangle = torch.linalg.qr(square)
        # Householder's signs are not uniform: with those of the diagonal the directions are (Haar measure).
        orthogonal = orthogonal * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        directions: Tensor = orthogonal.mT.flatten(1, 2)[:, : self.num_features]
        return directions * gaussian.square().sum(dim=-1, keepdim=True).sqrt()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        dtype = accumulator(query.dtype)
        w = self.current_projection(dtype)
        one = torch.ones(1, 1, 1, 1, dtype=dtype, device=query.device)

        def queries(part: slice) -> Tensor:
            a: Tensor = query[:, :, part].to(dtype) * self.head_dim**-0.25 @ w.mT
            return a

        def keys(part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
            kept = None if keep is None else keep[:, part]
            k = fill_padding(key[:, :, part].to(dtype), kept) * self.head_dim**-0.25
            return k @ w.mT - k.square().sum(dim=-1, keepdim=True) / 2, value[:, :, part], kept

        def parts() -> Iterator[Tensor]:  # a and b are wider than the heads: they are there for one piece at a time
            memory = empty_summary(query.shape[0], self.num_heads, self.num_features, value.shape[3], query)
            if not is_causal:
                for part in chunks(key.shape[2]):
                    b, v, kept = keys(part)
                    memory = merge(memory, summarize(b, v, one, kept, heads=self.num_heads))
            for part in chunks(query.shape[2]):
                if is_causal:
                    b, v, kept = keys(part)
                    output, memory = causal_attention(queries(part), b, v, one, one, kept, memory)
                else:
                    output = attend_summary(queries(part), one, memory)
                yield output.to(value.dtype)

        return join_pieces(parts(), query, value.shape[3])
