"""Time and memory of one attention layer before and after, at the model's own number of heads and their width."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lln.bench.measure import noise, time_in_turns
from lln.bench.new_process import in_new_process
from lln.bench.peak import Call, attention_call, peak_of_call, random_heads
from lln.zoo import build

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SECONDS = 2.0  # of timing for each length
MIB = 2**20


def layer_cost(
    attention: str,
    options: dict[str, Any],
    *,
    heads: int,
    head_dim: int,
    is_causal: bool,
    lengths: tuple[int, ...] = LENGTHS,
    on_length: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Rows of milliseconds and MiB for each length; softmax is torch's scaled_dot_product_attention."""
    rows = []
    sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "is_causal": is_causal}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {"softmax": ("softmax", {}), "linear": (attention, options)}
    busy = noise()
    for tokens in lengths:
        calls = {name: _call(kind, given, tokens, **sizes).run for name, (kind, given) in kinds.items()}
        times = time_in_turns(calls, seconds=SECONDS)
        row: dict[str, Any] = {"tokens": tokens}
        for name, (kind, given) in kinds.items():
            row[f"{name}_ms"] = round(1e3 * times[name].median, 3)
            make = partial(_call, kind, given, **sizes)
            row[f"{name}_mib"] = round(in_new_process(peak_of_call, make, tokens).peak_bytes / MIB, 2)
        row["speed_up"] = round(times["softmax"].median / times["linear"].median, 2)
        rows.append(row)
        on_length()
    return {"threads": torch.get_num_threads(), "noise": busy, "rows": rows}


def _call(attention: str, options: dict[str, Any], tokens: int, *, heads: int, head_dim: int, is_causal: bool) -> Call:
    module = build(attention, num_heads=heads, head_dim=head_dim, max_len=tokens, **options).eval()
    inputs = random_heads(tokens, heads=heads, head_dim=head_dim)
    return attention_call(partial(module, is_causal=is_causal), inputs, like=None)
