"""The `lln` command: every verb is a few lines around one function of the library."""

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
    from typer.core import TyperGroup
except ModuleNotFoundError as error:
    raise SystemExit(f'The lln command needs {error.name}: pip install "lln-attention[cli]"') from error

from lln import bench_cli, linearize_cli, lra_cli, train_cli
from lln.report.console import console, errors, print_error


class Verbs(TyperGroup):
    """Runs a verb. An interrupt or a mistake of the user ends it with a message instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            errors.print("\nInterrupted; what was finished is written.")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # typer ends quietly when nothing reads the output any more
        except (ValueError, ImportError, OSError) as error:
            print_error(error)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Verbs,
    help="Linear Log-Normal attention: see it work, measure it, look into it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_cli.app, name="bench")
app.add_typer(train_cli.app, name="train")
app.add_typer(lra_cli.data, name="data")
app.add_typer(lra_cli.lra, name="lra")
linearize_cli.add_command(app)

# Columns that are set to the right.
NUMBERS = (
    "tokens",
    "tokens/s",
    "validation loss",
    "temperature",
    "variance of ln P",
    "entropy (bits)",
    "spectral gap",
    "time (ms)",
    "quartiles",
    "speed-up",
    "peak memory (MiB)",
    "head dim",
    "a",
    "b",
    "a off",
    "b off",
)

Results = Annotated[Path, typer.Option(help="Folder with recorded results.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures (PNG) and numbers (JSON).")] = Path("demo-results"),
    seed: Seed = 0,
) -> None:
    """Moment matching at work, what linear attention costs, and a model that learns with it: five minutes."""
    from lln.report import demo_training
    from lln.report.demo import COSTS, MATRICES, PARTS, run_part

    def measured(part: str) -> list[dict[str, Any]]:
        with _progress(f"{part:<14}", PARTS[part][2]) as advance:
            return run_part(part, out, seed=seed, on_row=lambda row: advance())

    def heading(title: str, text: str) -> None:
        console.print(f"[bold]{title}[/]: {text}", markup=True)

    heading("1. Moment matching", "does LLN attention concentrate as softmax attention does?")
    rows = measured("concentration")
    table = _table("temperature", "attention", "variance of ln P", "entropy (bits)", "spectral gap")
    for row in rows:
        if row["temperature"] in (2.0, 1.0, 0.7, 0.5):
            look, _ = MATRICES[row["attention"]]
            table.add_row(
                f"{row['temperature']:g}",
                look.label,
                f"{row['log_variance']:.3f}",
                f"{row['entropy_bits']:.2f}",
                f"{row['spectral_gap']:.3f}",
                end_section=row["attention"] == list(MATRICES)[-1],
            )
    console.print(table)

    heading("2. Cost", "forward time (one thread) and peak memory against torch's softmax attention")
    _print_costs(measured("cost"), {name: look.label for name, look in COSTS.items()})
    console.print(
        "torch's softmax attention keeps no N x N matrix either, so memory grows in proportion to N for all three; "
        "its time grows with the square of N.",
        soft_wrap=False,
    )
    heading("3. Training", "the same small RoBERTa with both attentions, on Python's standard library")
    runs = demo_training.train_both(out, seed=seed)
    table = _table("attention", "validation loss", "tokens/s", "entropy (bits)")
    for run in runs:
        table.add_row(*demo_training.row(run))
    console.print(table)
    demo_training.draw(runs, out / "training.png")
    files = [f"{part}.png, {part}.json" for part in PARTS] + ["training.png, training/"]
    console.print(f"Pictures and numbers are in {out}: {', '.join(files)}")


@app.command()
def calibrate(
    out: Annotated[Path | None, typer.Option(help="Write the table here, in the format of curves.json.")] = None,
    explain_only: Annotated[
        bool, typer.Option("--explain-only", help="Explain the shipped table, measure no new one.")
    ] = False,
) -> None:
    """Measure the matching curves anew (about ten minutes), compare them with the shipped ones, and explain them."""
    from lln.bench.record import check_file
    from lln.matching import calibration
    from lln.matching.curves import TABLE, TABLE_PATH, linear_constants

    if not explain_only:
        if out is not None:
            check_file(out)
        with _progress("measuring curves", len(calibration.HEAD_DIMS) * (2 + len(calibration.NUM_KEYS))) as advance:
            text = calibration.dump(calibration.calibrate(advance))
        same = text == TABLE_PATH.read_text(encoding="utf-8")
        console.print(
            f"The new table is {'[green]identical, bit for bit,[/] to' if same else '[red]not[/]'} the shipped one.",
            markup=True,
        )
        if out is not None:
            out.write_text(text, encoding="utf-8")
            console.print(f"Written to {out}.")
    table = _table("head dim", "a", "b", title="Eq. 10: Var(ln P) = a s² + b (64: as published)")
    for head_dim in TABLE["head_dims"]:
        a, b = linear_constants(head_dim)
        table.add_row(str(head_dim), f"{a:.5f}", f"{b:.5f}")
    console.print(table)

    with _progress("explaining", len(calibration.FIT_ENDS) + len(calibration.ERROR_HEAD_DIMS)) as advance:
        fits = calibration.published_range(advance)
        errors = calibration.matching_errors(advance)
    table = _table(
        "fitted over s² up to", "a", "b", "a off", "b off", title="Where the published a and b come from (D = 64)"
    )
    for fit in fits:
        table.add_row(
            f"{fit['high']:g}", f"{fit['a']:.5f}", f"{fit['b']:.5f}", f"{fit['a_off']:+.1%}", f"{fit['b_off']:+.1%}"
        )
    console.print(table)
    columns = [f"{variance:g}" for variance in calibration.ERROR_VARIANCES]
    table = _table(
        "matching", "of", "head dim", *columns, title="Error of each matching, over score variance (N = 1024, 8 draws)"
    )
    for row in errors:
        cells = [f"{value:+.1%}" for value in row["errors"]]
        table.add_row(row["matching"], row["quantity"], str(row["head_dim"]), *cells)
    console.print(table)


@app.command()
def zoo(
    name: Annotated[str | None, typer.Argument(help="A mechanism, to read all that its record says.")] = None,
) -> None:
    """The mechanisms that can be built by name, and what each of them can do."""
    from lln.zoo.table import table as records

    rows = {row["name"].strip("`"): row for row in records()}
    if name is None:
        columns = ("time", "causal", "padding", "cross", "random", "learned")
        shown = _table("name", *columns)
        for key, row in rows.items():
            learned = "no" if row["learned"] == "nothing" else "yes"
            shown.add_row(key, *(row[column] for column in columns[:-1]), learned)
    elif name in rows:
        shown = _table("record", name)
        for key, value in rows[name].items():
            shown.add_row(key, value)
    else:
        raise ValueError(f"no mechanism is called {name!r}; there are: {', '.join(rows)}")
    console.print(shown)


@app.command()
def figure(
    number: Annotated[int, typer.Argument(help="The number of the figure in the paper.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNG, the SVG and the CSV.")] = Path("figures"),
    results: Results = Path("results"),
    head_dim: int = 64,
    tokens: int = 1024,
    seed: Seed = 0,
) -> None:
    """Draw a figure of the paper: 2, 5, 6, 7 are measured, 1, 8, 9, 10 show recorded runs."""
    from lln.report.figures import figure as draw

    for path in draw(number, out=out, results=results, head_dim=head_dim, tokens=tokens, seed=seed):
        console.print(str(path))


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="The number of a table in the paper, mlm, or ablation.")],
    out: Annotated[Path, typer.Option(help="Folder for the Markdown and the PNG.")] = Path("tables"),
    results: Results = Path("results"),
) -> None:
    """Make a table of the paper from recorded results, the published numbers beside ours."""
    from lln.report.tables import table as make

    made, *paths = make(name, results=results, out=out)
    shown = Table(*made.columns, title=made.title, title_justify="left")
    for row in made.rows:
        shown.add_row(*row)
    console.print(shown)
    for note in made.notes:
        console.print(note, soft_wrap=False)
    for path in paths:
        console.print(str(path))


@app.command()
def reproduce(
    target: Annotated[
        str, typer.Argument(help="table1, mlm, table3, figure1, figure8, figure10, ablation, or all but table1: all.")
    ],
    runs: Annotated[Path, typer.Option(help="Folder for the runs, with their checkpoints.")] = Path("runs"),
    results: Results = Path("results"),
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data; left out, LLN_DATA.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side; they share the cores.")] = 2,
    model: Annotated[
        Path | None, typer.Option(help="Of table1: folder with the pretrained encoder that all methods start from.")
    ] = None,
    method: Annotated[list[str], typer.Option(help="Of table1: this method alone; may be given several times.")] = [],  # noqa: B006
    task: Annotated[list[str], typer.Option(help="Of table1: this task alone; may be given several times.")] = [],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="Of table1: this seed alone; may be given several times.")] = [],  # noqa: B006
) -> None:
    """Train all that a table or figure of the paper shows; the same command continues after any interruption."""
    folders: dict[str, Any] = {"runs": runs, "data_dir": data_dir, "side_by_side": jobs, "say": console.print}
    if target == "table1":
        from lln.tasks.table_1 import reproduce_table_1

        reproduce_table_1(model, results=results, methods=method, tasks=task, seeds=seed, **folders)
        return
    if model or method or task or seed:
        raise ValueError(f"--model, --method, --task and --seed are options of table1, not of {target}")
    from lln.tasks.reproduce import reproduce as run

    run(target, results=results / "runs", **folders)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A folder with a saved Hugging Face model, or a model type as roberta.")],
    text: Annotated[Path, typer.Option(help="The text that the model reads.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the table (CSV) and heat maps (PNG).")] = None,
    tokens: Annotated[int, typer.Option(help="Read at most so many tokens.")] = 512,
) -> None:
    """What every head of a model does with a text: temperature, entropy, spectral gap and bias."""
    from lln.instruments.inspect import inspect as look

    look(model, text, out=out, tokens=tokens)


def main() -> None:
    """Run the command."""
    app()


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    return table


def _print_costs(rows: Iterable[dict[str, Any]], labels: dict[str, str]) -> None:
    table = _table("tokens", "attention", "time (ms)", "quartiles", "speed-up", "peak memory (MiB)")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            f"{row['tokens']:,}",
            labels[row["mechanism"]],
            _short(row["milliseconds"]),
            f"{_short(low)} - {_short(high)}",
            f"{row['ratio']:.2f}",
            f"{row['peak_bytes'] / 2**20:.1f}",
            end_section=row["mechanism"] == list(labels)[-1],
        )
    console.print(table)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


@contextmanager
def _progress(label: str, total: int) -> Any:
    """A progress bar with the time left; hands out the function that moves it one step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=total)
        advance: Callable[[], None] = lambda: progress.advance(task)  # noqa: E731
        yield advance


if __name__ == "__main__":
    main()
