"""Reformer: softmax attention among tokens that a random hash puts near each other."""

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from lln.backends.torch.summary import mask_value
from lln.checks import check_at_least
from lln.masks import kept_tokens
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import on_kept_tokens

# The score of a token for itself where queries are keys: it would be the largest of its row, so it is to count only
# when there is nothing else to attend to. The value is reformer-pytorch's; any between all other scores and the masked
# ones would do.
SELF_SCORE = -5e4


@register(
    name="reformer",
    title="Reformer",
    paper="Kitaev, Kaiser, Levskaya: Reformer: The Efficient Transformer",
    year=2020,
    time="R (N log N + N C D)",
    memory="R N (C + D)",
    causal=False,
    padding=True,
    cross=False,
    random=True,
    checked_against="reformer-pytorch 1.4.4 (shared_qk=True), the explicit matrix of the formula",
    left_outside=(
        "the causal form: with a causal mask on the pairs, the borders of the chunks still depend on later tokens; "
        "reversible layers; new rotations at every step; the correction for keys that are met in several rounds. "
        "The published form, in which the query is the key, is shared_qk=True; the default is False"
    ),
)
class Reformer(PeerMechanism):
    """In each of R = `rounds` rounds, sort tokens by their bucket and let chunks attend to themselves and the one
    before,

        bucket(x) = argmax over [x R_r, -x R_r]      out = sum_r exp(z_r - logsumexp_r z_r) out_r
        out_r, z_r = softmax attention, and the logsumexp of its scores, in the chunk of C tokens and the one before

    where the chunk before the first one is the last one. Tokens sort by bucket, then by position, padding last. A key
    that is met in several rounds counts in each: the paper divides its weight by their number, and that
    correction is left out.

    `shared_qk=True` is the published form: the query is also the key, at unit length; a token attends to itself only if
    it attends to no other; `key` takes no part. With `shared_qk=False`, the default, `key` counts: queries and keys
    have their own hashes and are sorted in one sequence, so that a chunk holds C tokens of both kinds, and its queries
    attend to the keys.

    The rotations R_r are drawn once, from `seed` or from torch's generator, and are part of the state dict. The paper
    has as many buckets as chunks; a fixed number keeps hashing linear and the result independent of padding.
    """

    rotations: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_len: int | None = None,
        rounds: int = 4,
        chunk_size: int = 64,
        num_buckets: int = 64,
        shared_qk: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(1, rounds=rounds, chunk_size=chunk_size)
        check_at_least(2, num_buckets=num_buckets)
        if num_buckets % 2:
            raise ValueError(f"num_buckets must be even, because a rotated axis has two ends, got {num_buckets}")
        self.chunk_size, self.num_buckets, self.shared_qk = chunk_size, num_buckets, shared_qk
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        rotations = torch.randn(rounds, head_dim, num_buckets // 2, generator=generator)
        self.register_buffer("rotations", rotations)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        return on_kept_tokens(self._mix, query, key, value, keep)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None) -> Tensor:
        tokens, real = query.shape[2], kept_tokens(kept, query)
        if self.shared_qk:
            queries, keys, values, seen = query, normalize(query, dim=-1), value, real
        else:  # q_0, k_0, q_1, k_1, ...: near each other in one sequence when their buckets are the same
            queries = keys = torch.stack((query, key), dim=3).flatten(2, 3)
            values = torch.stack((torch.zeros_like(value), value), dim=3).flatten(2, 3)
            seen = torch.stack((torch.zeros_like(real), real), dim=2).flatten(1)
            real = real.repeat_interleave(2, dim=1)
        missing = -queries.shape[2] % self.chunk_size
        queries, keys, values = (pad(x, (0, 0, 0, missing)) for x in (queries, keys, values))
        real, seen = (pad(x, (0, missing)) for x in (real, seen))
        rounds = [self._round(queries, keys, values, real, seen, r) for r in self.rotations.to(query.dtype)]
        outputs, mass = (torch.stack(parts) for parts in zip(*rounds, strict=True))
        output = (torch.softmax(mass, dim=0) * outputs).sum(dim=0)
        return output[:, :, : queries.shape[2] - missing : 1 if self.shared_qk else 2][:, :, :tokens]

    def buckets(self, x: Tensor, rotation: Tensor) -> Tensor:
        """The bucket (B, H, N) of each token of `x` (B, H, N, D)."""
        rotated = x.detach() @ rotation
        return torch.cat((rotated, -rotated), dim=-1).argmax(dim=-1)

    def _round(
        self, queries: Tensor, keys: Tensor, values: Tensor, real: Tensor, seen: Tensor, rotation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, N, V) of one round, and the logsumexp (B, H, N, 1) of its scores."""
        buckets = self.buckets(queries, rotation).masked_fill(~real[:, None], self.num_buckets)
        order = buckets.argsort(dim=2, stable=True)
        last = (real.sum(dim=1) - 1).clamp(min=0) // self.chunk_size  # the last chunk that holds a kept token

        def chunks(x: Tensor) -> Tensor:  # (B, H or 1, N, features) to (B, H, n, C, features), sorted
            x = x.expand(-1, order.shape[1], -1, -1).gather(2, order[..., None].expand(-1, -1, -1, x.shape[3]))
            return x.reshape(*x.shape[:2], -1, self.chunk_size, x.shape[3])

        def look_back(x: Tensor) -> Tensor:
            final = x.gather(2, last.view(-1, 1, 1, 1, 1).expand(-1, x.shape[1], 1, *x.shape[3:]))
            return torch.cat((torch.cat((final, x[:, :, :-1]), dim=2), x), dim=3)

        visible = look_back(chunks(seen[:, None, :, None])).mT  # (B, H, n, 1, 2C)
        alone = (last == 0)[:, None, None, None, None]  # a single chunk must not count twice
        visible = visible & ~(alone & (torch.arange(2 * self.chunk_size, device=alone.device) < self.chunk_size))
        scores = chunks(queries) * self.head_dim**-0.5 @ look_back(chunks(keys)).mT
        if self.shared_qk:
            position = order.reshape(*order.shape[:2], -1, self.chunk_size, 1)
            scores = scores.masked_fill(position == look_back(position).mT, SELF_SCORE)
        scores = scores.masked_fill(~visible, mask_value(scores.dtype))
        mass = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = (scores - mass).exp().masked_fill(~visible, 0.0)
        back = order.argsort(dim=2)[..., None]
        output = (weights @ look_back(chunks(values))).flatten(2, 3)
        return output.gather(2, back.expand_as(output)), mass.flatten(2, 3).gather(2, back)
