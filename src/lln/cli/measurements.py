"""What the commands of `lln bench` share: options, and what is done with rows.

Rows are recorded, tables printed, the file written, pictures drawn.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lln.cli.options import bench_command
from lln.terminal import Progress, errors, print_table, print_tables

if TYPE_CHECKING:
    from lln.bench.recording import Recording
    from lln.report.goals import Goal
    from lln.report.table import Table
    from lln.results import Result, Row

Lengths = Annotated[str | None, typer.Option(help="Numbers of tokens, separated by commas; by default all of them.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Record the numbers in this result file (.jsonl), pictures beside it; a run that was stopped continues."
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what --out already has.")]
OutAgain = Annotated[Path | None, typer.Option(help="Record the numbers in this result file (.jsonl).")]
Goals = Annotated[bool, typer.Option("--goals", help="Print which of the library's goals are met.")]
SharedOptions = Annotated[
    list[str],
    typer.Option(
        "--option", help="Option of the mechanisms that have it, as block_size=64; may be given several times."
    ),
]
Heads = Annotated[int, typer.Option(help="Attention heads.")]
HeadDim = Annotated[int, typer.Option(help="Features of a head.")]
MaxSeconds = Annotated[float, typer.Option(help="Leave out, and predict, calls of more seconds than this.")]


def start_recording(
    context: typer.Context,
    out: Path | None,
    run: str,
    settings: dict[str, Any],
    seed: int,
    fresh: bool,
    kernel: dict[str, str | None] | None,
) -> "Recording":
    """The recording of a measurement, which continues the one in `out` unless it is to begin again."""
    from lln.bench.recording import Recording

    command = bench_command(context, "out", "json", "fresh", "goals", "workers")
    return Recording(out, run, command=command, settings=settings, seed=seed, kernel=kernel, fresh=fresh)


def run_name(run: str, options: Mapping[str, Any]) -> str:
    """The name of a measurement with options of the mechanisms, which does not replace the one without."""
    return "-".join((run, *(f"{name}={value}" for name, value in options.items())))


def measure_rows(recording: "Recording", rows: Iterable["Row"], *, total: int) -> None:
    """Put rows into the recording as they come."""
    if len(recording.rows) >= total:
        errors.print(f"{recording.path} already has all of this; --fresh measures it again.")
        return
    warn_of_noise(recording)
    with Progress(recording.result.run, total, completed=len(recording.rows)) as bar:
        for row in rows:
            recording.add(row)
            bar.advance()


def warn_of_noise(recording: "Recording") -> None:
    if not recording.noise["quiet"]:
        errors.print(
            f"Others keep {recording.noise['busy_processors']:g} processors busy (load average "
            f"{recording.noise['load_average']:g}): times will be too long, and ratios uncertain.",
            style="yellow",
            soft_wrap=False,
        )


def finish(
    recording: "Recording",
    tables: Callable[["Result"], Sequence["Table"]],
    draw: Callable[["Result", Path], tuple[Path, ...]] | None,
    json: bool,
    goals: Sequence["Goal"] = (),
) -> None:
    """Print the tables, write the result file, draw the pictures, and print which goals are met."""
    from lln.report.goals import check, goals_table

    print_tables(tables(recording.result), as_json=json)
    if goals:
        print_table(goals_table(check(goals, recording.result)), as_json=json)
    if recording.path is not None:
        recording.write()
        drawn = () if draw is None else draw(recording.result, recording.path.parent)
        errors.print("Written: " + ", ".join(map(str, (recording.path, *drawn))))
