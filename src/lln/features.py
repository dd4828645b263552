"""Learned inputs of LLN attention: what `statistics="learned"` of the modules is made of.

    a_i = alpha (q_i - m_q) W_q          b_j = beta (k_j - m_k) W_k          w_j = u . k_j

a and b are the query and key of LLN attention with alpha = beta = 1, and w is a log-weight of each key. W_q and W_k map
to `feature_dim` features, D by default. With `signed` there are twice as many, (a, -a) and (b, -b). The decomposed form
has centres and u = m_q / sqrt(D), the weight that softmax attention gives a key for all queries alike; the other forms
have neither.

All of it belongs to a head and does not depend on other tokens, so nothing is measured while the attention runs.

Shapes: B batch, H heads, a multiple of H_k key heads, N tokens, D features of a head, E = `feature_dim`, F = E or 2 E
features of LLN attention.
"""

import torch
from torch import Tensor, nn

from lln.masks import fill_padding
from lln.matching.curves import Form, Matching
from lln.matching.moments import Moments, measure_moments
from lln.precision import accumulator


class HeadFeatures(nn.Module):
    """The inputs of LLN attention as learned maps of query and key; `calibrate` gives them their first values."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_key_heads: int,
        form: Form,
        projection: bool,
        signed: bool,
        feature_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads, self.head_dim = num_heads, num_key_heads, head_dim
        self.feature_dim = head_dim if feature_dim is None else feature_dim
        self.form: Form = form
        self.projection, self.signed = projection, signed
        self.log_alpha = nn.Parameter(torch.zeros(num_heads))
        self.log_beta = nn.Parameter(torch.zeros(num_key_heads))
        if form == "decomposed":
            self.center_q = nn.Parameter(torch.zeros(num_heads, head_dim))
            self.center_k = nn.Parameter(torch.zeros(num_key_heads, head_dim))
            self.column = nn.Parameter(torch.zeros(num_heads, head_dim))
        if projection:
            first = rotations(head_dim, self.feature_dim)
            self.project_q = nn.Parameter(first.repeat(num_heads, 1, 1))
            self.project_k = nn.Parameter(first.repeat(num_key_heads, 1, 1))

    @property
    def num_features(self) -> int:
        return self.feature_dim * (2 if self.signed else 1)

    def forward(
        self, query: Tensor, key: Tensor, keep_query: Tensor | None = None, keep_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """a (B, H, N, F), b (B, H_k, M, F) and w (B, H, M), or None for the last where the form has no weights."""
        # NaN in padding would reach gradients of the maps.
        query, key = fill_padding(query, keep_query), fill_padding(key, keep_key)
        a = self._features(query, self.log_alpha, "q")
        return a, self._features(key, self.log_beta, "k"), self.key_weight(key)

    def key_weight(self, key: Tensor) -> Tensor | None:
        """w (B, H, M) of the keys (B, H_k, M, D), or None where the form has no weights."""
        if self.form != "decomposed":
            return None
        by_group = torch.unflatten(self.column.to(key.dtype), 0, (self.num_key_heads, -1))  # (H_k, groups, D)
        return (by_group @ key.mT).flatten(1, 2)

    def _features(self, x: Tensor, log_scale: Tensor, side: str) -> Tensor:
        scale = log_scale.exp()[:, None, None].to(x.dtype)
        if self.form == "decomposed":
            x = x - getattr(self, f"center_{side}")[:, None].to(x.dtype)
        x = x @ (getattr(self, f"project_{side}").to(x.dtype) * scale) if self.projection else x * scale
        return torch.cat((x, -x), dim=-1) if self.signed else x

    @torch.no_grad()
    def calibrate(self, query: Tensor, key: Tensor, *, matching: Matching, spread: float | Tensor = 1.0) -> None:
        """Set centres, weights and scales from query (B, H, N, D) and key (B, H_k, N, D) of several samples.

        With a projection, the first D features are the principal ones of the content: a basis in which queries and keys
        have the same diagonal covariance, and q . k is as before. Further ones are rotations of them. `spread`, a
        number or (H,), times the matched scales.
        """
        query, key = query.to(accumulator(query.dtype)), key.to(accumulator(key.dtype))
        if self.form == "decomposed":
            center_q, center_k = query.mean(dim=(0, 2)), key.mean(dim=(0, 2))
            self.center_q.copy_(center_q)
            self.center_k.copy_(center_k)
            self.column.copy_(center_q * self.head_dim**-0.5)
            query, key = query - center_q[:, None], key - center_k[:, None]
        if self.projection:
            to_q, to_k = balanced_basis(query, key)
            rotated = rotations(self.head_dim, self.feature_dim).to(to_q)
            self.project_q.copy_(to_q @ rotated)
            self.project_k.copy_(to_k @ rotated)
            query, key = query @ to_q, key @ to_k
        alpha, beta = _mean_scales(measure_moments(query, key), self.head_dim, matching, self.form)
        beta = torch.unflatten(beta, 0, (self.num_key_heads, -1)).mean(dim=1)
        spread = torch.as_tensor(spread, dtype=alpha.dtype)
        by_group = torch.unflatten(spread.expand(self.num_heads), 0, (self.num_key_heads, -1)).mean(dim=1)
        smallest = torch.finfo(torch.float32).tiny
        self.log_alpha.copy_((alpha * spread).clamp(min=smallest).log())
        self.log_beta.copy_((beta * by_group).clamp(min=smallest).log())

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, {self.head_dim}, form={self.form!r}, projection={self.projection}, "
            f"signed={self.signed}, feature_dim={self.feature_dim}"
        )


def rotations(dim: int, features: int) -> Tensor:
    """(dim, features): the unit matrix, followed by random rotations of it, the same ones on every machine."""
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.eye(dim, dtype=torch.float64)]
    while len(blocks) * dim < features:
        blocks.append(torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0])
    return torch.cat(blocks, dim=1)[:, :features].float()


def balanced_basis(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (H, D, D) and (H_k, D, D) after which queries and keys have the same diagonal covariance.

    Their product with the transpose of the other is the identity, so q . k stays as it is. Where several query heads
    share a key head, the covariance is that of all of them.
    """
    heads, key_heads, dim = query.shape[1], key.shape[1], key.shape[3]
    by_group = torch.unflatten(query, 1, (key_heads, -1)).permute(1, 0, 2, 3, 4).flatten(1, 3)
    roots = [_root(x) for x in (by_group, key.transpose(0, 1).flatten(1, 2))]
    left, size, _ = torch.linalg.svd(roots[0].mT @ roots[1])
    # Directions without variance keep a finite map: they carry no content.
    size = size.clamp(min=1e-6 * float(size.max().clamp(min=1e-30)))
    to_query = torch.linalg.solve(roots[0].mT, left) * size[:, None].sqrt()
    to_key = torch.linalg.inv(to_query).mT
    return to_query.repeat_interleave(heads // key_heads, dim=0).reshape(heads, dim, dim), to_key


def _root(x: Tensor) -> Tensor:
    """A lower triangle (heads, D, D) whose product with its transpose is the covariance of x (heads, tokens, D)."""
    covariance = x.mT @ x / x.shape[1]
    unit = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-30)[:, None, None]
    eye = torch.eye(x.shape[2], dtype=x.dtype)
    root: Tensor = torch.linalg.cholesky(covariance + 1e-5 * unit * eye)
    return root


def _mean_scales(moments: Moments, head_dim: int, matching: Matching, form: Form) -> tuple[Tensor, Tensor]:
    alpha, beta = moments.scales(head_dim=head_dim, matching=matching, form=form)
    return alpha.mean(dim=0), beta.mean(dim=0)
