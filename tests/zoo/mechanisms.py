"""Every mechanism of the registry, small, and tokens for it: what the tests of all mechanisms share."""

import torch
from torch import Tensor, nn

import lln.zoo

NAMES = lln.zoo.names()
LINEAR = [name for name in NAMES if lln.zoo.describe(name).linear]
CAUSAL = [name for name in NAMES if lln.zoo.describe(name).causal]
HEADS, DIM, MAX_LEN = 2, 8, 160

# Smaller than the defaults, so that 65 tokens are many and the suite stays quick.
SMALL: dict[str, dict[str, object]] = {
    "linformer": {"rank": 16},
    "nystrom": {"num_landmarks": 16},
    "skyformer": {"num_landmarks": 8},
}


def make(
    name: str, *, seed: int = 0, heads: int = HEADS, dim: int = DIM, max_len: int = MAX_LEN, **options: object
) -> nn.Module:
    torch.manual_seed(seed)
    options = SMALL.get(name, {}) | options
    return lln.zoo.build(name, num_heads=heads, head_dim=dim, max_len=max_len, **options).eval()


def tokens(
    number: int,
    *,
    seed: int = 1,
    batch: int = 2,
    heads: int = HEADS,
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return tuple(torch.randn(batch, heads, number, dim, dtype=torch.float64).to(dtype) for _ in range(3))


def run(module: nn.Module, *qkv: Tensor, **options: object) -> Tensor:
    """A forward pass from a known state of torch's random numbers."""
    torch.manual_seed(2)
    return module(*qkv, **options)
