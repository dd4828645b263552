"""`lln bench spine`: what the parts of the library cost beside each other, as ratios of one run.

Calls against an earlier checkout, the forms against the paper's, windows against blocks, packed sequences against a
batch, a state against causal attention and against a cache, and `generate` of a whole model against softmax attention.
What is compared takes turns (`lln.bench.measure.time_in_turns`); a ratio is that of medians.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.bench.measure import Timing, time_in_turns, timing
from lln.bench.peak import random_heads
from lln.functional import lln_attention, lln_diag_attention
from lln.results import Row
from lln.state import LLNState

LENGTHS = (128, 512, 2048, 4096, 16384)
HEADS, HEAD_DIM, BLOCK_SIZE = 12, 64, 64
CONTEXTS = (64, 8192)  # of `generate`
NEW_TOKENS = 16  # that `generate` makes in a turn
PARTS = ("call", "before", "forms", "window", "packed", "prefill", "step", "generate")

Attention = Callable[..., Tensor]
Runs = dict[str, Callable[[], object]]


def compare_spine(
    parts: Sequence[str] = PARTS,
    lengths: Sequence[int] = LENGTHS,
    *,
    before: Path | None = None,
    model: str | None = None,
    seconds: float = 4.0,
    seed: int = 0,
) -> Iterator[Row]:
    """A row for each comparison: milliseconds of both with quartiles, their ratio, and the goal it has.

    Args:
        parts: some of `PARTS`; "before" is left out without `before`, "generate" without `model`.
        lengths: numbers of tokens.
        before: the folder of an earlier checkout of this library.
        model: the folder of a causal language model.
        seconds: about how long each comparison is measured.
        seed: of everything that is drawn at random.

    Raises:
        ValueError: a part is unknown.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"parts must be some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    torch.manual_seed(seed)
    if "call" in parts:
        yield from _calls(seconds)
    if "before" in parts and before is not None:
        yield from _against(before, lengths, seconds)
    if "forms" in parts:
        yield from _forms(lengths, seconds)
    if "window" in parts:
        yield from _window(lengths, seconds)
    if "packed" in parts:
        yield from _packed(seconds)
    if "prefill" in parts:
        yield from _prefill(seconds)
    if "step" in parts:
        yield from _steps(seconds)
    if "generate" in parts and model is not None:
        yield from _generate(model, seconds)


def number_of_rows(parts: Sequence[str], lengths: Sequence[int], *, before: bool, model: bool) -> int:
    """How many rows `compare_spine` gives."""
    each = {"call": 1, "before": 8 * before, "forms": 8, "window": 4}
    fixed = {"call": 3, "packed": 4, "prefill": 2, "step": 7, "generate": len(CONTEXTS) * model}
    return sum(each.get(x, 0) * len(lengths) if x not in fixed else fixed[x] for x in parts)


def _row(part: str, case: str, tokens: int, ours: Timing, other: Timing, **more: Any) -> Row:
    return {
        "part": part,
        "case": case,
        "tokens": tokens,
        "milliseconds": ours.median * 1e3,
        "quartiles": [ours.low * 1e3, ours.high * 1e3],
        "other_milliseconds": other.median * 1e3,
        "other_quartiles": [other.low * 1e3, other.high * 1e3],
        "repeats": ours.repeats,
        "ratio": ours.median / other.median,
        **more,
    }


def _runs(attentions: Mapping[str, Attention], tensors: Sequence[Tensor], *, backward: bool) -> Runs:
    """Calls of attentions with the same query, key and value."""
    if not backward:
        return {name: lambda f=f: f(*tensors) for name, f in attentions.items()}  # type: ignore[misc]
    leaves = [x.clone().requires_grad_() for x in tensors]
    gradient = torch.randn_like(tensors[0])

    def run(attention: Attention) -> object:
        return torch.autograd.grad(attention(*leaves), leaves, gradient)

    return {name: lambda f=f: run(f) for name, f in attentions.items()}  # type: ignore[misc]


def _in_passes(
    part: str, case: str, tokens: int, attentions: Mapping[str, Attention], base: str, seconds: float, goal: float
) -> Iterator[Row]:
    """Attentions against the one called `base`, forward and with gradients."""
    tensors = random_heads(tokens, heads=HEADS, head_dim=HEAD_DIM)
    for backward in (False, True):
        timings = time_in_turns(_runs(attentions, tensors, backward=backward), seconds=seconds, at_most=1000)
        for name in attentions:
            if name != base:
                label = f"{name}, {case}, forward{'+backward' if backward else ''}"
                yield _row(part, label, tokens, timings[name], timings[base], goal=goal)


def _calls(seconds: float) -> Iterator[Row]:
    """Calls with one token, whose time is that of a call itself; SDPA for comparison. The goal is in milliseconds."""
    q, k, v = random_heads(1, heads=HEADS, head_dim=HEAD_DIM)
    runs: Runs = {
        "lln": lambda: lln_attention(q, k, v),
        "lln_diag": lambda: lln_diag_attention(q, k, v),
        "lln, causal": lambda: lln_attention(q, k, v, is_causal=True),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v),
    }
    least = {name: min(_seconds(run) for _ in range(2000)) * 1e3 for name, run in runs.items()}
    timings = time_in_turns(runs, seconds=seconds, at_most=5000)
    for name in list(runs)[:-1]:
        yield _row("call", name, 1, timings[name], timings["sdpa"], goal_milliseconds=0.045, least=least[name])


def _against(folder: Path, lengths: Sequence[int], seconds: float) -> Iterator[Row]:
    earlier = load_checkout(folder)
    for tokens in lengths:
        for name, ours in (("lln_attention", lln_attention), ("lln_diag_attention", lln_diag_attention)):
            for is_causal in (False, True):
                options = {"is_causal": is_causal}
                both = {name: _with(ours, options), "before": _with(getattr(earlier, name), options)}
                case = "causal" if is_causal else "full"
                yield from _in_passes("before", case, tokens, both, "before", seconds, 1.02)


def load_checkout(folder: Path) -> Any:
    """The package of another checkout of this library, beside this one in the same process.

    Its modules have the same names, so those of this one are put aside while it is imported and tried.
    """
    source = folder / "src"
    if not (source / "lln" / "__init__.py").is_file():
        raise ValueError(f"{folder} is no checkout of this library: there is no src/lln in it")
    own = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "lln"}
    for name in own:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    try:
        package = importlib.import_module("lln")
        tensors = [x.requires_grad_() for x in random_heads(8, heads=2, head_dim=8)]
        for is_causal in (False, True):  # imports and builds what the first calls need
            torch.autograd.backward(package.lln_diag_attention(*tensors, is_causal=is_causal).sum())
    finally:
        sys.path.remove(str(source))
        for name in [name for name in sys.modules if name.split(".")[0] == "lln"]:
            del sys.modules[name]
        sys.modules.update(own)
    return package


def _forms(lengths: Sequence[int], seconds: float) -> Iterator[Row]:
    centers = torch.randn(HEADS, HEAD_DIM) / 4, torch.randn(HEADS, HEAD_DIM) / 4
    for tokens in lengths:
        for is_causal in (False, True):
            options: dict[str, dict[str, Any]] = {name: {"form": name} for name in ("paper", "unbiased", "decomposed")}
            if is_causal:
                options["decomposed"]["centers"] = centers
            forms = {name: _with(lln_attention, {**x, "is_causal": is_causal}) for name, x in options.items()}
            yield from _in_passes("forms", "causal" if is_causal else "full", tokens, forms, "paper", seconds, 1.12)


def _window(lengths: Sequence[int], seconds: float) -> Iterator[Row]:
    for tokens in lengths:
        for is_causal in (False, True):
            nears = {
                near: _with(lln_diag_attention, {"near": near, "block_size": BLOCK_SIZE, "is_causal": is_causal})
                for near in ("window", "blocks")
            }
            yield from _in_passes("window", "causal" if is_causal else "full", tokens, nears, "blocks", seconds, 1.35)


def _packed(seconds: float, sequences: int = 16, tokens: int = 512) -> Iterator[Row]:
    batch = [torch.randn(sequences, HEADS, tokens, HEAD_DIM) for _ in range(3)]
    row = [x.transpose(0, 1).reshape(1, HEADS, sequences * tokens, HEAD_DIM) for x in batch]
    starts = torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32)
    for is_causal in (False, True):
        options = {"is_causal": is_causal}
        packed = {"packed": _with(lln_diag_attention, {**options, "cu_seqlens": starts})}
        whole = {"batch": _with(lln_diag_attention, options)}
        for backward in (False, True):
            runs = _runs(packed, row, backward=backward) | _runs(whole, batch, backward=backward)
            timings = time_in_turns(runs, seconds=seconds, at_most=1000)
            case = f"{'causal' if is_causal else 'full'}, forward{'+backward' if backward else ''}"
            yield _row("packed", case, sequences * tokens, timings["packed"], timings["batch"], goal=1.05)


def _prefill(seconds: float, tokens: int = 512) -> Iterator[Row]:
    tensors = random_heads(tokens, heads=HEADS, head_dim=HEAD_DIM)
    with torch.inference_mode():
        for name, attention, size in (("lln", lln_attention, None), ("lln_diag", lln_diag_attention, BLOCK_SIZE)):
            empty = LLNState.empty(1, HEADS, HEAD_DIM, block_size=size)
            runs: Runs = {
                "prefill": lambda empty=empty: empty.prefill(*tensors),  # type: ignore[misc]
                "causal": lambda attention=attention: attention(*tensors, is_causal=True),  # type: ignore[misc]
            }
            timings = time_in_turns(runs, seconds=seconds, at_most=1000)
            yield _row("prefill", name, tokens, timings["prefill"], timings["causal"], goal=1.15)


def _steps(seconds: float, context: int = 1024, long: int = 131072) -> Iterator[Row]:
    """One token of a state in place, against SDPA over a cache of `context` tokens; and after `long` tokens."""
    _, key, value = random_heads(context + 1, heads=HEADS, head_dim=HEAD_DIM)
    query, new_key, new_value = random_heads(1, heads=HEADS, head_dim=HEAD_DIM)
    centers = torch.randn(HEADS, HEAD_DIM) / 4, torch.randn(HEADS, HEAD_DIM) / 4
    near = {"block_size": BLOCK_SIZE}
    kinds: dict[str, tuple[dict[str, Any], int, float]] = {
        "lln": ({}, context, 1 / 3),
        "lln_diag": (near, context, 1 / 2),
        "window": ({**near, "near": "window"}, context, 1 / 2),
        "decomposed": ({"form": "decomposed", "centers": centers}, context, 1 / 3),
        "decomposed with blocks": ({**near, "form": "decomposed", "centers": centers}, context, 1 / 2),
        "lln after 131,072 tokens": ({}, long, 1 / 3),
        "lln_diag after 131,072 tokens": (near, long, 1 / 2),
    }

    def cached() -> Tensor:
        key[:, :, -1:], value[:, :, -1:] = new_key, new_value
        return scaled_dot_product_attention(query, key, value)

    runs: Runs = {"cache": cached}
    with torch.inference_mode():
        for name, (options, tokens, _) in kinds.items():
            state = LLNState.empty(1, HEADS, HEAD_DIM, **options)
            for _ in range(tokens // context):
                _, state = state.prefill(*random_heads(context, heads=HEADS, head_dim=HEAD_DIM), in_place=True)
            runs[name] = lambda state=state: state.step(query, new_key, new_value, in_place=True)  # type: ignore[misc]
        timings = time_in_turns(runs, seconds=2 * seconds, at_most=2000)
    for name, (_, tokens, goal) in kinds.items():
        yield _row("step", name, tokens, timings[name], timings["cache"], goal=goal)


def _generate(folder: str, seconds: float) -> Iterator[Row]:
    """The time from one token to the next inside of `generate`, continued in turns from caches of the same tokens."""
    from transformers import AutoModelForCausalLM

    import lln.hf

    pair: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]
    softmax, converted = (x.eval() for x in pair)
    models = {"softmax": softmax, "lln_diag": lln.hf.convert(converted, "lln_diag")}
    for context, goal in zip(CONTEXTS, (1.05, 0.5), strict=True):
        ids = torch.randint(softmax.config.vocab_size, (1, context))
        turns = {name: _Generation(model, ids) for name, model in models.items()}
        started = time.perf_counter()
        while time.perf_counter() - started < 5 * seconds or len(turns["softmax"].times) < 3 * NEW_TOKENS:
            for turn in turns.values():
                turn.run()
        timings = {name: timing(turn.times) for name, turn in turns.items()}
        yield _row("generate", "lln_diag", context, timings["lln_diag"], timings["softmax"], goal=goal)


class _Generation:
    """`generate` of a model, again and again from where it stopped; `times` from one token to the next."""

    def __init__(self, model: Any, ids: Tensor, piece: int = 1024) -> None:
        self.model, self.ids, self.cache = model, ids, None
        self.times: list[float] = []
        with torch.inference_mode():
            for part in torch.split(ids[:, :-1], piece, dim=1):
                output = model(part, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
                self.cache = output.past_key_values
        self.run()
        self.times.clear()

    def run(self) -> None:
        ends: list[float] = []

        def note(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            ends.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        self.times += [end - start for start, end in pairwise(ends)]


def _with(attention: Attention, options: Mapping[str, Any]) -> Attention:
    return lambda *tensors: attention(*tensors, **options)


def _seconds(run: Callable[[], object]) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before
