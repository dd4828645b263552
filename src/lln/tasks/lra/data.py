"""The data of each task: read from the data folder where it has it, generated where the task can be."""

from functools import partial
from pathlib import Path

from lln.tasks.data.folder import data_dir as find_data_dir
from lln.tasks.lra.examples import Splits
from lln.tasks.lra.generated import cached_examples
from lln.tasks.lra.registry import TASKS, task_named
from lln.tasks.lra.task import Data, Generator, Task

VERSION = 1  # of the generators: another one makes the cache stale


def load(
    name: str, *, data_dir: Path | None = None, examples: int | None = None, dashes: int | None = None, seed: int = 0
) -> Data:
    """The splits of a task.

    Args:
        name: text, listops, retrieval, pathfinder or image.
        data_dir: the data folder; left out, the environment variable LLN_DATA.
        examples: training examples of listops and pathfinder; left out, as many as published.
        dashes: of a path (pathfinder); left out, 14.
        seed: of what is generated.

    Returns:
        The task, the source of its data, and its splits `train`, `valid` and `test`.

    Raises:
        ValueError: there is no such task, its files are missing or damaged, or an option is not one of it.

    Example:
        >>> load("listops", examples=1000).splits["train"].example(0)
        {"input_0": array([...]), "labels": 3}
    """
    task, folder = task_named(name), find_data_dir(data_dir)
    _check_dashes(task, dashes)
    if _is_generated(task, folder):
        return generated(name, sizes(name, examples), seed=seed, dashes=dashes)
    assert task.read is not None
    if task.generator is None and examples is not None:
        raise ValueError(f"{name} is read, not generated: it has the examples that its files have")
    if folder is None:
        raise ValueError(
            f"{name} needs data: give its folder with --data-dir or the environment variable LLN_DATA. "
            f"Expected there: {task.files}. {_generated_tasks(' and ')} are generated and work without"
        )
    source, splits = task.read(folder)
    if examples is not None:
        splits = {**splits, "train": splits["train"].part(0, min(examples, len(splits["train"])))}
    return Data(task, source, splits)


def sizes(name: str, examples: int | None = None) -> tuple[int, int, int]:
    """Training, validation and test examples of a generated task; as published, if `examples` is left out."""
    generator = _generator(task_named(name))
    train = generator.examples if examples is None else examples
    if train < 1:
        raise ValueError(f"there must be examples to train on, got {train}")
    return train, generator.held_out(train), generator.held_out(train)


def sample(name: str, count: int, *, data_dir: Path | None = None, seed: int = 0, dashes: int | None = None) -> Data:
    """The task to show: as `load` reads it, but of what is generated no more than `count` examples a split."""
    if not _is_generated(task_named(name), find_data_dir(data_dir)):
        return load(name, data_dir=data_dir, dashes=dashes)
    return generated(name, (count, count, count), seed=seed, dashes=dashes, workers=1)


def generated(
    name: str, counts: tuple[int, int, int], *, seed: int, dashes: int | None = None, workers: int | None = None
) -> Data:
    """A task that is generated, made or from the cache; `counts` are training, validation and test examples.

    Held-out examples are made first: with as many of them, they do not depend on how many there are to train on.
    """
    task = task_named(name)
    generator = _generator(task)
    _check_dashes(task, dashes)
    train, valid, test = counts
    options = {"dashes": generator.dashes[0] if dashes is None else dashes} if generator.dashes else {}
    settings = {"count": sum(counts), "seed": seed, "version": VERSION} | options
    make = partial(generator.make, sum(counts), seed=seed, workers=workers, **options)
    everything = cached_examples(name, settings, make)
    splits: Splits = {
        "train": everything.part(test + valid, test + valid + train),
        "valid": everything.part(test, test + valid),
        "test": everything.part(0, test),
    }
    drawn = "".join(f", {value} {option}" for option, value in options.items())
    return Data(task, f"generated{drawn}, seed {seed}", splits)


def _is_generated(task: Task, folder: Path | None) -> bool:
    has_files = folder is not None and bool(task.published) and (folder / task.published).is_dir()
    return task.generator is not None and not has_files


def _generator(task: Task) -> Generator:
    if task.generator is None:
        raise ValueError(f"{task.name} is read, not generated; these are: {_generated_tasks(', ')}")
    return task.generator


def _generated_tasks(between: str) -> str:
    return between.join(name for name, task in TASKS.items() if task.generator)


def _check_dashes(task: Task, dashes: int | None) -> None:
    if dashes is not None and not (task.generator and task.generator.dashes):
        raise ValueError(f"dashes are for pathfinder, not for {task.name}")
