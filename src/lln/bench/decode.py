"""`lln bench decode`: what one more token costs after a long context, with a state of constant size or with a cache.

`lln` and `lln_diag` take `LLNState.step(..., in_place=True)`, as a converted model does. `cache` is softmax attention
over a key-value cache in a buffer that was allocated for the whole context beforehand, `cache_cat` over one that is
copied to grow, as `generate` does by default.
All contexts of all four are timed in the same rounds, so that the growth with the context is a ratio of one run.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.bench.measure import time_in_turns
from lln.bench.new_process import in_new_process
from lln.bench.peak import Call, Peak, peak_of_call, random_heads
from lln.results import Row
from lln.state import LLNState

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
MECHANISMS = ("lln", "lln_diag", "cache", "cache_cat")
BLOCK_SIZES = {"lln": None, "lln_diag": 64}
PIECE = 4096  # tokens that are put into a state at once


def compare_decoding(
    contexts: Sequence[int] = CONTEXTS,
    *,
    heads: int = 12,
    head_dim: int = 64,
    seconds: float = 40.0,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> Iterator[Row]:
    """A row for each context and mechanism: milliseconds of a step, bytes held, and a step's peak bytes beyond them.

    `on_step` is called `steps(contexts)` times, for a progress bar.
    """
    torch.manual_seed(seed)
    contexts = sorted(contexts)
    states: dict[tuple[str, int], LLNState] = {}
    for name in BLOCK_SIZES:
        for tokens, state in _states(name, contexts, heads=heads, head_dim=head_dim):
            states[name, tokens] = state
            on_step()
    _, key, value = random_heads(contexts[-1] + 1, heads=heads, head_dim=head_dim)
    calls: dict[tuple[str, int], Call] = {place: _state_call(state) for place, state in states.items()}
    for tokens in contexts:
        calls["cache", tokens] = _cache_call(key[:, :, : tokens + 1], value[:, :, : tokens + 1], copied=False)
        calls["cache_cat", tokens] = _cache_call(key[:, :, :tokens], value[:, :, :tokens], copied=True)
    with torch.inference_mode():
        timings = time_in_turns(
            {f"{name} {tokens}": call.run for (name, tokens), call in calls.items()}, seconds=seconds, at_most=1000
        )
    on_step()
    for name in MECHANISMS:
        for tokens in contexts:
            timing = timings[f"{name} {tokens}"]
            held, peak = _memory(name, tokens, states.get((name, tokens)), heads=heads, head_dim=head_dim)
            on_step()
            memory = {"held_bytes": held, "step_bytes": peak.peak_bytes, "total_bytes": held + peak.peak_bytes}
            yield {"tokens": tokens, "mechanism": name} | timing.row() | memory


def steps(contexts: Sequence[int]) -> int:
    return len(contexts) * (len(BLOCK_SIZES) + len(MECHANISMS)) + 1


def _states(name: str, contexts: Sequence[int], *, heads: int, head_dim: int) -> Iterator[tuple[int, LLNState]]:
    """The state after each context, piece by piece: random tokens, which a state does not keep."""
    state = LLNState.empty(1, heads, head_dim, block_size=BLOCK_SIZES[name])
    seen = 0
    with torch.inference_mode():
        for tokens in contexts:
            while seen < tokens:
                piece = random_heads(min(PIECE, tokens - seen), heads=heads, head_dim=head_dim)
                _, state = state.prefill(*piece)
                seen += piece[0].shape[2]
            yield tokens, state


def _state_call(state: LLNState) -> Call:
    token = random_heads(1, heads=state.values.shape[1], head_dim=state.values.shape[2])

    def step() -> tuple[Tensor, ...]:
        nonlocal state
        output, state = state.step(*token, in_place=True)
        return (output,)

    return Call(token, step)


def _cache_call(key: Tensor, value: Tensor, *, copied: bool) -> Call:
    """One more token after the cached ones; not `copied`, its place is the last one of the buffers."""
    token = random_heads(1, heads=key.shape[1], head_dim=key.shape[3])

    def step() -> tuple[Tensor, ...]:
        query, new_key, new_value = token
        if copied:
            keys, values = torch.cat((key, new_key), dim=2), torch.cat((value, new_value), dim=2)
        else:
            keys, values = key, value
            keys[:, :, -1:], values[:, :, -1:] = new_key, new_value
        return (scaled_dot_product_attention(query, keys, values),)

    return Call(token, step)


def _memory(name: str, tokens: int, state: LLNState | None, *, heads: int, head_dim: int) -> tuple[int, Peak]:
    """Bytes held from one step to the next, and the peak of a step beyond them, in a process of its own."""
    if state is None:
        make: Any = partial(_new_cache_call, heads, head_dim, name == "cache_cat")
        return 2 * heads * head_dim * tokens * 4, in_new_process(peak_of_call, make, tokens)
    stored = io.BytesIO()  # tensors that are sent to another process as they are stay in the memory of both
    torch.save(state.to_dict(), stored)
    return state.nbytes, in_new_process(peak_of_call, partial(_stored_state_call, stored.getvalue()), tokens)


def _new_cache_call(heads: int, head_dim: int, copied: bool, tokens: int) -> Call:
    _, key, value = random_heads(tokens, heads=heads, head_dim=head_dim)
    return _cache_call(key, value, copied=copied)


def _stored_state_call(stored: bytes, tokens: int) -> Call:
    return _state_call(LLNState.from_dict(torch.load(io.BytesIO(stored))))
