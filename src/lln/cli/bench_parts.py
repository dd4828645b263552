"""`lln bench kernels`, `forms`, `spine`, `distributed` and `growth`: parts of the library by themselves."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.measurements import (
    Fresh,
    HeadDim,
    Heads,
    Lengths,
    Out,
    OutAgain,
    SharedOptions,
    finish,
    measure_rows,
    start_recording,
    warn_of_noise,
)
from lln.cli.options import Json, Seed, names, numbers
from lln.tasks.config import parse_options
from lln.terminal import Progress, print_table, print_tables


def add_commands(app: typer.Typer) -> None:
    for verb in (kernels, forms, spine, distributed, growth):
        app.command()(verb)


def kernels(
    context: typer.Context,
    arch: Annotated[str, typer.Option(help="sm_80 (A100) and sm_90 (H100), separated by commas.")] = "sm_80,sm_90",
    dtype: Annotated[
        str | None, typer.Option(help="Some of float16, bfloat16, float32, separated by commas; by default all.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Compile for this head dimension; by default 16 to 256.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that compile; by default one for each core.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every combination of options, which takes an hour or two of processor time.")
    ] = False,
    out: OutAgain = None,
    json: Json = False,
) -> None:
    """The Triton kernels compiled for GPUs, without one: registers, shared memory, bounds. Nothing is timed.

    Of all variants so many are compiled that any two options occur together, which takes some minutes.
    """
    from lln.backends.triton import missing_reason
    from lln.bench.candidates import DTYPES
    from lln.bench.kernels import GPUS, WIDTHS, all_variants, bound_rows, compile_all, cover, widest
    from lln.paper.table2 import PUBLISHED_SECONDS
    from lln.report.kernels import bounds_tables, kernels_tables

    dtypes = ("float16", "bfloat16", "float32")
    archs, chosen = names("--arch", arch, tuple(GPUS)), names("--dtype", dtype, dtypes)
    for option, given, allowed in (("--arch", archs, tuple(GPUS)), ("--dtype", chosen, dtypes)):
        if refused := [x for x in given if x not in allowed]:
            raise ValueError(f"{option} takes {', '.join(allowed)} separated by commas, got {refused[0]!r}")
    largest = max(widest(x) for x in chosen)
    if head_dim is not None and not 1 <= head_dim <= largest:
        raise ValueError(f"--head-dim must be 1 to {largest} for {', '.join(chosen)}, got {head_dim}")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    if reason := missing_reason():
        raise ValueError(f'{reason}; pip install "lln-attention[triton]"')
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("an interpreted kernel cannot be compiled; unset TRITON_INTERPRET")
    variants = all_variants(chosen, WIDTHS if head_dim is None else [(head_dim, head_dim)])
    jobs = [(variant, one) for one in archs for variant in variants] if every else cover(variants, archs)
    settings = {"archs": list(archs), "dtypes": list(chosen), "head_dim": head_dim or "16 to 256"}
    settings |= {"variants": len(variants), "every": every, "triton": version("triton")}
    recording = start_recording(context, out, "kernels", settings, 0, True, None)
    bounds = start_recording(context, out, "bounds", {}, 0, True, None)
    kinds = {DTYPES[kind].itemsize: kind for kind in reversed(chosen)}.values()  # a bound depends on the size alone
    for one in archs:
        for kind in kinds:
            if (width := head_dim or 64) <= widest(kind):
                bounds.rows += bound_rows(one, dtype=kind, heads=12, head_dim=width)
    print_tables(bounds_tables(bounds.result, PUBLISHED_SECONDS), as_json=json)
    bounds.write()
    with Progress("compile", len(jobs)) as bar:
        for done in compile_all(jobs, workers or os.cpu_count() or 1):
            recording.add(done.row)
            bar.advance()
    finish(recording, kernels_tables, None, json)
    if any(row["problem"] is not None for row in recording.rows):
        raise typer.Exit(1)


def forms(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder saved by save_pretrained, or a model type such as bert.")],
    text: Annotated[Path, typer.Option(help="A text file to measure on.")],
    calibration: Annotated[
        Path | None, typer.Option(help="Another one, for the statistics of a causal model; left out, what follows.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    sequences: Annotated[int, typer.Option(help="Sequences to measure on.")] = 2,
    block_size: Annotated[int, typer.Option(help="Tokens in the blocks and the window of softmax attention.")] = 64,
    loss: Annotated[bool, typer.Option("--loss", help="Also the loss of the whole model, if it is causal.")] = False,
    seed: Seed = 0,
    out: OutAgain = None,
    json: Json = False,
) -> None:
    """How near LLN in all its forms, and other linear attention, is to a model's softmax attention, untrained."""
    from lln.bench.forms import Comparison
    from lln.instruments.inspect import read_text
    from lln.report.speed import forms_tables

    other = None if calibration is None else read_text(calibration, "--calibration")
    described: dict[str, Any] = {"length": length, "sequences": sequences, "block_size": block_size}
    comparison = Comparison(model, read_text(text), calibration=other, loss=loss, seed=seed, **described)
    name = Path(model).name
    described |= {"model": name, "layers": len(comparison.layers), "notes": comparison.notes}
    recording = start_recording(context, out, name, described, seed, True, None)
    with Progress("forms", comparison.steps) as bar:
        recording.rows += comparison.run(bar.advance)
    finish(recording, forms_tables, None, json)


def spine(
    context: typer.Context,
    parts: Annotated[str | None, typer.Option(help="What to compare, separated by commas; by default all.")] = None,
    lengths: Lengths = None,
    before: Annotated[Path | None, typer.Option(help="A checkout of an earlier commit, to compare calls with.")] = None,
    model: Annotated[Path | None, typer.Option(help="The folder of a causal language model, for generate.")] = None,
    seconds: Annotated[float, typer.Option(help="Measure each comparison about this long.")] = 4.0,
    seed: Seed = 0,
    out: OutAgain = None,
    json: Json = False,
) -> None:
    """Ratios: calls, forms, windows, packed sequences, states and generation, each against an alternative."""
    from lln.bench.attention import kernel_in_use
    from lln.bench.candidates import Setting
    from lln.bench.spine import LENGTHS, PARTS, compare_spine, number_of_rows
    from lln.report.speed import ratio_tables

    chosen, tokens = names("--parts", parts, PARTS), numbers("--lengths", lengths, LENGTHS)
    settings = {"parts": chosen, "lengths": tokens, "seconds": seconds}
    recording = start_recording(context, out, "spine", settings, seed, True, kernel_in_use(Setting()))
    total = number_of_rows(chosen, tokens, before=before is not None, model=model is not None)
    folder = None if model is None else str(model)
    rows = compare_spine(chosen, tokens, before=before, model=folder, seconds=seconds, seed=seed)
    measure_rows(recording, rows, total=total)
    finish(recording, ratio_tables, None, json)


def distributed(
    context: typer.Context,
    heads: Heads = 4,
    head_dim: HeadDim = 64,
    networks: Annotated[
        bool, typer.Option("--networks", help="Also in networks of limited bandwidth and delay; needs root on Linux.")
    ] = False,
    million: Annotated[
        bool,
        typer.Option("--million", help="Also memory of a million tokens with one head, in one and four processes."),
    ] = False,
    out: Out = None,
    fresh: Fresh = False,
    json: Json = False,
) -> None:
    """One sequence over 1, 2 and 4 processes: time, memory, traffic, and what follows for more of them."""
    from lln.bench.distributed import is_measured, jobs, measure
    from lln.report.distributed import distributed_tables

    settings = {"heads": heads, "head_dim": head_dim}
    recording = start_recording(context, out, "distributed", settings, 0, fresh, None)
    warn_of_noise(recording)
    todo = jobs(networks=networks, million=million, heads=heads, head_dim=head_dim)
    with Progress("distributed", len(todo)) as bar:
        for network, processes, arguments in todo:
            if not any(is_measured(row, network, processes, arguments) for row in recording.rows):
                for row in measure(network, processes, **arguments):
                    recording.add(row)
            bar.advance()
    finish(recording, distributed_tables, None, json)


def growth(
    mechanisms: Annotated[
        str | None, typer.Option(help="What to measure, separated by commas; by default all that are linear.")
    ] = None,
    short: Annotated[int, typer.Option(min=1, help="Tokens of the shorter input.")] = 4096,
    long: Annotated[int, typer.Option(min=1, help="Tokens of the longer input.")] = 16384,
    repeats: Annotated[int, typer.Option(min=1, help="Forward passes at least.")] = 7,
    option: SharedOptions = [],  # noqa: B006
    json: Json = False,
) -> None:
    """How time and memory of the linear mechanisms of `lln zoo` grow with the number of tokens, on one thread."""
    from lln.bench.growth import COLUMNS, compare_growth
    from lln.report.table import Table
    from lln.zoo import describe
    from lln.zoo import names as mechanism_names

    chosen = names("--mechanisms", mechanisms, [name for name in mechanism_names() if describe(name).linear])
    rows = []
    with Progress("growth", len(chosen)) as bar:
        for row in compare_growth(chosen, parse_options(option), short=short, long=long, repeats=repeats):
            rows.append(row)
            bar.advance()
    print_table(Table(f"Growth from {short:,} to {long:,} tokens", COLUMNS, rows), as_json=json)
