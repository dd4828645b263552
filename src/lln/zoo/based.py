"""Based: linear attention by the second-order Taylor series of the exponential."""

import torch
from torch import Tensor, nn

from lln.checks import check_at_least
from lln.precision import accumulator
from lln.zoo.linear import Features, linear_attention
from lln.zoo.registry import PeerMechanism, register


@register(
    name="based",
    title="Based (Taylor)",
    paper="Arora et al.: Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff",
    year=2024,
    time="N F² D",
    memory="N F²",
    learned="two projections of each head, for queries and for keys, D F each (feature_dim=None: nothing)",
    causal=True,
    padding=True,
    cross=True,
    left_outside="the layers of softmax attention in a sliding window and the short convolutions that the published "
    "model has beside it; projections from the input of the layer (here from queries and keys of the head)",
)
class Based(PeerMechanism):
    """P_ij ~ 1 + s + s²/2 with s = q'_i . k'_j / sqrt(F): exp(s) up to the second order, 1/2 at least.

    q' and k' are queries and keys projected to F = `feature_dim` features, the paper's 16, by learned matrices for each
    head; with `feature_dim=None` they are queries and keys as given, and F = D. The weights are inner products of

        phi(x) = (1, x / F^(1/4), x_l x_m / sqrt(F) for l < m, x_l² / sqrt(2 F))

    which has 1 + F + F (F + 1) / 2 features. For large s this grows like s², not like exp(s), and is large for large
    negative s, too. Rounding leaves an error of about 1e-7 |q'|² |k'|² / F on each weight in float32.
    """

    def __init__(
        self, *, num_heads: int, head_dim: int, max_len: int | None = None, feature_dim: int | None = 16
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        self.feature_dim = head_dim if feature_dim is None else feature_dim
        check_at_least(1, feature_dim=self.feature_dim)
        self.project_query = self.project_key = None
        if feature_dim is not None:
            # The same orthogonal projection of both at first: s starts as the scores of random directions.
            start = torch.stack([nn.init.orthogonal_(torch.empty(head_dim, feature_dim)) for _ in range(num_heads)])
            self.project_query, self.project_key = nn.Parameter(start), nn.Parameter(start.clone())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        dtype = accumulator(query.dtype)
        left, right = torch.triu_indices(self.feature_dim, self.feature_dim, device=query.device)
        factor = torch.where(left == right, 0.5**0.5, 1.0).to(dtype) * self.feature_dim**-0.5

        def features(projection: Tensor | None) -> Features:
            def of_piece(x: Tensor, _: slice) -> Tensor:
                x = x if projection is None else x @ projection.to(dtype)
                products = x[..., left] * x[..., right] * factor
                return torch.cat((torch.ones_like(x[..., :1]), x * self.feature_dim**-0.25, products), dim=-1)

            return of_piece

        def query_features(x: Tensor, part: slice) -> Tensor:
            phi = features(self.project_query)(x, part)
            return phi / phi.detach().amax(dim=-1, keepdim=True)  # cancels; without it large queries overflow

        return linear_attention(
            query,
            key,
            value,
            keep,
            is_causal,
            query_features=query_features,
            key_features=features(self.project_key),
        )
