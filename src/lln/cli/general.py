"""`lln demo`, `calibrate`, `zoo`, `inspect` and `doctor`: run LLN attention, and inspect models."""

from pathlib import Path
from typing import Annotated

import typer

from lln.cli.options import Json, Seed
from lln.terminal import Progress, console, print_table


def add_commands(app: typer.Typer) -> None:
    for verb in (demo, inspect, zoo, calibrate, doctor):
        app.command()(verb)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures (PNG) and numbers (JSON lines).")] = Path(
        "demo-results"
    ),
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Moment matching at work, what linear attention costs, and a model that learns with it: five minutes."""
    from lln import demo as parts

    for part, table in (("concentration", parts.concentration_table), ("cost", parts.cost_table)):
        with Progress(part, parts.MEASURED[part][2]) as bar:
            rows = parts.measure(part, out, seed=seed, on_row=bar.advance)
        print_table(table(rows), as_json=json)
    runs = parts.train_both(out, seed=seed)
    print_table(parts.training_table(runs), as_json=json)
    parts.draw_training(runs, out / "training.png")
    if not json:
        pictures = ", ".join(f"{part}.png" for part in (*parts.MEASURED, "training"))
        console.print(f"Pictures and numbers are in {out}: {pictures}, {parts.RESULTS}")


def inspect(
    model: Annotated[str, typer.Argument(help="A folder with a saved Hugging Face model, or a model type as roberta.")],
    text: Annotated[Path, typer.Option(help="The text that the model reads.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the table (CSV) and heat maps (PNG).")] = None,
    tokens: Annotated[int, typer.Option(help="Read at most so many tokens.")] = 512,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows every head: one file, no network.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="A second model, beside the first: for example the same model made linear.")
    ] = None,
    json: Json = False,
) -> None:
    """What every head of a model does with a text: temperature, entropy, spectral gap and bias."""
    from lln.instruments import inspect as instruments
    from lln.report.heads_page import write_heads_page
    from lln.report.table import Table
    from lln.results import check_writable

    content = instruments.read_text(text)
    for name in (model, compare):
        if name is not None:
            instruments.check_model(name)
    if html is not None:
        check_writable(html, "--html")
    inspections = []
    for name, stem in ((model, "inspect"), (compare, "compare")):
        if name is None:
            continue
        inspection = instruments.inspect_details(name, content, tokens=tokens, with_details=html is not None)
        inspections.append(inspection)
        if out is not None:
            instruments.write_inspection(inspection, out, stem)
        for title, columns, rows, notes in instruments.inspection_tables(inspection.records):
            shown = title if compare is None else f"{name}: {title}"
            print_table(Table(shown, columns, rows, notes), as_json=json)
    if html is not None:
        write_heads_page(inspections, html)


def doctor(json: Json = False) -> None:
    """What this machine has, for bug reports: versions, threads, instruction set, backends and why not."""
    from lln.doctor import describe
    from lln.report.table import Table

    found = describe()
    if json:
        print_table(Table("lln doctor", ["what", "value"], [list(row) for row in found]), as_json=True)
        return
    for name, value in found:  # lines that can be pasted: a table would break long values
        console.print(f"{name}: {value}", soft_wrap=True)


def zoo(
    name: Annotated[str | None, typer.Argument(help="A mechanism, to read all that is known about it.")] = None,
    json: Json = False,
) -> None:
    """The mechanisms that can be built by name, and what each of them can do."""
    from lln.report.table import Table
    from lln.zoo.registry import option_parameters
    from lln.zoo.table import table as descriptions

    rows = {row["name"].strip("`"): row for row in descriptions()}
    if name is None:
        columns = ("time", "causal", "padding", "cross", "random")
        cells = [
            [key, *(row[column] for column in columns), "no" if row["learned"] == "nothing" else "yes"]
            for key, row in rows.items()
        ]
        shown = Table("Mechanisms", ["name", *columns, "learned"], cells)
    elif name in rows:
        options = "; ".join(map(str, option_parameters(name).values())) or "none"
        shown = Table(name, ["", name], [[key, value] for key, value in (rows[name] | {"options": options}).items()])
    else:
        raise ValueError(f"no mechanism is called {name!r}; there are: {', '.join(rows)}")
    print_table(shown, as_json=json)


def calibrate(
    out: Annotated[Path | None, typer.Option(help="Write the table here, in the format of curves.json.")] = None,
    explain_only: Annotated[
        bool, typer.Option("--explain-only", help="Explain the shipped table, measure no new one.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure the matching curves again (about ten minutes), compare them with the shipped ones, and explain them."""
    from lln.matching import calibration
    from lln.matching.curves import TABLE, TABLE_PATH, linear_constants
    from lln.report.table import Table
    from lln.results import check_writable
    from lln.terminal import errors

    if not explain_only:
        if out is not None:
            check_writable(out)
        with Progress("measuring curves", len(calibration.HEAD_DIMS) * (2 + len(calibration.NUM_KEYS))) as bar:
            text = calibration.dump(calibration.calibrate(bar.advance))
        same = "identical, bit for bit, to" if text == TABLE_PATH.read_text(encoding="utf-8") else "not"
        errors.print(f"The new table is {same} the shipped one.")
        if out is not None:
            out.write_text(text, encoding="utf-8")
            errors.print(f"Written to {out}.")
    constants = [(str(head_dim), *(f"{x:.5f}" for x in linear_constants(head_dim))) for head_dim in TABLE["head_dims"]]
    title = "Eq. 10: Var(ln P) = a s² + b (64: as published)"
    print_table(Table(title, ["head dim", "a", "b"], constants), as_json=json)

    with Progress("explaining", len(calibration.FIT_ENDS) + len(calibration.ERROR_HEAD_DIMS)) as bar:
        fits = calibration.published_range(bar.advance)
        differences = calibration.matching_errors(bar.advance)
    rows = [
        [f"{fit['high']:g}", f"{fit['a']:.5f}", f"{fit['b']:.5f}", f"{fit['a_off']:+.1%}", f"{fit['b_off']:+.1%}"]
        for fit in fits
    ]
    title = "Where the published a and b come from (D = 64)"
    print_table(Table(title, ["fitted over s² up to", "a", "b", "a off", "b off"], rows), as_json=json)
    columns = ["matching", "of", "head dim", *(f"{variance:g}" for variance in calibration.ERROR_VARIANCES)]
    rows = [
        [row["matching"], row["quantity"], str(row["head_dim"]), *(f"{value:+.1%}" for value in row["errors"])]
        for row in differences
    ]
    title = "Error of each matching, over score variance (N = 1024, 8 draws)"
    print_table(Table(title, columns, rows), as_json=json)
