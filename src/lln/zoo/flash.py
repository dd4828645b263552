"""FLASH: the mixed-chunk attention of the gated attention unit, exact inside chunks and linear across them."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lln.backends.torch.summary import join_pieces
from lln.checks import check_at_least
from lln.matching.moments import CHUNK_TOKENS, chunks
from lln.zoo.registry import PeerMechanism, register
from lln.zoo.window import blocks, join_blocks, on_kept_tokens


@register(
    name="flash",
    title="FLASH",
    paper="Hua et al.: Transformer Quality in Linear Time",
    year=2022,
    time="N (C + D) D",
    memory="N (C + D) + N D² / C",
    learned="4 scales and 4 offsets of H D features",
    causal=True,
    padding=True,
    cross=False,
    left_outside="the gate and the output projection, the one projection that queries and keys share, position bias",
)
class Flash(PeerMechanism):
    """out_i = sum over j in the chunk of i of relu(q_i . k_j / C)² v_j  +  q'_i . sum over chunks of K'ᵀ V / n

    where q, q' (of `query`) and k, k' (of `key`) each have a scale and an offset of their own for every feature, which
    the mechanism owns. The sum over chunks takes all of them, and n counts all kept tokens; with a causal mask it takes
    the chunks before that of i, n = C, and only j <= i count inside the chunk. There is no sum of weights to divide by.

    Chunks count kept tokens. The paper's chunk is 256. Its formula has no scale; scores over the number of
    tokens, before the square, are its pseudo-code's, and n and C for the sums are those of FLASH-pytorch. Scales start
    at 1, so that a new mechanism attends with the queries and keys that it is given.
    """

    def __init__(self, *, num_heads: int, head_dim: int, max_len: int | None = None, chunk_size: int = 256) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        check_at_least(1, chunk_size=chunk_size)
        self.chunk_size = chunk_size
        # query inside and across chunks, key inside and across chunks
        self.scale = nn.Parameter(torch.ones(4, num_heads, 1, head_dim))
        self.offset = nn.Parameter(torch.zeros(4, num_heads, 1, head_dim))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        return on_kept_tokens(partial(self._mix, is_causal=is_causal), query, key, value, keep)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, *, is_causal: bool) -> Tensor:
        tokens, size = query.shape[2], min(self.chunk_size, query.shape[2])
        scale, offset = self.scale.to(query.dtype), self.offset.to(query.dtype)

        def parts() -> Iterator[Tensor]:  # whole chunks, a few at a time; padding comes blanked: its values add nothing
            sums = query.new_zeros(())  # of K'ᵀ V, (B, H, D, V) from the first piece on
            if not is_causal:
                for part in chunks(tokens):
                    sums = sums + (key[:, :, part] * scale[3] + offset[3]).mT @ value[:, :, part]
                sums = sums / (tokens if kept is None else kept.sum(dim=1).clamp(min=1)[:, None, None, None])
            for part in chunks(tokens, max(size, CHUNK_TOKENS // size * size)):
                q, k, v = query[:, :, part], key[:, :, part], value[:, :, part]
                weights = blocks(q * scale[0] + offset[0], size) @ blocks(k * scale[2] + offset[2], size).mT
                weights = torch.relu(weights / self.chunk_size).square()
                inside = join_blocks((weights.tril() if is_causal else weights) @ blocks(v, size), q.shape[2])
                q_across = q * scale[1] + offset[1]
                if not is_causal:
                    yield inside + q_across @ sums
                    continue
                own = blocks(k * scale[3] + offset[3], size).mT @ blocks(v, size) / self.chunk_size  # (B, H, n, D, V)
                # Shifted, not subtracted: nothing of the chunk itself can remain.
                before = torch.cat((sums.expand_as(own[:, :, 0])[:, :, None], own), dim=2).cumsum(dim=2)
                yield inside + join_blocks(blocks(q_across, size) @ before[:, :, :-1], q.shape[2])
                sums = before[:, :, -1]

        return join_pieces(parts(), query, value.shape[3])
