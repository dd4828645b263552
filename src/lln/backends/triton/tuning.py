"""Kernels by name, and with how many pipeline stages they run: the fastest, which is measured once and kept.

Tiles and warps are fixed (`configs`), so that results do not depend on what is measured.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lln.backends.triton.configs import Config, config_of, stages_of
from lln.backends.triton.kernels import (
    causal,
    causal_backward,
    full_backward,
    gradients,
    moments,
    near,
    prefix,
    step,
    summary,
)
from lln.cache import cache_folder

MODULES = (moments, prefix, summary, full_backward, gradients, causal, causal_backward, near, step)
FILE = "triton-stages.json"
# A program goes through few tiles of shorter inputs, so that nothing is loaded ahead and all numbers of stages take as
# long: the choice would be noise, and kept.
FEWEST_TOKENS = 1024


class Call(NamedTuple):
    """A call of a kernel: its name, grid, padded widths, dtype of the tokens and arguments."""

    kernel: str
    grid: tuple[int, ...]
    widths: tuple[int, int]
    dtype: torch.dtype
    arguments: dict[str, Any]

    def config(self) -> Config:
        return config_of(self.kernel, *self.widths, is_float32=self.dtype == torch.float32)

    def tiles(self) -> dict[str, int]:
        names = kernels()[self.kernel].arg_names
        return {name: self.config().tile for name in ("BLOCK_N", "BLOCK_M") if name in names}


def tensors_of(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among arguments and their named parts, such as "keys.rows.pointer"."""
    found = {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            found[name] = x
        elif isinstance(x, tuple):
            parts = x._asdict()  # type: ignore[attr-defined]
            found |= {f"{name}.{part}": y for part, y in tensors_of(parts).items()}
    return found


_recorded: list[Call] | None = None


@functools.cache
def kernels() -> dict[str, Any]:
    return {name: kernel for module in MODULES for name, kernel in vars(module).items() if name.endswith("_kernel")}


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Calls are put into a list instead of being made, so that tensors may be on the meta device."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def run(
    kernel: str, grid: tuple[int, ...], widths: tuple[int, int], dtype: torch.dtype, arguments: dict[str, Any]
) -> None:
    call = Call(kernel, grid, widths, dtype, arguments)
    if _recorded is not None:
        _recorded.append(call)
        return
    options = {"num_warps": call.config().warps, "maxnreg": call.config().registers}
    function = functools.partial(kernels()[kernel][grid], **arguments, **call.tiles(), **options)
    tensor = next(iter(tensors_of(arguments).values()))
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]  # Triton launches on the current GPU
        is_cpu = tensor.device.type == "cpu"
        function(num_stages=call.config().stages if is_cpu else fastest_stages(call, tensor.device, function))


def fastest_stages(call: Call, device: torch.device, function: Callable[..., Any]) -> int:
    """The number of stages that took the least time on this GPU; kept in the cache folder for other processes.

    It is measured in the first call of at least `FEWEST_TOKENS`; until then it is the first choice.
    """
    key = f"{torch.cuda.get_device_name(device)} {call.kernel} {call.widths} {call.dtype}"
    known = _known()
    if key not in known:
        choices = stages_of(call.kernel, call.config())
        is_short = call.arguments.get("tokens", 0) < FEWEST_TOKENS
        if len(choices) == 1 or is_short or torch.cuda.is_current_stream_capturing():
            return choices[0]
        known[key] = min(choices, key=lambda stages: _milliseconds(functools.partial(function, num_stages=stages)))
        _write(known)
    return known[key]


@functools.cache
def _known() -> dict[str, int]:
    try:
        found = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
        return {str(name): int(stages) for name, stages in found.items()}
    except (OSError, ValueError, AttributeError):  # not there, or not ours: measured again
        return {}


def _write(known: dict[str, int]) -> None:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{FILE}.partial"
        partial.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
        partial.replace(folder / FILE)
    except OSError:
        return  # measured again by the next process


def _milliseconds(function: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    time: float = do_bench(function, warmup=5, rep=20)
    return time
