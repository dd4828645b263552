"""`lln show` and `lln reproduce`: the tables and figures of the paper, by the same names."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.options import DataDir, Json, Results
from lln.paper import NAMES
from lln.terminal import Progress, console, print_table


def add_commands(app: typer.Typer) -> None:
    app.command()(show)
    app.command()(reproduce)


def show(
    name: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}.")],
    out: Annotated[Path, typer.Option(help="Folder for the files: Markdown and PNG, or PNG, SVG and CSV.")] = Path(
        "shown"
    ),
    results: Results = Path("results"),
    head_dim: Annotated[int, typer.Option(help="Features of a head in figures 2, 5, 6 and 7.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens in figures 2, 5, 6 and 7.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of figures 2, 5, 6 and 7.")] = 0,
    json: Json = False,
) -> None:
    """Make a table or a figure of the paper from recorded results; figures 2, 5, 6 and 7 are measured now."""
    from lln import paper

    if name in paper.tables():
        made, *paths = paper.table(name, out=out, results=results)
        print_table(made, as_json=json)
    elif json:
        raise ValueError("--json is for tables; the numbers of a figure are in its CSV")
    else:
        sizes = {"head_dim": head_dim, "tokens": tokens, "seed": seed}
        with Progress(name, 1) as bar:
            steps: Callable[[int, int], None] = lambda done, total: bar.update(done / total)  # noqa: E731
            paths = list(paper.figure(name, out=out, results=results, **sizes, on_step=steps))
    if not json:
        for path in paths:
            console.print(str(path))


def reproduce(
    target: Annotated[
        str,
        typer.Argument(help=f"Of {', '.join(NAMES)} what is trained, or all: all but table1, table5 and linearized."),
    ],
    runs: Annotated[Path, typer.Option(help="Folder for the runs, with their checkpoints.")] = Path("runs"),
    results: Results = Path("results"),
    data_dir: DataDir = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side; they share the cores.")] = 2,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Of table1: folder with the pretrained encoder that all methods start from. Of linearized: folder "
            "that holds the models as folders minilm, stories15m and smollm2."
        ),
    ] = None,
    method: Annotated[list[str], typer.Option(help="This method alone; may be given several times.")] = [],  # noqa: B006
    task: Annotated[list[str], typer.Option(help="This task alone; may be given several times.")] = [],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="This seed alone; may be given several times.")] = [],  # noqa: B006
) -> None:
    """Train all that a table or figure of the paper shows; the same command continues after any interruption."""
    from lln.paper.jobs import Request

    folders: dict[str, Any] = {"runs": runs, "results": results, "data_dir": data_dir}
    request = Request(**folders, side_by_side=jobs, methods=method, tasks=task, seeds=seed)
    if target == "table1":
        from lln.paper.table1_runs import reproduce_table_1

        reproduce_table_1(model, request)
        return
    if target == "linearized":
        from lln.paper.linearized_runs import reproduce_linearized

        reproduce_linearized(model, request)
        return
    if model is not None:
        raise ValueError(f"--model is an option of table1 and linearized, not of {target}")
    from lln.paper.reproduce import reproduce as run

    run(target, request)
