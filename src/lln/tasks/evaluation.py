"""Evaluation over every example once, whatever the number of processes and the size of the last batch."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lln.distributed import split_tokens
from lln.tasks.data.order import Examples

Batch = Mapping[str, Tensor]
Scores = dict[str, tuple[float, int]]  # a sum over examples or tokens, and how many there were
Score = Callable[[Mapping[str, Tensor], Batch], Scores]
Measure = Callable[[Any, Any], dict[str, float]]  # of the logits and the labels of all examples


def loss_scores(outputs: Mapping[str, Tensor], batch: Batch) -> Scores:
    count = len(batch["labels"])
    return {"loss": (float(outputs["loss"]) * count, count)}


def classification_scores(outputs: Mapping[str, Tensor], batch: Batch) -> Scores:
    labels = batch["labels"]
    correct = (outputs["logits"].argmax(dim=-1) == labels).sum()
    return loss_scores(outputs, batch) | {"accuracy": (float(correct), len(labels))}


def evaluate(
    model: nn.Module,
    data: Examples,
    accelerator: Any,
    *,
    batch_size: int,
    collate: Callable[[list[Any]], Any],
    autocast: Callable[[], AbstractContextManager[Any]],
    score: Score,
    measure: Measure | None,
    on_batch: Callable[[float], None],
    sequence_parallel: int = 1,
) -> dict[str, float]:
    """Means of what `score` sums, and what `measure` finds, which gets all examples in some order.

    Each process takes its part of the examples, or several beside each other (`sequence_parallel`) parts of the same
    sequences. `on_batch` is called with the share that is done.
    """
    place, groups = accelerator.process_index // sequence_parallel, accelerator.num_processes // sequence_parallel
    share = range(place, len(data), groups)
    loader = DataLoader(Subset(_Plain(data), share), batch_size, collate_fn=collate)
    model.eval()
    totals: dict[str, Any] = {}
    predictions: list[tuple[Any, Any]] = []  # logits and labels
    with torch.no_grad():
        for number, batch in enumerate(loader):
            on_batch(number / len(loader))
            inputs = {name: x.to(accelerator.device) for name, x in batch.items()}
            with autocast():
                outputs = model(**inputs)
            if sequence_parallel > 1:
                inputs = {name: split_tokens(model, x) for name, x in inputs.items()}
            for name, (total, count) in score(outputs, inputs).items():
                totals[name] = totals.get(name, 0) + np.array([total, count], dtype=np.float64)
            if measure is not None:
                predictions.append((outputs["logits"].float().cpu().numpy(), inputs["labels"].cpu().numpy()))
    found = {}
    for name, value in totals.items():
        total, count = accelerator.reduce(torch.from_numpy(value).to(accelerator.device)).tolist()
        found[name] = total / count
    if measure is not None:
        logits, labels = zip(*gather_object(predictions), strict=True)
        found |= measure(np.concatenate(logits), np.concatenate(labels))
    return found


class _Plain(torch.utils.data.Dataset[Any]):
    """Examples as they are in epoch 0."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __getitem__(self, index: int) -> Any:
        return self.examples.example(index, 0)
