"""Hugging Face data sets, from a folder or from the hub, always as a dictionary of splits."""

from pathlib import Path

import datasets  # type: ignore[import-untyped]

from lln.tasks.data.folder import cache_dir

Splits = dict[str, datasets.Dataset]


def from_folder(path: Path) -> Splits:
    """A folder written by `save_to_disk`, or one of data files that `load_dataset` can read."""
    saved = ("dataset_info.json", "dataset_dict.json")
    try:
        if any((path / name).is_file() for name in saved):
            return _splits(datasets.load_from_disk(str(path)))
        return _splits(datasets.load_dataset(str(path), cache_dir=str(cache_dir() / "datasets")))
    except Exception as error:  # whatever its readers raise, the message names the folder
        raise ValueError(f"{path} cannot be read as a Hugging Face data set: {_first_line(error)}") from error


def from_hub(name: str) -> Splits:
    """A data set of the hub, as NAME or NAME:CONFIG."""
    repository, _, config = name.partition(":")
    try:
        return _splits(datasets.load_dataset(repository, config or None))
    except Exception as error:  # no network, no such name, no such config: each raises something of its own
        raise ValueError(
            f"the data set {name!r} could not be had from the hub: {_first_line(error)}; without a network, give data "
            "from a folder"
        ) from error


def _splits(found: object) -> Splits:
    if isinstance(found, datasets.DatasetDict):
        return dict(found)
    assert isinstance(found, datasets.Dataset)
    return {"train": found}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
