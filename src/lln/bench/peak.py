"""One memory measurement in a process of its own, `python -m lln.bench.peak JOB`; see `measure.peak_memory`."""

import json
import sys

import torch

from lln.bench.measure import peak_bytes, reset_peak
from lln.zoo import build


def main() -> None:
    job = json.loads(sys.argv[1])
    attention = build(job["mechanism"], num_heads=job["heads"], head_dim=job["head_dim"], max_len=job["tokens"])

    def inputs(tokens: int) -> list[torch.Tensor]:
        shape = (1, job["heads"], tokens, job["head_dim"])
        return [torch.randn(shape, requires_grad=job["backward"]) for _ in range(3)]

    def run(tensors: list[torch.Tensor]) -> None:
        output = attention(*tensors)
        if job["backward"]:
            output.sum().backward()

    with torch.set_grad_enabled(job["backward"]):
        run(inputs(64))  # loads what is loaded at first use
        tensors = inputs(job["tokens"])
        reset_peak()
        before = peak_bytes()
        run(tensors)
    print(peak_bytes() - before)


if __name__ == "__main__":
    main()
