"""The folder of a run: what it was, what it measured, and checkpoints that a crash at any moment cannot spoil.

    config.json        every setting; the same folder refuses other settings
    provenance.json    command, commit, seed, machine, and when the run was continued
    data.json          a fingerprint of the data; the same folder refuses other data
    metrics.jsonl      loss, learning rate, gradient norm, speed; evaluations
    records.jsonl      what the heads do
    tensorboard/       the same for TensorBoard
    checkpoints/       step-N/ with the weights (safetensors), the optimiser, and a manifest of sizes and SHA-256 sums
    model/             the trained model
    summary.json       the result; a run that has it is finished

Files are written under another name, flushed to the disk and renamed, so under its own name a file is whole. What a
disk has damaged since is found by the manifest.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
import torch.distributed as dist
from accelerate import PartialState  # type: ignore[import-untyped]
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from lln.instruments.records import read_records
from lln.provenance import commit, provenance, read_json
from lln.results import PARTIAL, Result, flush_folder, write_flushed, write_lines, write_whole
from lln.tasks.config import TrainConfig
from lln.terminal import errors

CONFIG, DATA, PROVENANCE, SUMMARY = "config.json", "data.json", "provenance.json", "summary.json"
MANIFEST, METRICS, HEADS = "manifest.json", "metrics.jsonl", "records.jsonl"
# What to do if a file of a run folder is damaged.
RESTORE = {
    CONFIG: "restore it, or begin the run again in another folder",
    DATA: "remove it, and the command of the run writes it again",
    PROVENANCE: "remove it, and the command of the run writes it again",
    SUMMARY: "remove it, and the command of the run writes it again from the last checkpoint",
}


class RunFolder:
    """A run folder that this process holds; use it in a `with` block.

    Only the `main` process of several writes, and what it reads the others read after it.
    """

    def __init__(
        self, path: str | os.PathLike[str], settings: Mapping[str, Any], *, main: bool = True, quiet: bool = False
    ) -> None:
        self.path = Path(path)
        self.main = main
        self._quiet = quiet or not main
        self._lock: TextIO | None = None
        self._made: list[Path] = []  # folders that were not there before, from the inside out
        self._kept: set[Path] | None = None  # what was in the folder before; None if a run had begun in it
        if main:
            try:
                self._begin(json.loads(json.dumps(dict(settings))))
            except OSError as error:
                self._undo()
                raise OSError(
                    f"the run folder {self.path} cannot be written: {error.strerror or error}; choose another, --out"
                ) from error
            except BaseException:
                self._undo()
                raise

    def _begin(self, settings: dict[str, Any]) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"a run needs a folder, and {self.path} is a file")
        config = self.path / CONFIG
        if self.path.is_dir() and not config.exists() and any(self._foreign()):
            raise ValueError(f"{self.path} is no run folder, it holds other files; choose another with --out")
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        kept = set() if self._made else set(self.path.iterdir())
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is at work in {self.path}; wait for it, or choose another folder"
            ) from None
        self._kept = None if config.exists() else kept
        _keep_or_check(config, settings, "settings")
        history = self.path / PROVENANCE
        if not history.exists():
            command = " ".join(["lln", *sys.argv[1:]])
            origin = provenance(seed=settings.get("seed", 0), command=command)
            write_json(history, origin | {"started": _now(), "continued": []})

    def _foreign(self) -> list[Path]:
        """What is in the folder and was not made by a start that was killed before it wrote config.json."""
        ours = (".lock", "checkpoints", PARTIAL)
        return [path for path in self.path.iterdir() if not path.name.startswith(ours)]

    def print(self, message: str) -> None:
        """Print a line on standard error, unless the run is quiet or another process prints it."""
        if not self._quiet:
            errors.print(message)

    def check_data(self, fingerprint: Mapping[str, Any]) -> None:
        """Refuse to continue with other data than the run began with."""
        if self.main:
            _keep_or_check(self.path / DATA, fingerprint, "data")

    def keep(self) -> None:
        """Leave the folder as it is from now on if the run fails: something in it was measured."""
        self._kept = None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, if the run is finished."""
        path = self.path / SUMMARY
        return _read(path) if path.exists() else None

    def checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole. Damaged ones that are newer are reported."""
        if self.main:
            for rest in (self.path / "checkpoints").glob(f"{PARTIAL}*"):
                shutil.rmtree(rest)
        for folder in reversed(self._checkpoints()):
            reason = _damage(folder)
            if reason is None:
                return folder
            self.print(f"Checkpoint {folder.name} is damaged ({reason}): taking the one before.")
        return None

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("step-*"), key=_step)

    def save_checkpoint(self, step: int, files: Mapping[str, bytes], *, keep: int) -> None:
        """Write a checkpoint, then remove all but the newest `keep`. If it fails, the earlier ones are untouched."""
        folder = self.path / "checkpoints" / f"step-{step}"
        partial = folder.with_name(PARTIAL + folder.name)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for name, content in files.items():
                write_flushed(partial / name, content)
            sums = {
                name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in files.items()
            }
            write_flushed(partial / MANIFEST, _json({"step": step, "files": sums}))
            flush_folder(partial)
            self._remove(folder)  # a damaged one of the same step
            partial.rename(folder)
            flush_folder(folder.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            left = [other.name for other in self._checkpoints()]
            remedy = f"{left[-1]} is intact" if left else "there is none before it"
            size = sum(map(len, files.values())) / 2**20
            raise OSError(
                f"checkpoint {folder} ({size:.1f} MiB) could not be written: {error.strerror or error}; {remedy}"
            ) from error
        for old in self._checkpoints()[:-keep]:
            self._remove(old)

    def _remove(self, folder: Path) -> None:
        """Take a checkpoint away without ever showing half of it under its name."""
        if folder.exists():
            aside = folder.with_name(f"{PARTIAL}old-{folder.name}")
            folder.rename(aside)
            shutil.rmtree(aside)

    def cut(self, step: int) -> None:
        """Remove what was measured after `step`, so that a continued run measures no step twice."""
        if not self.main:
            return
        # A line of metrics counts the steps done, a record the steps done before it.
        for name, last in ((METRICS, step), (HEADS, step - 1)):
            path = self.path / name
            if path.exists():
                kept = [record for record in read_records(path) if record["step"] <= last]
                write_lines(path, kept)

    def note_continued(self, step: int) -> None:
        path = self.path / PROVENANCE
        origin = _read(path)
        origin.setdefault("continued", []).append({"step": step, "commit": commit(), "at": _now()})
        write_json(path, origin)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / METRICS
        return read_records(path) if path.exists() else []

    def finish(self, save_model: Callable[[Path], None], summary: Mapping[str, Any]) -> None:
        """Write the model with `save_model`, then the summary that marks the run as finished."""
        partial, folder = self.path / f"{PARTIAL}model", self.path / "model"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_model(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        write_json(self.path / SUMMARY, dict(summary))

    def _undo(self) -> None:
        """Remove what a start has made that failed before it measured anything, so that it can be repeated with other
        settings. What was there before is kept.
        """
        metrics = self.path / METRICS
        measured = self._checkpoints() or (metrics.exists() and metrics.stat().st_size > 0)
        if self._kept is not None and not measured and not (self.path / SUMMARY).exists():
            with suppress(OSError):  # the error that stopped the run is raised; of folders, only empty ones are removed
                for path in set(self.path.iterdir()) - self._kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                for folder in self._made:
                    folder.rmdir()
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._undo()


def check_same(path: Path, values: Mapping[str, Any], what: str) -> None:
    """Refuse to go on with a run whose file `path` records that it began with other values."""
    before = _read(path)
    different = [name for name in before | dict(values) if before.get(name) != values.get(name)]
    if different:
        changes = "; ".join(f"{name} was {before.get(name)!r}, is {values.get(name)!r}" for name in different)
        raise ValueError(
            f"{path.parent} holds a run with other {what}: {changes}. Repeat its command to continue it, or choose "
            "another folder with --out"
        )


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(path, RESTORE[path.name])
    return content


def _keep_or_check(path: Path, values: Mapping[str, Any], what: str) -> None:
    if path.exists():
        check_same(path, values, what)
    else:
        write_json(path, dict(values))


def processes() -> Any:
    """accelerate's view of the processes that torchrun started, or of this one alone."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0" and not dist.is_initialized():
        # The store of torchrun outlives a restart, and with it the addresses of the processes before it, to which gloo
        # would try to connect.
        store, rank, size = next(rendezvous("env://"))
        store = distributed_c10d.PrefixStore(f"restart {restarts}", store)
        dist.init_process_group(store=store, rank=rank, world_size=size)
    return PartialState(cpu=not torch.accelerator.is_available())


def run_folder(experiment: str, config: TrainConfig) -> Path:
    """The folder of a run for which none is given."""
    task = getattr(config, "task", None)
    return Path("runs") / f"{experiment}{f'-{task}' if task else ''}-{config.attention}-seed{config.seed}"


def open_run(experiment: str, config: TrainConfig, out: Path | None, *, quiet: bool) -> RunFolder:
    """The folder of a run: `out`, or one in runs/ called after the experiment, its task, attention and seed."""
    main = processes().is_main_process
    path = out or run_folder(experiment, config)
    run = RunFolder(path, {"experiment": experiment} | config.settings(), main=main, quiet=quiet)
    processes().wait_for_everyone()
    if run.summary is not None:
        run.print(f"{run.path} is finished: nothing to do.")
    return run


def make_folder(path: Path, option: str) -> None:
    """Make a folder for results before work begins, and check that they can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(f"the folder {path} cannot be written: {error.strerror}; choose another, {option}") from error


def write_json(path: Path, value: Any) -> None:
    write_whole(path, _json(value))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def run_result(folder: Path, *, data_dir: Path | None = None) -> Result:
    """What is kept of a finished run: settings, summary and curves, and nothing of its weights.

    Args:
        folder: the run folder.
        data_dir: the data folder that the run was given.

    Returns:
        The result, in which the paths of this machine read `runs` and `DATA`.

    Raises:
        ValueError: a file of the folder is damaged.

    Example:
        >>> add_result(Path("results/table5.jsonl"), run_result(Path("runs/lra-listops-lln-seed0")))
    """
    config, origin, summary = (_read(folder / name) for name in (CONFIG, PROVENANCE, SUMMARY))
    lines, heads = read_records(folder / METRICS), folder / HEADS
    tables = {
        "training": [line for line in lines if "eval_loss" not in line],
        "evaluations": [line for line in lines if "eval_loss" in line],
        "heads": read_records(heads) if heads.exists() else [],
    }
    result = Result(folder.name, origin, config, summary, {name: rows for name, rows in tables.items() if rows})
    text = json.dumps(result.to_line()).replace(str(folder.parent), "runs")
    text = text if data_dir is None else text.replace(str(data_dir), "DATA")
    return Result.from_line(json.loads(text))


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, if anything."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
        for name, expected in files.items():
            content = (checkpoint / name).read_bytes()
            if len(content) != expected["bytes"]:
                return f"{name} has {len(content)} bytes instead of {expected['bytes']}"
            if hashlib.sha256(content).hexdigest() != expected["sha256"]:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
