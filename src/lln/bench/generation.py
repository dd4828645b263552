"""`lln bench decode --model`: what one more token costs a whole model, with softmax attention and converted.

A step is a forward pass of one token with the cache of the tokens before it, and the choice of the next one: what
`generate` repeats. The cache of softmax attention is the one that `generate` makes, which is copied to grow; its new
token is taken back after each step, so that all steps of a context are alike. Both models take turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lln.bench.measure import time_in_turns
from lln.results import Row

CONTEXTS = (64, 8192)
PIECE = 2048  # tokens that are read at once


def compare_generation(
    folder: str,
    contexts: Sequence[int] = CONTEXTS,
    *,
    attention: str = "lln_diag",
    options: Mapping[str, Any] | None = None,
    seconds: float = 40.0,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> Iterator[Row]:
    """A row for each context and attention: milliseconds a token, and the ratio of the medians to that of softmax."""
    from transformers import AutoModelForCausalLM

    import lln.hf

    torch.manual_seed(seed)
    pair: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]
    softmax, converted = (model.eval() for model in pair)
    models = {"softmax": softmax, attention: lln.hf.convert(converted, attention, **(options or {}))}
    ids = torch.randint(softmax.config.vocab_size, (1, max(contexts)))
    with torch.inference_mode():
        for tokens in contexts:
            steps = {name: _step(model, ids[:, :tokens]) for name, model in models.items()}
            timings = time_in_turns(steps, seconds=seconds / len(contexts), at_most=1000)
            for name, timing in timings.items():
                on_step()
                ratio = timing.median / timings["softmax"].median
                yield {"tokens": tokens, "mechanism": name} | timing.row() | {"ratio": ratio}


def _step(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """One more token after `ids`, again and again."""
    cache: Any = None
    for piece in torch.split(ids, PIECE, dim=1):
        output = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    token = output.logits[:, -1:].argmax(-1)
    is_state = any(type(layer).__name__ == "StateLayer" for layer in cache.layers)

    def step() -> object:
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        if not is_state:
            cache.crop(-1)
        return logits[:, -1].argmax(-1)

    return step
