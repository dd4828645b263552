"""Attention matrices as rows that are made when they are read: what every instrument reads.

An instrument takes `Rows`: some heads with the same tokens, padding already taken out, whose rows come in chunks of
about `CHUNK_ENTRIES` numbers. So no instrument handles padding or mechanisms, and from query and key none
holds an N x M matrix. `reading` makes them.

Shapes: G heads of one piece (of one sample or of a batch without padding), N rows, M columns, D features; C rows of a
chunk, chosen by an index.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lln.functional import Kind
from lln.matching.moments import chunks
from lln.precision import accumulator
from lln.problem import Near

# Numbers in a chunk of rows: 4 MB of float32, small enough for a cache, large enough that Python's share is small.
CHUNK_ENTRIES = 2**20
# Rows that a chunk should have at least, so that a matrix product is worth its while: many heads are taken one by one.
CHUNK_ROWS = 64


class Rows(ABC):
    """Rows of a stochastic matrix of G heads. `index` holds the rows that are measured: all, or a sample of them."""

    kind: Kind | None = None

    def __init__(self, *, heads: int, num_rows: int, num_columns: int, is_causal: bool, device: torch.device) -> None:
        self.heads, self.num_rows, self.num_columns, self.is_causal = heads, num_rows, num_columns, is_causal
        self.columns = torch.arange(num_columns, device=device)
        self.index = torch.arange(num_rows, device=device)

    @abstractmethod
    def block(self, index: Tensor) -> Tensor:
        """The rows `index` (C,) of P, (G, C, M)."""

    def log_block(self, index: Tensor) -> Tensor:
        """The rows `index` of ln P; -inf where P is zero."""
        return self.block(index).log()

    def allowed(self, index: Tensor) -> Tensor:
        """The entries that masks let be other than zero, (C, M), or (1, M) if that is the same for all rows."""
        if self.is_causal:
            return self.columns <= index[:, None]
        return torch.ones_like(self.columns, dtype=torch.bool)[None]

    @abstractmethod
    def head(self, head: int) -> "Rows":
        """One head alone."""

    def parts(self) -> Iterator[Tensor]:
        """The measured rows as indices of chunks."""
        size = max(1, CHUNK_ENTRIES // max(self.heads * self.num_columns, 1))
        for part in chunks(len(self.index), size):
            yield self.index[part]


class MatrixRows(Rows):
    """Rows of an explicit matrix (G, N, M)."""

    def __init__(self, matrix: Tensor, *, is_causal: bool) -> None:
        heads, rows, columns = matrix.shape
        super().__init__(heads=heads, num_rows=rows, num_columns=columns, is_causal=is_causal, device=matrix.device)
        self.matrix = matrix

    def head(self, head: int) -> "MatrixRows":
        return MatrixRows(self.matrix[head, None], is_causal=self.is_causal)

    def block(self, index: Tensor) -> Tensor:
        return self.matrix[:, index].to(accumulator(self.matrix.dtype))


class SoftmaxRows(Rows):
    """Rows of softmax(q . k / sqrt(D)) (eq. 1); with `block_size`, only inside blocks or a window of so many tokens.

    `mask` (N, M) is for what a model masks beyond causality: a bool tensor with True = may attend, or a float tensor
    that is added to the scores.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool,
        block_size: int | None = None,
        near: Near = "blocks",
        mask: Tensor | None = None,
    ) -> None:
        super().__init__(
            heads=query.shape[0],
            num_rows=query.shape[1],
            num_columns=key.shape[1],
            is_causal=is_causal,
            device=query.device,
        )
        self.kind = "softmax" if block_size is None else "block_diagonal"
        self.query, self.key, self.block_size, self.mask = query, key, block_size, mask
        self.near: Near = near

    @property
    def is_separate(self) -> bool:
        """Whether tokens of several blocks have nothing to do with each other."""
        return self.block_size is not None and self.near == "blocks" and self.num_rows > self.block_size

    def head(self, head: int) -> "SoftmaxRows":
        query, key = self.query[head, None], self.key[head, None]
        near: dict[str, Any] = {"block_size": self.block_size, "near": self.near}
        return SoftmaxRows(query, key, is_causal=self.is_causal, mask=self.mask, **near)

    def scores(self, index: Tensor) -> Tensor:
        """q . k / sqrt(D) of the rows `index`."""
        dtype = accumulator(self.query.dtype)
        scores: Tensor = (self.query[:, index].to(dtype) * self.query.shape[-1] ** -0.5) @ self.key.to(dtype).mT
        if self.mask is not None and self.mask.is_floating_point():
            return scores + self.mask[index].to(dtype)
        return scores

    def weighted(self, index: Tensor) -> Tensor:
        """Which keys the mechanism itself gives weight to: among neighbours these are fewer than the allowed ones."""
        if self.block_size is None:
            return self.allowed(index)
        if self.near == "window":
            before = self.block_size - 1 if self.is_causal else (self.block_size - 1) // 2
            distance = self.columns - index[:, None]
            return self.allowed(index) & (distance >= -before) & (distance < self.block_size - before)
        return self.allowed(index) & (self.columns // self.block_size == index[:, None] // self.block_size)

    def allowed(self, index: Tensor) -> Tensor:
        allowed = super().allowed(index)
        if self.mask is None:
            return allowed
        rows = self.mask[index]
        # A float mask excludes a key with -inf or with a huge negative number, depending on who made it.
        return allowed & (rows > torch.finfo(rows.dtype).min / 2 if rows.is_floating_point() else rows)

    def block(self, index: Tensor) -> Tensor:
        return torch.softmax(self.scores(index).masked_fill_(~self.weighted(index), -torch.inf), dim=-1)

    def log_block(self, index: Tensor) -> Tensor:
        return torch.log_softmax(self.scores(index).masked_fill_(~self.weighted(index), -torch.inf), dim=-1)


class LLNRows(Rows):
    """Rows of LLN attention from a = alpha q (G, N, D) and b = beta k (G, M, D), in the two-softmax form P = A B^T.

    Causal rows are the kernel exp(a_i) . exp(b_j) over the keys up to i, divided by its sum, in float64.
    """

    kind = "lln"

    def __init__(self, a: Tensor, b: Tensor, *, is_causal: bool) -> None:
        super().__init__(
            heads=a.shape[0], num_rows=a.shape[1], num_columns=b.shape[1], is_causal=is_causal, device=a.device
        )
        self.a, self.b = a, b

    def head(self, head: int) -> "LLNRows":
        return LLNRows(self.a[head, None], self.b[head, None], is_causal=self.is_causal)

    @cached_property
    def mass(self) -> Tensor:
        """L, the log of the summed exp(b) of each feature, (G, 1, D)."""
        return torch.logsumexp(self.b, dim=1, keepdim=True)

    @cached_property
    def key_features(self) -> Tensor:
        """B of all tokens."""
        return self.features(slice(None))[1]

    def features(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """A and B of some tokens."""
        return torch.softmax(self.a[:, tokens] + self.mass, dim=-1), (self.b[:, tokens] - self.mass).exp()

    def block(self, index: Tensor) -> Tensor:
        if self.is_causal:
            return self._causal_block(index).to(self.a.dtype)
        return torch.softmax(self.a[:, index] + self.mass, dim=-1) @ self.key_features.mT

    def _causal_block(self, index: Tensor) -> Tensor:
        past = int(index.max()) + 1
        b = self.b[:, :past].double()
        top = b.amax(dim=1, keepdim=True)
        a = self.a[:, index].double() + top
        kernel = (a - a.amax(dim=-1, keepdim=True)).exp() @ (b - top).exp().mT
        kernel = kernel.masked_fill_(~self.allowed(index)[:, :past], 0.0)
        rows = kernel / kernel.sum(dim=-1, keepdim=True)
        return torch.nn.functional.pad(rows, (0, self.num_columns - past))


class MeanRows(Rows):
    """Rows of LLN + Diag: a `share` of LLN, and the rest of softmax attention among neighbours.

    `share` is a number, or (G, 1, 1), or (G, N, 1) where each query has its own. With `is_disjoint` LLN attention
    leaves the neighbours out.
    """

    kind = "lln_diag"

    def __init__(self, far: LLNRows, near: SoftmaxRows) -> None:
        super().__init__(
            heads=far.heads,
            num_rows=far.num_rows,
            num_columns=far.num_columns,
            is_causal=far.is_causal,
            device=far.columns.device,
        )
        self.far, self.near = far, near
        self.share: float | Tensor = 0.5
        self.is_disjoint = False

    def head(self, head: int) -> "MeanRows":
        alone = MeanRows(self.far.head(head), self.near.head(head))
        alone.share = self.share[head, None] if isinstance(self.share, Tensor) else self.share
        alone.is_disjoint = self.is_disjoint
        return alone

    def block(self, index: Tensor) -> Tensor:
        share = self.share
        if isinstance(share, Tensor) and share.shape[1] > 1:
            share = share[:, index]
        far = self.far.block(index)
        if self.is_disjoint:
            far = far.masked_fill(self.near.weighted(index), 0.0)
            far = far / far.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(far.dtype).tiny)
        return share * far + (1 - share) * self.near.block(index)
