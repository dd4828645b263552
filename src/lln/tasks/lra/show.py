"""`lln lra data show`: a few examples of a task, as text and, of pictures, as a PNG."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lln.tasks.lra.registry import TASKS
from lln.tasks.lra.task import Data

SHADES = " ░▒▓█"
SIDE, ZOOM, BORDER = 32, 6, 1


def shown(data: Data, *, split: str, count: int, letters: int = 600) -> Iterator[str]:
    """The first examples of a split, each as a block of text."""
    task, examples = data.task, data.splits[split]
    for index in range(min(count, len(examples))):
        label = int(examples.labels[index])
        answer = task.answers[label] if task.answers else str(label)
        size = " and ".join(f"{len(sequences[index]):,}" for sequences in examples.inputs)
        parts = [f"{split} {index}, {size} tokens, label {label}: {answer}"]
        for sequences in examples.inputs:
            symbols = sequences[index]
            if task.is_picture:
                parts.append(terminal_picture(symbols.reshape(SIDE, SIDE)))
            else:
                text = task.decode(symbols)
                parts.append(text if len(text) <= letters else f"{text[:letters]} ...")
        yield "\n".join(parts)


def terminal_picture(pixels: NDArray[np.uint8]) -> str:
    """A picture in characters: two for each pixel, which makes it about square."""
    shades = pixels.astype(int) * len(SHADES) // 256
    return "\n".join("".join(SHADES[shade] * 2 for shade in row) for row in shades)


def draw(data: Data, path: Path, *, split: str, count: int) -> None:
    """The first examples of a split, which are pictures, side by side in a PNG."""
    if not data.task.is_picture:
        pictures = " and ".join(name for name, task in TASKS.items() if task.is_picture)
        raise ValueError(f"{data.task.name} has no pictures: --out is for {pictures}")
    from PIL import Image

    examples = data.splits[split]
    count = min(count, len(examples))
    columns = min(count, 8)
    rows = -(-count // columns)
    sheet = np.full((rows, SIDE + 2 * BORDER, columns, SIDE + 2 * BORDER), 96, dtype=np.uint8)
    for index in range(count):
        row, column = divmod(index, columns)
        pixels = examples.inputs[0][index].reshape(SIDE, SIDE)
        sheet[row, BORDER:-BORDER, column, BORDER:-BORDER] = pixels
    flat = sheet.reshape(rows * (SIDE + 2 * BORDER), -1)
    picture = Image.fromarray(flat)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.resize((flat.shape[1] * ZOOM, flat.shape[0] * ZOOM), Image.Resampling.NEAREST).save(path, format="PNG")
