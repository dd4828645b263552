"""Between a run and whoever watches it: the progress bar, lines of metrics, TensorBoard, and Ctrl-C."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lln.instruments.records import RecordFile
from lln.report.console import plain_console

LINE_SECONDS = 30.0  # between lines where there is no terminal


class Display:
    """A progress bar on a terminal; elsewhere a line now and then; nothing if quiet."""

    def __init__(self, label: str, steps: int, first_step: int, *, quiet: bool) -> None:
        self._label, self._steps, self._quiet = label, steps, quiet
        self._console = plain_console(stderr=True)
        self._began, self._first_step = time.monotonic(), first_step
        self._last_line = -LINE_SECONDS
        self._bar: Progress | None = None
        if not quiet and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}", markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(label, total=steps, completed=first_step, numbers="")
            self._bar.start()

    def say(self, message: str) -> None:
        if not self._quiet:
            self._console.print(message)

    def step(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def evaluating(self, step: int, share: float) -> None:
        """Show how much of an evaluation is done."""
        if self._bar is not None:
            self._bar.update(self._task, numbers=f"evaluating, {share:.0%}")
        elif time.monotonic() - self._began - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic() - self._began
            self.say(f"{self._label} step {step}/{self._steps}: evaluating, {share:.0%}")

    def line(self, line: dict[str, Any]) -> None:
        """Show a line of metrics."""
        if "eval_loss" in line:
            shown = ", ".join(f"{key.removeprefix('eval_')} {value:.4f}" for key, value in _evaluated(line).items())
            self.say(f"{self._label} step {line['step']}: validation {shown}")
            return
        numbers = f"loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s"
        now = time.monotonic() - self._began
        if self._bar is not None:
            self._bar.update(self._task, numbers=numbers)
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            left = now / (line["step"] - self._first_step) * (self._steps - line["step"])
            self.say(f"{self._label} step {line['step']}/{self._steps}: {numbers}, {left:.0f} s left")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        sys.stderr.flush()


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

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("Stopping after this step, with a checkpoint; once more to stop at once.")

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _evaluated(line: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key.startswith("eval_") and key != "eval_seconds"}
