"""One run of a matrix in a process of its own, `python -m lln.tasks.lra.worker JOB`; see `runner`."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

WATCH_SECONDS = 2.0


def main() -> None:
    threading.Thread(target=_stop_with_parent, args=(os.getppid(),), daemon=True).start()
    from lln.tasks.lra.recipe import LraConfig, train

    job = json.loads(sys.argv[1])
    settings = job["config"] | {"betas": tuple(job["config"]["betas"])}
    try:
        train(LraConfig(**settings), out=Path(job["out"]), data_dir=Path(job["data_dir"]) if job["data_dir"] else None)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _stop_with_parent(parent: int) -> None:
    """Ask this process to stop, with a checkpoint, once the process that started it is gone."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
