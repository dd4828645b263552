"""`lln lra data`: the tasks of the Long Range Arena: make them, show examples. Runs: `lln train lra`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from lln.cli.options import DataDir, Seed
from lln.tasks.lra.registry import TASKS
from lln.terminal import console

app = typer.Typer(help="Long Range Arena: its data.", no_args_is_help=True)
data = typer.Typer(help="Data of the Long Range Arena: make it, show examples.", no_args_is_help=True)
app.add_typer(data, name="data")

Dashes = Annotated[int | None, typer.Option(help="Dashes of a path (pathfinder): 6, 9 or 14; by default 14.")]
GENERATED = " or ".join(name for name, task in TASKS.items() if task.generator)


@data.command()
def make(
    task: Annotated[str, typer.Argument(help=f"{GENERATED}.")],
    examples: Annotated[int | None, typer.Option(help="Training examples; by default as many as published.")] = None,
    seed: Seed = 0,
    dashes: Dashes = None,
) -> None:
    """Generate a task on all cores and keep it in the cache; what is there already is checked."""
    from lln.tasks.lra.data import generated, sizes

    began = time.monotonic()
    made = generated(task, sizes(task, examples), seed=seed, dashes=dashes)
    counts = ", ".join(f"{len(split):,} {name}" for name, split in made.splits.items())
    console.print(f"{task}: {counts} ({made.source}), {time.monotonic() - began:.0f} s")


@data.command()
def show(
    task: Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}.")],
    count: Annotated[int, typer.Option(min=1, help="How many examples.")] = 2,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "train",
    out: Annotated[Path | None, typer.Option(help="Draw pictures into this PNG, instead of on the terminal.")] = None,
    data_dir: DataDir = None,
    seed: Seed = 0,
    dashes: Dashes = None,
) -> None:
    """Print or draw a few examples; of tasks that are generated a few are made for it."""
    from lln.tasks.lra.data import sample
    from lln.tasks.lra.examples import SPLITS
    from lln.tasks.lra.show import draw, shown

    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; there are: {', '.join(SPLITS)}")
    read = sample(task, count, data_dir=data_dir, seed=seed, dashes=dashes)
    console.print(f"{read.task.title}: {read.task.about} [{read.source}]")
    if out is not None:
        draw(read, out, split=split, count=count)
        console.print(str(out))
        return
    for block in shown(read, split=split, count=count):
        console.print("\n" + block)
