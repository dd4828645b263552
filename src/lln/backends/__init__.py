"""How attention is computed.

`plain` is torch alone: any device, compiles, exports, differentiates twice. `fused` is C for CPUs, built at first use.
`explain` says which of them an input takes, and why; `LLN_KERNEL=torch` makes all take the first.
"""

from lln.kernels.dispatch import explain

__all__ = ["explain"]
