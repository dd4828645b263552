"""One memory measurement in a process of its own, `python -m lln.tasks.lra.peak JOB`; see `bench.peak_memory`."""

import json
import sys

from lln.bench.measure import peak_bytes, reset_peak
from lln.tasks.lra.bench import training_step


def main() -> None:
    job = json.loads(sys.argv[1])
    training_step(**(job | {"length": 64, "batch": 1}))()  # loads what is loaded at first use
    step = training_step(**job)
    reset_peak()
    before = peak_bytes()
    step()
    print(peak_bytes() - before)


if __name__ == "__main__":
    main()
