"""Metrics of predictions for a whole set of examples, which are no means over batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def accuracy(predicted: Numbers, labels: Numbers) -> float:
    return float((predicted == labels).mean())


def f1(predicted: Numbers, labels: Numbers) -> float:
    """2 TP / (2 TP + FP + FN), of label 1; 0 if nothing is, or is taken for, label 1."""
    found, true = predicted == 1, labels == 1
    total = found.sum() + true.sum()
    return float(2 * (found & true).sum() / total) if total else 0.0


def matthews(predicted: Numbers, labels: Numbers) -> float:
    """(TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)), the correlation of labels 0 and 1."""
    return pearson(predicted, labels)


def pearson(predicted: Numbers, labels: Numbers) -> float:
    """Cov(predicted, labels) / (std(predicted) std(labels)); 0 if one of them is constant."""
    if np.ptp(predicted) == 0 or np.ptp(labels) == 0:
        return 0.0
    x, y = predicted - predicted.mean(), labels - labels.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def spearman(predicted: Numbers, labels: Numbers) -> float:
    """Pearson's correlation of the ranks; equal numbers have the mean of their ranks."""
    return pearson(ranks(predicted), ranks(labels))


def ranks(values: Numbers) -> Numbers:
    """From 1 on; equal values have the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[place]


METRICS: dict[str, Callable[[Numbers, Numbers], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def measure(names: Sequence[str], logits: Any, labels: Any) -> dict[str, float]:
    """The named metrics of logits (examples, classes), or (examples, 1) for a number, and labels (examples,).

    What is not finite, of a model whose training diverged, counts as 0.
    """
    found = np.nan_to_num(np.asarray(logits, dtype=np.float64), posinf=0.0, neginf=0.0)
    predicted = found[:, 0] if found.shape[1] == 1 else found.argmax(axis=1).astype(np.float64)
    return {name: METRICS[name](predicted, np.asarray(labels, dtype=np.float64)) for name in names}
