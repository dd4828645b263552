"""Images: read, drawn, augmented."""

import io
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from lln.tasks.data.images import augment, generated_images, read_dogs_vs_cats
from lln.tasks.data.order import draws


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))


def jpeg(colour, size=(20, 20)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def zip_pets(folder, *, cats=40, dogs=40, prefix="", extra=()):
    (folder / "dogs-vs-cats").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "dogs-vs-cats" / "train.zip", "w") as archive:
        for pet, count in (("cat", cats), ("dog", dogs)):
            for i in range(count):  # number in red, animal in blue
                archive.writestr(f"{prefix}{pet}.{i}.jpg", jpeg((6 * i, 0, 255 if pet == "dog" else 0)))
        for name, content in extra:
            archive.writestr(name, content)


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_pets_are_split_evenly_and_by_number(tmp_path, prefix):
    zip_pets(tmp_path, prefix=prefix, extra=[("train/", b"")] if prefix else [])
    train, validation = (read_dogs_vs_cats(tmp_path, size=16, split=split) for split in ("train", "validation"))
    assert train.images.shape == (72, 16, 16, 3)
    assert train.images.dtype == np.uint8
    assert validation.images.shape == (8, 16, 16, 3)
    assert np.bincount(train.labels).tolist() == [36, 36]
    assert np.bincount(validation.labels).tolist() == [4, 4]
    assert train.names == ("cat", "dog")
    numbers = []
    for part in (train, validation):
        red, _, blue = part.images.mean(axis=(1, 2)).T
        assert ((blue > 128) == part.labels).all()
        numbers.append({(round(r / 6), label) for r, label in zip(red, part.labels.tolist(), strict=True)})
    assert len(numbers[0] | numbers[1]) == 80
    torch.from_numpy(train.images[:2]).add_(1)  # no warning, and nothing reaches the cache
    assert (read_dogs_vs_cats(tmp_path, size=16, split="train").images[:2] != train.images[:2]).all()


def test_pets_are_cut_square_and_resized(tmp_path):
    wide = Image.new("RGB", (60, 20), "red")
    wide.paste((0, 255, 0), (20, 0, 40, 20))
    file = io.BytesIO()
    wide.save(file, "JPEG", quality=95, subsampling=0)
    zip_pets(tmp_path, cats=2, dogs=2)
    with zipfile.ZipFile(tmp_path / "dogs-vs-cats" / "train.zip", "w") as archive:
        for pet in ("cat", "dog"):
            for i in range(2):
                archive.writestr(f"{pet}.{i}.jpg", file.getvalue())
    centre = read_dogs_vs_cats(tmp_path, size=10, split="validation").images[:, :, 1:-1].astype(int)
    assert np.abs(centre - [0, 255, 0]).max() < 40


def test_decoded_pets_are_kept_checked_and_keyed_by_the_archive(tmp_path, monkeypatch):
    zip_pets(tmp_path)
    first = read_dogs_vs_cats(tmp_path, size=8, split="train").images.copy()
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)
        assert (read_dogs_vs_cats(tmp_path, size=8, split="train").images == first).all()
    (file,) = (tmp_path / "cache").glob("*.npy")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 255
    file.write_bytes(raw)
    with pytest.warns(UserWarning, match="making it again"):
        assert (read_dogs_vs_cats(tmp_path, size=8, split="train").images == first).all()
    zip_pets(tmp_path, dogs=41)
    assert len(read_dogs_vs_cats(tmp_path, size=8, split="train")) == 73


def test_broken_archives_are_named(tmp_path):
    def read():
        return read_dogs_vs_cats(tmp_path, size=8, split="train")

    with pytest.raises(ValueError, match=r"train\.zip is missing: expected images cat\.N\.jpg"):
        read()
    path = tmp_path / "dogs-vs-cats" / "train.zip"
    zip_pets(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"train\.zip: damaged or truncated zip"):
        read()
    raw = bytearray(whole)
    raw[300] ^= 255  # inside the first image: its checksum is wrong
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"train\.zip: entry 'cat\.0\.jpg' is damaged or no image"):
        read()
    for extra, message in (
        (("cat.99.jpg", b"no image"), r"entry 'cat\.99\.jpg' is damaged or no image"),
        (("cat.98.jpg", jpeg("red")[:200]), r"entry 'cat\.98\.jpg' is damaged or no image"),
        (("notes.txt", b""), r"entry 'notes\.txt'; expected images cat\.N\.jpg"),
    ):
        zip_pets(tmp_path, extra=[extra])
        with pytest.raises(ValueError, match=message):
            read()
    zip_pets(tmp_path, dogs=1)
    with pytest.raises(ValueError, match=r"1 images dog\.N\.jpg; expected at least 2"):
        read()
    assert not list((tmp_path / "cache").glob("*"))
    with pytest.raises(ValueError, match="needs data: give --data-dir"):
        read_dogs_vs_cats(None, split="train")
    with pytest.raises(ValueError, match="split must be"):
        read_dogs_vs_cats(tmp_path, split="test")


@pytest.mark.parametrize(("size", "classes"), [(8, 2), (33, 2), (32, 5)])
def test_drawn_images_depend_on_seed_split_and_place(size, classes):
    data = generated_images(size=size, count=300, classes=classes, seed=3)
    assert data.images.shape == (300, size, size, 3)
    assert len(data.names) == classes
    assert (np.bincount(data.labels, minlength=classes) > 150 / classes).all()
    fewer = generated_images(size=size, count=259, classes=classes, seed=3)
    assert (fewer.images == data.images[:259]).all()
    assert (fewer.labels == data.labels[:259]).all()
    for other in (
        generated_images(size=size, count=300, classes=classes, seed=4),
        generated_images(size=size, count=300, classes=classes, seed=3, split="validation"),
    ):
        assert not (other.images == data.images).all(axis=(1, 2, 3)).any()


def test_the_class_of_a_drawn_image_takes_both_discs():
    data = generated_images(size=32, count=2000, seed=0)
    colours = data.images.astype(int)
    vivid = colours.max(axis=-1) - colours.min(axis=-1) > 80  # the ground is grey
    reddish = colours[..., 0] > colours[..., 1:].mean(axis=-1)
    halves = [slice(0, 16), slice(16, 32)]
    quarters = [(slice(None), down, right) for down in halves for right in halves]
    discs = np.array([vivid[q].any(axis=(1, 2)) for q in quarters])
    reds = np.array([(reddish & vivid)[q].mean(axis=(1, 2)) > vivid[q].mean(axis=(1, 2)) / 2 for q in quarters])
    assert (discs.sum(axis=0) == 2).all()
    assert ((reds & discs).sum(axis=0) % 2 == data.labels).all()  # one red disc of two: different hues
    first = reds[discs.argmax(axis=0), np.arange(2000)]
    assert abs(np.corrcoef(first, data.labels)[0, 1]) < 0.1  # neither alone gives the label


def test_what_cannot_be_drawn_is_refused():
    for wrong in ({"size": 7}, {"count": 0}, {"classes": 1}):
        with pytest.raises(ValueError, match="expected size of at least 8"):
            generated_images(**{"size": 8, "count": 1, "classes": 2, "seed": 0} | wrong)


def test_augmentation_mirrors_and_moves_by_its_generator_alone():
    image = np.random.default_rng(0).integers(256, size=(16, 24, 3), dtype=np.uint8)
    seen = {}
    for i in range(400):
        moved = augment(image, draws(0, 0, i))
        assert moved.shape == image.shape
        assert moved.dtype == np.uint8
        assert (augment(image, draws(0, 0, i)) == moved).all()
        seen[moved.tobytes()] = moved
    expected = set()
    for mirrored in (image, image[:, ::-1]):
        padded = np.pad(mirrored, ((2, 2), (3, 3), (0, 0)), mode="reflect")
        expected |= {padded[y : y + 16, x : x + 24].tobytes() for y in range(5) for x in range(7)}
    assert set(seen) <= expected
    assert len(seen) > 0.9 * len(expected)
