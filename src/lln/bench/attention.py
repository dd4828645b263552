"""`lln bench attention`: forward time and peak memory of mechanisms side by side, over sequence lengths."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from lln.bench.measure import peak_memory, time_in_turns
from lln.zoo import build

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
MECHANISMS = ("softmax", "lln", "lln_diag")


def compare_attention(
    lengths: Sequence[int] = LENGTHS,
    mechanisms: Sequence[str] = MECHANISMS,
    *,
    heads: int = 4,
    head_dim: int = 64,
    seconds: float = 1.0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """A row for each length and mechanism; `ratio` is the first mechanism's time over its own, in the same rounds."""
    torch.manual_seed(seed)
    for tokens in lengths:
        tensors = [torch.randn(1, heads, tokens, head_dim) for _ in range(3)]
        modules = {name: build(name, num_heads=heads, head_dim=head_dim, max_len=tokens).eval() for name in mechanisms}
        with torch.no_grad():
            timings = time_in_turns(
                {name: partial(module, *tensors) for name, module in modules.items()},
                seconds=seconds,
            )
        for name, timing in timings.items():
            yield {
                "tokens": tokens,
                "mechanism": name,
                "milliseconds": timing.median * 1e3,
                "quartiles": [timing.low * 1e3, timing.high * 1e3],
                "repeats": timing.repeats,
                "ratio": timings[mechanisms[0]].median / timing.median,
                "peak_bytes": peak_memory(name, tokens=tokens, heads=heads, head_dim=head_dim),
            }
