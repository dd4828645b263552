"""Image: what does a grey picture show? CIFAR-10, pixel by pixel."""

from pathlib import Path

import numpy as np

from lln.tasks.data.folder import require
from lln.tasks.lra.examples import Examples, Sequences, Splits
from lln.tasks.lra.task import Task, hold_out

VALID_IMAGES = 5000  # as published


def read(folder: Path) -> tuple[str, Splits]:
    return "CIFAR-10 in grey", hold_out(_split(folder, "train"), _split(folder, "test"), VALID_IMAGES)


def _split(folder: Path, split: str) -> Examples:
    path = require(folder / "cifar10-gray" / f"{split}.npz", "grey pictures x (N, 32, 32) and labels y")
    with np.load(path) as stored:
        pictures, labels = stored["x"], stored["y"].astype(np.int64)
    if pictures.dtype != np.uint8 or pictures.shape != (len(labels), 32, 32):
        raise ValueError(
            f"{path} holds x {pictures.dtype} {pictures.shape} and {len(labels)} labels; "
            "expected uint8 (N, 32, 32) and N labels"
        )
    return Examples((Sequences.rows(pictures.reshape(len(labels), -1)),), labels)


TASK = Task(
    name="image",
    title="Image (1k)",
    length=1024,
    symbols=256,
    classes=10,
    about="What does a grey picture show? CIFAR-10, pixel by pixel.",
    presets={
        "laptop": {"steps": 800, "batch_size": 16, "learning_rate": 1e-3},
        "paper": {"batch_size": 256, "learning_rate": 1e-4, "warmup_steps": 175},
    },
    read=read,
    files="cifar10-gray/train.npz and cifar10-gray/test.npz",
    answers=("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    is_picture=True,
)
