"""`lln bench`: time and memory on this machine, and the forms of LLN on a pretrained model.

Every command measures, prints tables, and writes a result file if --out is given.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lln.cli.measurements import finish, measure_rows, run_name, start_recording, warn_of_noise
from lln.cli.options import Json, Options, Seed, names, numbers
from lln.tasks.config import parse_options
from lln.terminal import Progress, errors, print_table, print_tables

if TYPE_CHECKING:
    from lln.report.table import Table

app = typer.Typer(help="Speed and memory on this machine.", no_args_is_help=True)

Lengths = Annotated[str | None, typer.Option(help="Numbers of tokens, separated by commas; by default all of them.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Record the numbers in this result file (.jsonl), pictures beside it; a run that was stopped continues."
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what --out already has.")]
Goals = Annotated[bool, typer.Option("--goals", help="Print which of the library's goals are met.")]
SharedOptions = Annotated[
    list[str],
    typer.Option(
        "--option", help="Option of the mechanisms that have it, as block_size=64; may be given several times."
    ),
]
MaxSeconds = Annotated[float, typer.Option(help="Leave out, and predict, calls of more seconds than this.")]


@app.command("attention")
def attention(
    context: typer.Context,
    lengths: Lengths = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="What to compare, separated by commas; also names of `lln zoo`.")
    ] = None,
    heads: int = 12,
    head_dim: int = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Tokens attend only to those up to themselves.")] = False,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No gradients.")] = False,
    option: SharedOptions = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Measure each length about this long.")] = 4.0,
    max_seconds: MaxSeconds = 10.0,
    seed: Seed = 0,
    out: Out = None,
    fresh: Fresh = False,
    goals: Goals = False,
    json: Json = False,
) -> None:
    """Attention from 128 to 16,384 tokens: LLN, LLN+Diag, softmax, others, and what no kernel can beat."""
    from lln.bench import candidates
    from lln.bench.attention import LENGTHS, PASSES, compare_attention, kernel_in_use
    from lln.report.goals import ATTENTION_GOALS, check
    from lln.report.speed import attention_tables
    from lln.report.speed_pictures import draw_attention

    setting = candidates.Setting(heads, head_dim, dtype, causal, device, parse_options(option))
    on_gpu = device == "cuda"
    compared = candidates.GPU_MECHANISMS if on_gpu else candidates.MECHANISMS
    tokens, chosen = numbers("--lengths", lengths, LENGTHS), names("--mechanisms", mechanisms, compared)
    candidates.check_names(chosen, setting)
    passes = PASSES[:1] if forward_only else PASSES
    origins = {name: candidates.origin(name, setting) for name in chosen}
    left_out = {"device": "cpu", "options": {}}  # as in results that were recorded before these were settings
    described = {name: x for name, x in asdict(setting).items() if name not in left_out or x != left_out[name]}
    described |= candidates.gpu_name() if on_gpu else {}
    described |= {"origins": origins, "seconds": seconds, "max_seconds": max_seconds}
    run = f"attention-{dtype}{'-causal' if causal else ''}{'-cuda' if on_gpu else ''}"
    recording = start_recording(
        context, out, run_name(run, setting.options), described, seed, fresh, kernel_in_use(setting)
    )
    if goals:
        check((), recording.result)  # refuses another setting before anything is measured
    recording.drop_incomplete(chosen, "pass", "tokens")
    rows = compare_attention(
        tokens,
        chosen,
        **asdict(setting),
        passes=passes,
        seconds=seconds,
        max_seconds=max_seconds,
        seed=seed,
        done=recording.rows,
    )
    measure_rows(recording, rows, total=len(tokens) * len(chosen) * len(passes))
    finish(recording, attention_tables, draw_attention, json, ATTENTION_GOALS if goals else ())


@app.command("model")
def model(
    context: typer.Context,
    lengths: Lengths = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="Some of eager, sdpa, nystrom, lln, lln_diag, separated by commas.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Repeat short steps, up to three times, for about this long.")] = 60.0,
    max_seconds: MaxSeconds = 40.0,
    option: SharedOptions = [],  # noqa: B006
    seed: Seed = 0,
    out: Out = None,
    fresh: Fresh = False,
    json: Json = False,
) -> None:
    """Table 2: one training step of RoBERTa-base, batch 1, from 512 to 16,384 tokens."""
    from lln.bench.attention import kernel_in_use
    from lln.bench.candidates import Setting
    from lln.bench.model import LENGTHS, MECHANISMS, ROBERTA_BASE, compare_training
    from lln.paper import table2

    tokens, chosen = numbers("--lengths", lengths, LENGTHS), names("--mechanisms", mechanisms, MECHANISMS)
    setting = replace(ROBERTA_BASE, options=parse_options(option))
    described = asdict(setting) | {"seconds": seconds, "max_seconds": max_seconds}
    if not setting.options:  # as in results that were recorded before these were settings
        del described["options"]
    recording = start_recording(
        context, out, run_name(table2.RUN, setting.options), described, seed, fresh, kernel_in_use(Setting())
    )
    recording.drop_incomplete(chosen, "tokens")
    limits: dict[str, Any] = {"seconds": seconds, "max_seconds": max_seconds}
    rows = compare_training(tokens, chosen, setting=setting, seed=seed, done=recording.rows, **limits)
    measure_rows(recording, rows, total=len(tokens) * len(chosen))
    finish(recording, table2.parts, table2.draw, json)


@app.command("decode")
def decode(
    context: typer.Context,
    lengths: Lengths = None,
    heads: int = 12,
    head_dim: int = 64,
    seconds: Annotated[float, typer.Option(help="Time the steps about this long.")] = 60.0,
    seed: Seed = 0,
    out: Out = None,
    fresh: Fresh = False,
    goals: Goals = False,
    json: Json = False,
    model: Annotated[
        str | None, typer.Option(help="Time a transformers model from this folder instead, softmax against converted.")
    ] = None,
    attention: Annotated[str, typer.Option(help="With --model: the mechanism that it is converted to.")] = "lln_diag",
    option: Options = [],  # noqa: B006
) -> None:
    """What one more token costs after 1k to 128k tokens: LLN's state against a growing key-value cache.

    With --model: what it costs a whole model after 64 and 8,192 tokens (or --lengths).
    """
    if model is not None:
        if goals or out is not None:
            raise ValueError("--model only prints its table; leave --goals and --out out")
        print_table(_decode_model(model, lengths, seconds, seed, attention, option), as_json=json)
        return
    if option or attention != "lln_diag":
        raise ValueError("--attention and --option are for --model")
    from lln.bench.attention import kernel_in_use
    from lln.bench.candidates import Setting
    from lln.bench.decode import CONTEXTS, compare_decoding, steps
    from lln.report.goals import DECODE_GOALS, check
    from lln.report.speed import decode_tables
    from lln.report.speed_pictures import draw_decode

    tokens = numbers("--lengths", lengths, CONTEXTS)
    sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim}
    described = sizes | {"dtype": "float32", "seconds": seconds}
    recording = start_recording(context, out, "decode", described, seed, fresh, kernel_in_use(Setting(**sizes)))
    if goals:
        check((), recording.result)
    if {row["tokens"] for row in recording.rows} >= set(tokens):
        errors.print(f"{out} already has all of this; --fresh measures it again.")
    else:  # all contexts are timed in the same rounds, so nothing of an earlier run can be kept
        recording.drop(recording.rows)
        warn_of_noise(recording)
        with Progress("decode", steps(tokens)) as bar:
            rows = list(compare_decoding(tokens, seconds=seconds, seed=seed, on_step=bar.advance, **sizes))
        for row in rows:
            recording.add(row)
    finish(recording, decode_tables, draw_decode, json, DECODE_GOALS if goals else ())


@app.command("kernels")
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
    out: Annotated[Path | None, typer.Option(help="Record what was compiled in this result file (.jsonl).")] = None,
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


@app.command("forms")
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
    out: Annotated[Path | None, typer.Option(help="Record the numbers in this result file (.jsonl).")] = None,
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


@app.command("spine")
def spine(
    context: typer.Context,
    parts: Annotated[str | None, typer.Option(help="What to compare, separated by commas; by default all.")] = None,
    lengths: Lengths = None,
    before: Annotated[Path | None, typer.Option(help="A checkout of an earlier commit, to compare calls with.")] = None,
    model: Annotated[Path | None, typer.Option(help="The folder of a causal language model, for generate.")] = None,
    seconds: Annotated[float, typer.Option(help="Measure each comparison about this long.")] = 4.0,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Record the numbers in this result file (.jsonl).")] = None,
    json: Json = False,
) -> None:
    """Ratios: calls, forms, windows, packed sequences, states and generation, each against what it stands beside."""
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


@app.command("distributed")
def distributed(
    context: typer.Context,
    heads: int = 4,
    head_dim: int = 64,
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


@app.command("lra")
def lra(
    context: typer.Context,
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas; by default all of them.")] = None,
    methods: Annotated[str | None, typer.Option(help="Mechanisms of `lln zoo`, separated by commas.")] = None,
    option: SharedOptions = [],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Time the methods of a task at least this long.")] = 30.0,
    seed: Seed = 0,
    out: Out = None,
    fresh: Fresh = False,
    json: Json = False,
) -> None:
    """Table 4: time and peak memory of a training step on the Long Range Arena, all methods in turns."""
    from lln.paper import table4
    from lln.report.speed import lra_tables
    from lln.tasks.lra.bench import METHODS, compare
    from lln.tasks.lra.registry import TASKS

    chosen, compared = names("--tasks", tasks, tuple(TASKS)), names("--methods", methods, METHODS)
    options = parse_options(option)
    described = {"tasks": chosen, "methods": compared, "seconds": seconds} | ({"options": options} if options else {})
    recording = start_recording(context, out, run_name(table4.RUN, options), described, seed, fresh, None)
    left = [task for task in chosen if sum(row["task"] == task for row in recording.rows) < len(compared)]
    recording.drop([row for row in recording.rows if row["task"] in left])
    rows = compare(left, compared, seconds=seconds, seed=seed, options=options)
    measure_rows(recording, rows, total=len(chosen) * len(compared))
    finish(recording, lra_tables, None, json)


def _decode_model(
    folder: str, lengths: str | None, seconds: float, seed: int, attention: str, options: Sequence[str]
) -> "Table":
    from lln.bench.generation import CONTEXTS, compare_generation
    from lln.report.table import Table

    tokens = numbers("--lengths", lengths, CONTEXTS)
    given: dict[str, Any] = {"attention": attention, "options": parse_options(options)}
    with Progress("decode", 2 * len(tokens)) as bar:
        rows = list(compare_generation(folder, tokens, seconds=seconds, seed=seed, on_step=bar.advance, **given))
    cells = [
        [
            f"{row['tokens']:,}, {row['mechanism']}",
            f"{row['milliseconds']:.2f}",
            " to ".join(f"{x:.2f}" for x in row["quartiles"]),
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return Table(f"One more token, {folder}", ["context, attention", "ms a token", "quartiles", "of softmax"], cells)
