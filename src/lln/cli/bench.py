"""`lln bench`: time and memory of mechanisms on this machine; `bench_parts` has the other commands.

Every command measures, prints tables, and writes a result file if --out is given.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lln.cli import bench_parts
from lln.cli.measurements import (
    Fresh,
    Goals,
    HeadDim,
    Heads,
    Lengths,
    MaxSeconds,
    Out,
    SharedOptions,
    finish,
    measure_rows,
    run_name,
    start_recording,
    warn_of_noise,
)
from lln.cli.options import Json, Options, Seed, names, numbers
from lln.tasks.config import parse_options
from lln.terminal import Progress, errors, print_table

if TYPE_CHECKING:
    from lln.report.table import Table

app = typer.Typer(help="Speed and memory on this machine.", no_args_is_help=True)


@app.command("attention")
def attention(
    context: typer.Context,
    lengths: Lengths = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="What to compare, separated by commas; also names of `lln zoo`.")
    ] = None,
    heads: Heads = 12,
    head_dim: HeadDim = 64,
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
        setting,
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
    heads: Heads = 12,
    head_dim: HeadDim = 64,
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


@app.command("lra")
def lra(
    context: typer.Context,
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas; by default all of them.")] = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="What to compare, separated by commas; names of `lln zoo` or softmax_explicit.")
    ] = None,
    option: SharedOptions = [],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Time the mechanisms of a task at least this long.")] = 30.0,
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

    chosen, compared = names("--tasks", tasks, tuple(TASKS)), names("--mechanisms", mechanisms, METHODS)
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


bench_parts.add_commands(app)
