"""`lln data`: the tasks of the Long Range Arena to make and to look at. `lln lra`: runs and costs on them."""

import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lln.report.console import console, print_error

if TYPE_CHECKING:
    from lln.tasks.lra.recipe import LraConfig

data = typer.Typer(help="Data of the Long Range Arena: make it, look at it.", no_args_is_help=True)
lra = typer.Typer(help="Long Range Arena: accuracy and cost of mechanisms on long inputs.", no_args_is_help=True)
LINE_SECONDS = 60.0  # between lines on a run where there is no terminal

DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder with the data; by default the environment variable LLN_DATA."),
]
Dashes = Annotated[int | None, typer.Option(help="Dashes of a path (pathfinder): 6, 9 or 14; by default 14.")]
Tasks = Annotated[str, typer.Option(help="Tasks, separated by commas.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")]
ALL_TASKS = "text,listops,retrieval,pathfinder,image"


@data.command()
def make(
    task: Annotated[str, typer.Argument(help="listops or pathfinder.")],
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
    task: Annotated[str, typer.Argument(help=f"{ALL_TASKS.replace(',', ', ')}.")],
    count: Annotated[int, typer.Option(min=1, help="How many examples.")] = 2,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "train",
    out: Annotated[Path | None, typer.Option(help="Draw pictures into this PNG, instead of on the terminal.")] = None,
    data_dir: DataDir = None,
    seed: Seed = 0,
    dashes: Dashes = None,
) -> None:
    """Print or draw a few examples; of listops and pathfinder a few are made for it."""
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


@lra.command()
def run(
    tasks: Tasks = ALL_TASKS,
    methods: Annotated[
        str,
        typer.Option(help="Mechanisms of `lln zoo`, separated by commas; with options as lln_diag:block_size=128."),
    ] = "softmax,reformer,performer,skyformer,lln,lln_diag",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    preset: Annotated[str, typer.Option(help="laptop (two cores, hours) or paper (the published budget).")] = "laptop",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side; they share the cores.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for the runs; the same command continues them.")] = Path("runs/lra"),
    data_dir: DataDir = None,
    steps: Annotated[int | None, typer.Option(help="Steps of every run, instead of the preset's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a step, instead of the preset's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate, instead of the preset's.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout, instead of the preset's.")] = None,
    standardise: Annotated[
        bool | None,
        typer.Option(
            "--standardise/--no-standardise",
            help="Standardise the mean over the tokens before deciding, instead of the preset's choice.",
        ),
    ] = None,
    dashes: Dashes = None,
    evaluate_on: Annotated[str, typer.Option(help="test, or valid to try settings out.")] = "test",
) -> None:
    """Train and test every method on every task with equal budgets; what is finished is not done again."""
    from lln.tasks.lra.runner import RESULTS, matrix, run_matrix

    given = {
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "dropout": dropout,
        "standardise": standardise,
        "dashes": dashes,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    numbers = [int(seed) for seed in _list(seeds, "--seeds")] if seeds.replace(",", "").isdigit() else []
    if not numbers:
        raise ValueError(f"--seeds takes numbers separated by commas, got {seeds!r}")
    runs = matrix(
        _list(tasks, "--tasks"),
        _list(methods, "--methods"),
        numbers,
        preset=preset,
        evaluate_on=evaluate_on,
        **changes,
    )
    try:
        with _Lines(runs) as lines:
            results = run_matrix(runs, out=out, data_dir=data_dir, jobs=jobs, tell=lines.tell)
    except RuntimeError as error:
        print_error(error)
        raise typer.Exit(1) from None
    columns = list(dict.fromkeys(result["task"] for result in results))
    accuracy: dict[str, dict[str, list[float]]] = {}
    for config, result in zip(runs, results, strict=True):
        accuracy.setdefault(config.method, {}).setdefault(config.task, []).append(result["accuracy"])
    table = Table("accuracy [%]", *columns)
    for method, found in accuracy.items():
        table.add_row(method, *(f"{100 * fmean(found[task]):.2f}" for task in columns))
    console.print(table)
    console.print(f"{out / RESULTS}")
    if evaluate_on == "test":
        console.print(f"Beside the published numbers: lln table 5 --results {out}")


@lra.command()
def bench(
    tasks: Tasks = ALL_TASKS,
    methods: Annotated[
        str, typer.Option(help="Mechanisms, separated by commas; softmax_explicit holds the whole matrix.")
    ] = "softmax_explicit,softmax,reformer,performer,skyformer,nystrom,lln,lln_diag",
    seconds: Annotated[float, typer.Option(help="Time the methods of a task at least this long.")] = 30.0,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the numbers here as JSON.")] = None,
) -> None:
    """Time and peak memory of a training step at the published lengths, all methods in turns: the paper's table 4."""
    from lln.bench.record import check_file
    from lln.provenance import provenance
    from lln.tasks.lra.bench import compare
    from lln.tasks.run import write_json

    if out is not None:
        check_file(out)
    rows: list[dict[str, Any]] = []
    chosen = _list(methods, "--methods")
    table = Table("task", "tokens", "method", "ms a step", "less by", "MiB", "less by")
    for row in compare(_list(tasks, "--tasks"), chosen, seconds=seconds, seed=seed):
        rows.append(row)
        table.add_row(
            row["task"],
            f"{row['batch']} x {row['length']:,}",
            row["method"],
            f"{row['milliseconds']:.0f}",
            f"{row['time_ratio']:.2f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['memory_ratio']:.2f}",
            end_section=row["method"] == chosen[-1],
        )
        if row["method"] == chosen[-1]:
            console.print(f"{row['task']} is measured")
    console.print(table)
    if out is not None:
        command = f"lln lra bench --tasks {tasks} --methods {methods} --seconds {seconds:g} --seed {seed}"
        write_json(out, provenance(seed=seed, command=command) | {"rows": rows})


class _Lines:
    """A line for each run: a bar on a terminal; elsewhere text when something has happened, or now and then."""

    def __init__(self, runs: "list[LraConfig]") -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[word]}", markup=False),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console) if console.is_terminal else None
        self._said: dict[str, tuple[float, str]] = {}
        self._tasks = {}
        if self._bars is not None:
            for config in runs:
                self._tasks[config.name] = self._bars.add_task(
                    config.name, total=config.steps, start=False, word="waiting"
                )

    def __enter__(self) -> "_Lines":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def tell(self, config: "LraConfig", step: int, word: str) -> None:
        kind = word.split()[0]
        if self._bars is not None:
            line = self._tasks[config.name]
            if not self._bars.tasks[line].started:
                self._bars.start_task(line)
            self._bars.update(line, completed=step, word=word)
            if kind in ("accuracy", "failed:"):
                self._bars.stop_task(line)
            return
        when, before = self._said.get(config.name, (0.0, ""))
        if kind != before or (kind == "loss" and time.monotonic() - when > LINE_SECONDS):
            self._said[config.name] = (time.monotonic(), kind)
            console.print(f"{config.name}: step {step}/{config.steps}, {word}")


def _list(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{option} takes names separated by commas, got {text!r}")
    return parts
