"""What all calls of kernels share: tensors as arguments, padded widths, and the launch itself.

Shapes: B batch, H heads, N queries, M keys, D features, V value width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.backends.base import empty_rows
from lln.backends.triton import configs
from lln.backends.triton.configs import power_of_two, value_block
from lln.backends.triton.kernels.common import Keys, Queries, Rows
from lln.matching.curves import Form

Arguments = dict[str, Any]
OFFSET = 256.0


class FarInputs(NamedTuple):
    """Tokens of LLN attention, and what weighs them; scales are (1 or B, 1 or H, 1 or tokens)."""

    query: Tensor
    key: Tensor
    value: Tensor
    keep_query: Tensor | None
    keep_key: Tensor | None
    alpha: Tensor | None
    beta: Tensor | None
    key_weight: Tensor | None  # (B, H, M)
    center_query: Tensor | None  # (1 or B, H, D)
    center_key: Tensor | None  # (1 or B, H_k, D)

    def with_scales(self, alpha: Tensor, beta: Tensor) -> "FarInputs":
        return self._replace(alpha=alpha, beta=beta)


def launch(
    kernel: str, grid: tuple[int, ...], *, widths: tuple[int, int], dtype: torch.dtype, **arguments: Any
) -> None:
    """Run a kernel with the tiles of its config. Tests and `lln bench kernels` record calls instead."""
    from lln.backends.triton.tuning import run

    run(kernel, grid, widths, dtype, arguments)


def precision_of(dtype: torch.dtype) -> str:
    """How factors of a product are rounded: as tensor cores do for half precision, else as float32."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "tf32x3"


def rows_of(x: Tensor) -> Rows:
    """A tensor (B, heads, tokens, features) as an argument of a kernel."""
    return Rows(x, *x.stride()[:3])


def scale_of(x: Tensor | None) -> Rows | None:
    """Numbers of tokens (B, H, N), with stride 0 along what shares one."""
    if x is None:
        return None
    return Rows(x, *(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True)))


def center_of(x: Tensor | None) -> Rows | None:
    """Centres (1 or B, heads, D)."""
    return None if x is None else Rows(x, x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), 0)


def keep_of(x: Tensor | None) -> Rows | None:
    """A mask (B, N)."""
    return None if x is None else Rows(x, x.stride(0), 0, 1)


def queries_of(inputs: FarInputs, keep: Tensor | None) -> Queries:
    scale = scale_of(inputs.alpha)
    assert scale is not None
    return Queries(rows_of(inputs.query), keep_of(keep), scale, center_of(inputs.center_query))


def keys_of(inputs: FarInputs) -> Keys:
    scale = scale_of(inputs.beta)
    assert scale is not None
    centers = center_of(inputs.center_key), center_of(inputs.center_query)
    return Keys(rows_of(inputs.key), keep_of(inputs.keep_key), scale, scale_of(inputs.key_weight), *centers)


def new_floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _widths(query: Tensor, value: Tensor, *, is_causal: bool = False) -> tuple[Arguments, int]:
    """The widths and their blocks, and the padded width of values."""
    width, value_width = query.shape[3], value.shape[3]
    block_d = power_of_two(width)
    is_float32 = query.dtype == torch.float32
    entries = configs.FLOAT32_SUM_ENTRIES if is_float32 else configs.SUM_ENTRIES
    if is_causal:
        entries = configs.CAUSAL_SUM_ENTRIES
    block_v = value_block(block_d, value_width, entries)
    blocks = -(-value_width // block_v)
    sizes = {"D": width, "V": value_width, "BLOCK_D": block_d, "BLOCK_V": block_v, "VALUE_BLOCKS": blocks}
    return sizes, blocks * block_v


def padded_values(query: Tensor, value: Tensor) -> int:
    """The padded width of values."""
    return _widths(query, value)[1]


def contiguous_features(x: Tensor) -> Tensor:
    """x as kernels read it; a copy keeps the order of samples, heads and tokens, which is that of the output too."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else empty_rows(x, x.shape[3]).copy_(x)


def without_offset(inputs: FarInputs, form: Form) -> FarInputs:
    """Log-weights less that of the first kept key, which cancels: large sums would lose digits.

    Not where the weight and beta k of that key cancel. What is subtracted is a multiple of `OFFSET`, so that float32
    differences of large weights are exact.
    """
    weight, keep = inputs.key_weight, inputs.keep_key
    if weight is None:
        return inputs
    place = weight.new_zeros(len(weight), dtype=torch.int64) if keep is None else keep.argmax(dim=1)
    place = place[:, None, None]
    first = weight.take_along_dim(place, dim=2)
    offset = (first / OFFSET).round() * OFFSET
    if form == "paper":
        assert inputs.beta is not None
        beta = inputs.beta.expand(weight.shape).take_along_dim(place, dim=2)
        key = inputs.key.take_along_dim(place[..., None], dim=2).float().mean(dim=3)
        key = key.repeat_interleave(weight.shape[1] // key.shape[1], dim=1)
        offset = offset.masked_fill((first + beta * key).abs() < first.abs() / 2, 0.0)
    return inputs._replace(key_weight=weight - offset)


def prepared(inputs: FarInputs) -> FarInputs:
    """Inputs as kernels read them: features are contiguous, masks are bytes, centres are float32."""
    query, key, value, keep_query, keep_key, alpha, beta, weight, center_query, center_key = inputs
    tokens = (contiguous_features(x) for x in (query, key, value))
    masks = (None if x is None else x.contiguous().view(torch.uint8) for x in (keep_query, keep_key))
    centers = (None if x is None else x.float().contiguous() for x in (center_query, center_key))
    return FarInputs(*tokens, *masks, alpha, beta, weight, *centers)  # type: ignore[call-arg]


class Launcher:
    """Launches kernels for tensors of one dtype and width."""

    def __init__(self, query: Tensor, value: Tensor, *, is_causal: bool = False) -> None:
        self.sizes, self.value_width = _widths(query, value, is_causal=is_causal)
        self.widths = self.sizes["BLOCK_D"], self.sizes["BLOCK_V"]
        self.value_power = power_of_two(value.shape[3])
        self.dtype = query.dtype
        self.precision = precision_of(query.dtype)

    def __call__(self, kernel: str, *grid: int, needs: str = "", **arguments: Any) -> None:
        """`needs` names the sizes that a kernel takes; those that are among the arguments are taken from there."""
        sizes = {name: self.sizes[name] for name in needs.split()}
        launch(kernel, grid, widths=self.widths, dtype=self.dtype, **(sizes | arguments))

    def split(self, tokens: int) -> tuple[int, int]:
        return configs.split_of(tokens, is_float32=self.dtype == torch.float32)

    def tile(self, kernel: str) -> int:
        return configs.config_of(kernel, *self.widths, is_float32=self.dtype == torch.float32).tile

    def tiles(self, kernel: str, tokens: int) -> int:
        return -(-tokens // self.tile(kernel))


ALL = "D V BLOCK_D BLOCK_V VALUE_BLOCKS"
