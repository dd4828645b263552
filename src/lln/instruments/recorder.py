"""Instruments while a model trains: what each head does, every so many steps, at a price that is kept low.

with Recorder(model, "run/records.jsonl") as recorder:
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        recorder.step()
"""

import os
import random
import time
import warnings
from types import TracebackType
from typing import Any

from torch import nn

from lln.instruments.capture import Capture
from lln.instruments.heads import SCALARS, measure_heads
from lln.instruments.records import Record, RecordFile, read_records
from lln.instruments.tap import Tap, attentions, hugging_face_models


class Recorder:
    """Records the attentions of `model`: our modules, `torch.nn.MultiheadAttention` and Hugging Face attention.

    Call `step()` once after each training step (or forward pass); the model needs no other change. Of one sample of a
    step that is recorded, the heads whose turn it is give:

        temperature, entropy, gap, bias, alpha, beta    as the instruments of these names
        tokens, keys, limit                             kept queries and keys, and the entropy of uniform attention

    Up to `tokens` tokens everything is exact. Beyond, entropy and bias are those of so many random rows, each over all
    its keys, which makes bias too large: by unbiased / rows where rows differ little, by up to log2(N / rows) where
    each attends to a key of its own; and the gap is that of the chain among the sampled tokens, a rough estimate. The
    gap of LLN stays exact, that of causal attention is over the sampled rows. alpha and beta are null for softmax, the
    gap is for cross attention and where a sampled row has no weight among the sampled tokens, and all are where query
    or key is not finite.

    Outputs, gradients and the state of random numbers stay bit-identical. With several processes, attach in one of
    them. Modules that torch.compile has compiled are not recorded: record the model before it is compiled.

    Args:
        model: any module with attention in it.
        path: the file for JSON lines, flushed to disk with every recorded step; an existing one is continued.
        every: record every `every`-th step; the first one always.
        heads: the number of heads of each layer that are measured in a step, in turn; None: all.
        tokens: the number of rows that are measured.
        max_overhead: the share of time that recording may take: a step that is due waits until the time spent is below
            it. None: no limit.
        first_step: the number of the first step, for a run that is continued.
        seed: of the sampled rows.
        tensorboard: a folder for the same numbers as scalars.

    Raises:
        ValueError: the model has no attention that can be recorded, a number is out of range, or the file holds
            something else.

    Example:
        >>> recorder = Recorder(model, "run/records.jsonl", every=10)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     train_step(model, batch)
        ...     recorder.step()
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        every: int = 100,
        heads: int | None = 4,
        tokens: int = 512,
        max_overhead: float | None = 0.05,
        first_step: int = 0,
        seed: int = 0,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("every", every), ("heads", heads), ("tokens", tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if max_overhead is not None and not 0 < max_overhead <= 1:
            raise ValueError(
                f"max_overhead must be a share of the time, above 0 and up to 1, or None; got {max_overhead!r}"
            )
        if not attentions(model) and not hugging_face_models(model):
            raise ValueError(
                f"{type(model).__name__} has no attention that can be recorded: lln's modules, "
                "torch.nn.MultiheadAttention or a transformers model"
            )
        self.every, self.heads, self.tokens, self.max_overhead = every, heads, tokens, max_overhead
        self.current_step = first_step
        self.seconds = 0.0  # what recording has taken so far
        self._model = model
        self._random = random.Random(seed)
        self._turn = 0
        self._due = self._closed = self._warned = False
        self._tap: Tap | None = None
        self._board = _open_tensorboard(tensorboard)
        self._file = RecordFile(path)
        self._began = time.perf_counter()
        self._prepare()

    def step(self) -> list[Record]:
        """End a step, and write its records if it was recorded and any attention ran.

        Returns:
            The records, one for each head; none if the step was not recorded.

        Raises:
            ValueError: the recorder is closed.
        """
        if self._closed:
            raise ValueError("this recorder is closed; make a new one with the same path and first_step to continue")
        records: list[Record] = []
        if self._tap is not None:
            start = time.perf_counter()
            self._tap.close()
            records = [
                record for name, capture in self._tap.captures.items() for record in self._measure(name, capture)
            ]
            if records:
                self._write(records)
                self._turn += 1
            elif not self._tap.refused:
                self._warn_of_no_attention()
            self._due = False
            self.seconds += self._tap.seconds + time.perf_counter() - start
            self._tap = None
        self.current_step += 1
        self._prepare()
        return records

    def _warn_of_no_attention(self) -> None:
        if not self._warned:
            warnings.warn(
                f"step {self.current_step} was to be recorded, but no attention of {type(self._model).__name__} was "
                "recorded: either the model did not run, or it computes attention in a way of its own",
                stacklevel=3,
            )
        self._warned = True

    def table(self) -> list[Record]:
        """All records in the file, for `pandas.DataFrame(recorder.table())` or `write_table`.

        Returns:
            The records, in their order.
        """
        return read_records(self._file.path)

    def close(self) -> None:
        """Leave the model as it was found. A step that has not ended is not recorded."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        self._closed = True
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        """Capture the next step, if it is due and recording has not taken too long."""
        self._due = self._due or self.current_step % self.every == 0
        elapsed = time.perf_counter() - self._began
        if self._due and (self.max_overhead is None or self.seconds <= self.max_overhead * elapsed):
            self._tap = Tap(self._model, self._choose)

    def _choose(self, batch: int, heads: int) -> tuple[int, list[int]]:
        """A sample and the heads whose turn it is. The sample is the same for all layers of a step."""
        sample = random.Random(self.current_step).randrange(batch)
        count = heads if self.heads is None else min(self.heads, heads)
        return sample, sorted((self._turn * count + i) % heads for i in range(count))

    def _measure(self, layer: str, capture: Capture) -> list[Record]:
        measured = measure_heads(capture, self.tokens, self._random)
        about = {"step": self.current_step, "layer": layer, "kind": capture.options.get("kind", "lln")}
        return [about | {"head": head} | values for head, values in zip(capture.heads, measured, strict=True)]

    def _write(self, records: list[Record]) -> None:
        self._file.append(records)
        if self._board is not None:
            for record in records:
                for name in SCALARS:
                    if record[name] is not None:
                        self._board.add_scalar(
                            f"{name}/{record['layer']}/head{record['head']}", record[name], record["step"]
                        )


def _open_tensorboard(folder: str | os.PathLike[str] | None) -> Any:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard=... needs tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder))
