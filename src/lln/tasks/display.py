"""What a run shows and writes while it goes on: the progress bar, lines of metrics, TensorBoard; and Ctrl-C."""

import signal
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from lln.instruments.records import RecordFile
from lln.terminal import Progress


class Display:
    """The progress bar of a run, and lines for what it found; nothing if quiet."""

    def __init__(self, label: str, steps: int, first_step: int, *, quiet: bool) -> None:
        self._label, self._quiet = label, quiet
        self._bar = Progress(label, steps, completed=first_step, quiet=quiet)
        self._bar.__enter__()

    def print(self, message: str) -> None:
        if not self._quiet:
            self._bar.print(message)

    def step(self, step: int) -> None:
        self._bar.update(step)

    def evaluating(self, share: float) -> None:
        """Show how much of an evaluation is done."""
        self._bar.update(text=f"evaluating, {share:.0%}")

    def line(self, line: dict[str, Any]) -> None:
        """Show a line of metrics."""
        if "eval_loss" in line:
            shown = ", ".join(f"{key.removeprefix('eval_')} {value:.4f}" for key, value in _evaluated(line).items())
            self.print(f"{self._label} step {line['step']}: validation {shown}")
        else:
            self._bar.update(text=f"loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s")

    def close(self) -> None:
        self._bar.__exit__(None, None, None)


class Metrics:
    """Lines of metrics, in the file, in TensorBoard and on the display."""

    def __init__(self, folder: Path, first_step: int, display: Display) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = RecordFile(folder / "metrics.jsonl")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self._display = display

    def add(self, line: dict[str, Any]) -> None:
        self._file.append([line])
        for name, value in line.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name.replace("eval_", "eval/"), value, line["step"])
        self._display.line(line)

    def close(self) -> None:
        self._file.close()
        self._board.close()


class StopSignals(AbstractContextManager["StopSignals"]):
    """Ctrl-C and SIGTERM end the run after a last checkpoint; a second Ctrl-C ends it at once."""

    def __init__(self, display: Display) -> None:
        self.requested = False
        self._display = display
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request_stop)
        return self

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._display.print("Stopping after this step, with a checkpoint; once more to stop at once.")

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _evaluated(line: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key.startswith("eval_") and key != "eval_seconds"}
