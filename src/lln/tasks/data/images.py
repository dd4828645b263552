"""Images to classify: Dogs vs Cats, or images drawn here; and the augmentation of an image."""

import io
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps

from lln.tasks.data.folder import cached_file, file_digest, hashed_share, require
from lln.tasks.data.order import draws
from lln.terminal import Progress

Array = np.ndarray[Any, np.dtype[Any]]
Split = Literal["train", "validation"]

PETS = ("cat", "dog")
HELD_OUT = 0.1
FORMAT = 1  # part of the key of decoded images: raise it when decoding changes
SMALLEST = 8  # below, two discs are no longer discs
AT_A_TIME = 256  # images drawn together


@dataclass(frozen=True)
class ImageData:
    images: Array  # uint8 (N, H, W, 3)
    labels: Array  # int64 (N,)
    names: tuple[str, ...]  # of the classes

    def __len__(self) -> int:
        return len(self.labels)


def read_dogs_vs_cats(data_dir: Path | None, *, size: int = 64, split: Split) -> ImageData:
    """Dogs vs Cats from `data_dir`/dogs-vs-cats/train.zip, cut to a square in the middle and resized to `size`.

    A tenth of each class, chosen by a hash of the image's number, is the validation split. Images are decoded once;
    after that they are mapped into memory from the cache.
    """
    _check(split)
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if data_dir is None:
        raise ValueError("Dogs vs Cats needs data: give --data-dir or set LLN_DATA to the folder with dogs-vs-cats/")
    path = find_dogs_vs_cats(data_dir)
    key = file_digest(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries, held_out = _split(path, archive.namelist())

            def write(draft: Path) -> None:
                _decode(archive, [entry.name for entry in entries], size, draft)

            decoded = cached_file(f"pets-{size}-{FORMAT}-{key[:32]}.npy", write)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: damaged or truncated zip ({error})") from error
    # Copy on write: nothing is read before it is needed, and tensors can share the memory without a warning.
    images = np.load(decoded, mmap_mode="c")
    labels = np.array([entry.label for entry in entries], dtype=np.int64)
    chosen = slice(held_out) if split == "validation" else slice(held_out, None)
    return ImageData(images[chosen], labels[chosen], PETS)


def find_dogs_vs_cats(data_dir: Path) -> Path:
    return require(data_dir / "dogs-vs-cats" / "train.zip", "images cat.N.jpg and dog.N.jpg, zipped")


def generated_images(*, size: int, count: int, classes: int = 2, seed: int, split: Split = "train") -> ImageData:
    """Images drawn here: two discs in two quarters of a mottled ground, each of one of `classes` hues.

    The class is the sum of the numbers of both hues modulo `classes`, so that one disc alone does not determine it:
    for two classes, whether the hues are equal. Image i depends on (seed, split, i) alone.
    """
    _check(split)
    if size < SMALLEST or count < 1 or classes < 2:
        raise ValueError(
            f"expected size of at least {SMALLEST}, count of at least 1 and at least 2 classes; "
            f"got size {size}, count {count}, classes {classes}"
        )
    images = np.empty((count, size, size, 3), dtype=np.uint8)
    labels = np.empty(count, dtype=np.int64)
    for start in range(0, count, AT_A_TIME):
        drawn = _draw(size, classes, draws(seed, 0 if split == "train" else 1, start))
        part = slice(start, min(start + AT_A_TIME, count))
        images[part], labels[part] = (values[: part.stop - start] for values in drawn)
    hues = ("same hue", "different hues") if classes == 2 else tuple(f"sum {i}" for i in range(classes))
    return ImageData(images, labels, hues)


def augment(image: Array, rng: np.random.Generator) -> Array:
    """One image (H, W, 3), mirrored by chance and moved by up to an eighth, its border reflected.

    With `rng = draws(seed, epoch, index)` an example is the same in a resumed run and on any number of processes.
    """
    height, width = image.shape[:2]
    down, right = (int(rng.integers(-(side // 8), side // 8 + 1)) for side in (height, width))
    columns = _reflected(width, right)
    if rng.random() < 0.5:
        columns = columns[::-1]
    return image[_reflected(height, down)[:, None], columns]


@dataclass(frozen=True)
class _Entry:
    name: str
    label: int
    number: str


def _split(path: Path, names: Sequence[str]) -> tuple[list[_Entry], int]:
    """The images, the validation split first, and its size. Within a split their order is that of the hash."""
    entries = []
    for name in names:
        if name.endswith("/"):
            continue
        if not (match := re.fullmatch(r"(?:.*/)?(cat|dog)\.(\d+)\.jpg", name)):
            raise ValueError(f"{path}: entry {name!r}; expected images cat.N.jpg and dog.N.jpg")
        entries.append(_Entry(name, PETS.index(match[1]), match[2]))
    entries.sort(key=lambda entry: (hashed_share(entry.number), entry.label))
    held_out: list[_Entry] = []
    for label, pet in enumerate(PETS):
        ours = [entry for entry in entries if entry.label == label]
        if len(ours) < 2:
            raise ValueError(f"{path}: {len(ours)} images {pet}.N.jpg; expected at least 2, to train and to validate")
        held_out += ours[: max(1, round(HELD_OUT * len(ours)))]
    held = set(held_out)
    return sorted(entries, key=lambda entry: entry not in held), len(held)


def _decode(archive: zipfile.ZipFile, names: Sequence[str], size: int, draft: Path) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(names), size, size, 3)}
    with draft.open("wb") as file, Progress("decoding images", len(names)) as bar:
        np.lib.format.write_array_header_1_0(file, header)
        for name in names:
            try:
                with Image.open(io.BytesIO(archive.read(name))) as image:
                    pixels = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
            except (OSError, zlib.error, zipfile.BadZipFile) as error:
                raise ValueError(f"{archive.filename}: entry {name!r} is damaged or no image ({error})") from error
            file.write(pixels.tobytes())
            bar.advance()


def _draw(size: int, classes: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """`AT_A_TIME` images and their labels. Letters: B images, S pixels a side, 2 discs."""
    B = AT_A_TIME
    hue = rng.integers(classes, size=(B, 2))
    quarter = rng.permuted(np.tile(np.arange(4), (B, 1)), axis=1)[:, :2]
    corner = np.stack([quarter // 2, quarter % 2], axis=-1) * 0.5
    centre = (corner + rng.uniform(0.17, 0.33, (B, 2, 2))) * size  # a disc stays within its quarter
    radius = rng.uniform(0.10, 0.16, (B, 2)) * size
    colour = _colour(hue / classes + rng.uniform(-0.25, 0.25, (B, 2)) / classes, rng.uniform(0.6, 1.0, (2, B, 2)))
    # The ground: squares of some grey with a tint, and grain.
    coarse = rng.uniform(60, 200, (B, 4, 4, 1)) + rng.uniform(-20, 20, (B, 4, 4, 3))
    cell = np.arange(size) * 4 // size
    images = coarse.astype(np.float32)[:, cell[:, None], cell]
    images += 40 * rng.random((B, size, size, 1), dtype=np.float32) - 20
    pixel = np.arange(size) + 0.5
    for disc in range(2):
        down = (pixel - centre[:, disc, 0, None]) ** 2
        right = (pixel - centre[:, disc, 1, None]) ** 2
        inside = down[:, :, None] + right[:, None, :] < radius[:, disc, None, None] ** 2
        which, _, _ = inside.nonzero()
        images[inside] = 255 * colour[which, disc]
    return images.clip(0, 255).astype(np.uint8), hue.sum(axis=1) % classes


def _colour(hue: Array, saturation_and_value: Array) -> Array:
    """Red, green and blue, in the last axis, of a hue in turns of the colour circle."""
    saturation, value = saturation_and_value[..., None]
    place = (np.array([5.0, 3.0, 1.0]) + 6 * hue[..., None]) % 6
    colour: Array = value * (1 - saturation * np.minimum(np.minimum(place, 4 - place), 1).clip(0))
    return colour


def _reflected(size: int, shift: int) -> Array:
    """0 ... size - 1 moved by `shift`; what falls off one end is mirrored back."""
    last = size - 1
    places: Array = last - np.abs(last - np.abs(np.arange(size) + shift))
    return places


def _check(split: str) -> None:
    if split not in ("train", "validation"):
        raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
