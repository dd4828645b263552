import os

# Some virtual machines report AMX but do not allow its instructions, so that torch's bfloat16 products end the process.
# Read when torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

# Many small tensors: a second thread costs more than it gives, and each pytest worker has a core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tokens():
    """Makes query (B, H, N, D), key (B, H_k, M, D) and value (B, H_k, M, Dv), off-centre so that means matter."""

    def make(B=2, H=4, N=65, D=16, *, Hk=None, M=None, Dv=None, dtype=torch.float64, scale=1.0, grad=False):
        shapes = (B, H, N, D), (B, Hk or H, M or N, D), (B, Hk or H, M or N, Dv or D)
        offsets = (0.1, -0.3, 0.2)
        return [
            (scale * (torch.randn(shape, dtype=torch.float64) + offset)).to(dtype).requires_grad_(grad)
            for shape, offset in zip(shapes, offsets, strict=True)
        ]

    return make
