"""The kernels, in Triton: only `triton` is imported here, and only where it is installed."""
