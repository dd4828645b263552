"""`lln bench`: time and memory on this machine, and the forms of LLN on a pretrained model.

Every command measures, prints tables, and writes a record if asked.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lln.report.console import console

if TYPE_CHECKING:
    from lln.bench.goals import Goal
    from lln.bench.record import Record
    from lln.report.tables import Table as Grid

app = typer.Typer(help="Speed and memory on this machine.", no_args_is_help=True)

Row = dict[str, Any]

Lengths = Annotated[str | None, typer.Option(help="Numbers of tokens, separated by commas; by default all of them.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Record the numbers here as JSON, with pictures beside it; a run that was stopped continues."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure anew what --out already has.")]
Goals = Annotated[bool, typer.Option("--goals", help="Say which of the library's goals are met.")]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")]


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
    causal: Annotated[bool, typer.Option("--causal", help="A token sees those before it alone.")] = False,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No gradients.")] = False,
    seconds: Annotated[float, typer.Option(help="Measure each length about this long.")] = 4.0,
    limit: Annotated[float, typer.Option(help="Leave out, and predict, calls of more seconds than this.")] = 10.0,
    seed: Seed = 0,
    out: Out = None,
    fresh: Fresh = False,
    goals: Goals = False,
) -> None:
    """Attention from 128 to 16,384 tokens: LLN, LLN+Diag, softmax, others, and what no kernel can beat."""
    from lln.bench import candidates
    from lln.bench.attention import LENGTHS, PASSES, compare_attention, kernel_in_use
    from lln.bench.goals import ATTENTION_GOALS, check
    from lln.bench.pictures import draw_attention
    from lln.bench.record import Record
    from lln.bench.tables import attention_grids

    setting = candidates.Setting(heads=heads, head_dim=head_dim, dtype=dtype, causal=causal)
    numbers = _numbers("--lengths", lengths, LENGTHS)
    names = candidates.MECHANISMS if mechanisms is None else tuple(mechanisms.split(","))
    for name in names:
        candidates.check_name(name)
    passes = PASSES[:1] if forward_only else PASSES
    origins = {name: candidates.origin(name, setting) for name in names}
    described = asdict(setting) | {"origins": origins, "seconds": seconds, "limit": limit}
    record = Record(
        out, command=_command(context), setting=described, seed=seed, kernel=kernel_in_use(setting), fresh=fresh
    )
    if goals:
        check((), record.content)  # refuses another setting before anything is measured
    _drop_incomplete(record, names, ("pass", "tokens"))
    rows = compare_attention(
        numbers,
        names,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        passes=passes,
        seconds=seconds,
        limit=limit,
        seed=seed,
        done=record.rows,
    )
    _measure(record, rows, total=len(numbers) * len(names) * len(passes), label="attention")
    _show(attention_grids(record.content))
    _finish(record, draw_attention)
    if goals:
        _show_goals(ATTENTION_GOALS, record)


@app.command("model")
def model(
    context: typer.Context,
    lengths: Lengths = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="Some of eager, sdpa, nystrom, lln, lln_diag, separated by commas.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Repeat short steps, up to three times, for about this long.")] = 60.0,
    limit: Annotated[float, typer.Option(help="Leave out, and predict, steps of more seconds than this.")] = 40.0,
    seed: Seed = 0,
    out: Out = None,
    fresh: Fresh = False,
) -> None:
    """Table 2: one training step of RoBERTa-base, batch 1, from 512 to 16,384 tokens."""
    from lln.bench.attention import kernel_in_use
    from lln.bench.candidates import Setting
    from lln.bench.model import LENGTHS, LOOKS, ROBERTA_BASE, compare_training
    from lln.bench.record import Record
    from lln.bench.table_2 import draw_table_2, table_2_grids

    numbers = _numbers("--lengths", lengths, LENGTHS)
    names = tuple(LOOKS) if mechanisms is None else tuple(mechanisms.split(","))
    setting = asdict(ROBERTA_BASE) | {"seconds": seconds, "limit": limit}
    record = Record(
        out, command=_command(context), setting=setting, seed=seed, kernel=kernel_in_use(Setting()), fresh=fresh
    )
    _drop_incomplete(record, names, ("tokens",))
    rows = compare_training(
        numbers, names, setting=ROBERTA_BASE, seconds=seconds, limit=limit, seed=seed, done=record.rows
    )
    _measure(record, rows, total=len(numbers) * len(names), label="training steps")
    _show(table_2_grids(record.content))
    _finish(record, draw_table_2)


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
    model: Annotated[
        str | None, typer.Option(help="Time a transformers model from this folder instead, softmax against converted.")
    ] = None,
) -> None:
    """What one more token costs after 1k to 128k tokens: LLN's state against a growing key-value cache.

    With --model: what it costs a whole model after 64 and 8,192 tokens (or --lengths).
    """
    if model is not None:
        if goals or out is not None:
            raise ValueError("--model only prints its table; leave --goals and --out out")
        _decode_model(model, lengths, seconds, seed)
        return
    from lln.bench.attention import kernel_in_use
    from lln.bench.candidates import Setting
    from lln.bench.decode import CONTEXTS, compare_decoding, steps
    from lln.bench.goals import DECODE_GOALS, check
    from lln.bench.pictures import draw_decode
    from lln.bench.record import Record
    from lln.bench.tables import decode_grids

    numbers = _numbers("--lengths", lengths, CONTEXTS)
    setting = {"heads": heads, "head_dim": head_dim, "dtype": "float32", "seconds": seconds}
    kernel = kernel_in_use(Setting(heads=heads, head_dim=head_dim))
    record = Record(out, command=_command(context), setting=setting, seed=seed, kernel=kernel, fresh=fresh)
    if goals:
        check((), record.content)
    if {row["tokens"] for row in record.rows} >= set(numbers):
        console.print(f"{out} already has all of this; --fresh measures it anew.")
    else:  # all contexts are timed in the same rounds, so nothing of an earlier run can be kept
        record.drop(record.rows)
        with _progress("decode", steps(numbers)) as advance:
            options: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "seconds": seconds, "seed": seed}
            _warn_of_noise(record)
            for row in list(compare_decoding(numbers, **options, on_step=advance)):
                record.add(row)
    _show(decode_grids(record.content))
    _finish(record, draw_decode)
    if goals:
        _show_goals(DECODE_GOALS, record)


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
    json: Annotated[Path | None, typer.Option(help="Record the numbers here.")] = None,
) -> None:
    """How near LLN in all its forms, and other linear attention, is to a model's softmax attention, untrained."""
    from lln.bench.forms import Comparison
    from lln.bench.record import Record
    from lln.bench.tables import forms_grids

    other = None if calibration is None else _read_text("calibration", calibration)
    setting: dict[str, Any] = {"length": length, "sequences": sequences, "block_size": block_size}
    comparison = Comparison(model, _read_text("text", text), calibration=other, loss=loss, seed=seed, **setting)
    setting |= {"model": Path(model).name, "layers": len(comparison.layers), "notes": comparison.notes}
    record = Record(json, command=_command(context), setting=setting, seed=seed, fresh=True)
    with _progress("forms", comparison.steps) as advance:
        for row in comparison.run(advance):
            record.add(row)
    _show(forms_grids(record.content))
    if json is not None:
        console.print(f"Written: {json}")


@app.command("spine")
def spine(
    context: typer.Context,
    parts: Annotated[str | None, typer.Option(help="What to compare, separated by commas; by default all.")] = None,
    lengths: Lengths = None,
    before: Annotated[Path | None, typer.Option(help="A checkout of an earlier commit, to compare calls with.")] = None,
    model: Annotated[Path | None, typer.Option(help="The folder of a causal language model, for generate.")] = None,
    seconds: Annotated[float, typer.Option(help="Measure each comparison about this long.")] = 4.0,
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Record the numbers here.")] = None,
) -> None:
    """Ratios: calls, forms, windows, packed sequences, states and generation, each against what it stands beside."""
    from lln.bench.attention import kernel_in_use
    from lln.bench.candidates import Setting
    from lln.bench.record import Record
    from lln.bench.spine import LENGTHS, PARTS, compare_spine, number_of_rows

    names = PARTS if parts is None else tuple(parts.split(","))
    numbers = _numbers("--lengths", lengths, LENGTHS)
    command = _command(context)
    for place in (before, model):  # where they are on this machine tells others nothing
        command = command if place is None else command.replace(str(place), place.name)
    setting = {"parts": names, "lengths": numbers, "seconds": seconds}
    record = Record(json, command=command, setting=setting, seed=seed, kernel=kernel_in_use(Setting()), fresh=True)
    total = number_of_rows(names, numbers, before=before is not None, model=model is not None)
    folder = None if model is None else str(model)
    rows = compare_spine(names, numbers, before=before, model=folder, seconds=seconds, seed=seed)
    _measure(record, rows, total=total, label="spine")
    header = ("part", "case", "tokens", "ms", "other, ms", "ratio", "goal")
    _print_table("Ratios", header, [_spine_line(row) for row in record.rows])
    if json is not None:
        console.print(f"Written: {json}")


def _spine_line(row: Row) -> Sequence[str | Text]:
    times = (f"{row[name]:.3g}" for name in ("milliseconds", "other_milliseconds"))
    if "goal" in row:
        is_met, goal = row["ratio"] <= row["goal"], f"{row['goal']:.3g}"
    else:
        is_met, goal = (
            row["least"] <= row["goal_milliseconds"],
            f"{row['goal_milliseconds']} ms (least {row['least']:.3g})",
        )
    ratio = f"{row['ratio']:.3g}"
    return row["part"], row["case"], f"{row['tokens']:,}", *times, ratio, Text(goal, "green" if is_met else "red")


def _read_text(option: str, path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"--{option} must be a text file, there is none at {path}")
    return path.read_text(encoding="utf-8", errors="replace")


def _decode_model(folder: str, lengths: str | None, seconds: float, seed: int) -> None:
    from lln.bench.generation import CONTEXTS, compare_generation

    numbers = _numbers("--lengths", lengths, CONTEXTS)
    with _progress("decode", 2 * len(numbers)) as advance:
        rows = list(compare_generation(folder, numbers, seconds=seconds, seed=seed, on_step=advance))
    lines = [
        (
            f"{row['tokens']:,}",
            row["mechanism"],
            f"{row['milliseconds']:.2f}",
            " to ".join(f"{x:.2f}" for x in row["quartiles"]),
            f"{row['ratio']:.2f}",
        )
        for row in rows
    ]
    header = ("context", "attention", "ms a token", "quartiles", "of softmax")
    _print_table(f"One more token, {folder}", header, lines)


def _measure(record: "Record", rows: Iterable[Row], *, total: int, label: str) -> None:
    """Put rows into the record as they come."""
    if len(record.rows) >= total:
        console.print(f"{record.path} already has all of this; --fresh measures it anew.")
        return
    _warn_of_noise(record)
    with _progress(label, total) as advance:
        for _ in record.rows:
            advance()
        for row in rows:
            record.add(row)
            advance()


def _drop_incomplete(record: "Record", names: Sequence[str], cell: tuple[str, ...]) -> None:
    """Keep only lengths of which all mechanisms were measured, because they are measured side by side."""
    found: dict[tuple[Any, ...], set[str]] = {}
    for row in record.rows:
        found.setdefault(tuple(row[key] for key in cell), set()).add(row["mechanism"])
    record.drop([row for row in record.rows if not found[tuple(row[key] for key in cell)] >= set(names)])


def _warn_of_noise(record: "Record") -> None:
    if not record.noise["quiet"]:
        console.print(
            f"Others keep {record.noise['busy_processors']:g} processors busy (load average "
            f"{record.noise['load_average']:g}): times will be too long, and ratios uncertain.",
            style="yellow",
            soft_wrap=False,
        )


def _show(grids: Iterable["Grid"]) -> None:
    for grid in grids:
        _print_table(grid.title, grid.columns, grid.rows)
        for note in grid.notes:
            console.print(f"  {note}", soft_wrap=False)


def _show_goals(goals: Sequence["Goal"], record: "Record") -> None:
    from lln.bench.goals import check, grid_of

    header, *rows = grid_of(check(goals, record.content))
    colors = {"met": "green", "missed": "red"}
    _print_table("Goals", header, [(text, value, Text(word, colors.get(word, ""))) for text, value, word in rows])


def _print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(header):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _finish(record: "Record", draw: Callable[[dict[str, Any], Path], tuple[Path, ...]]) -> None:
    if record.path is not None:
        record.write()
        paths = (record.path, *draw(record.content, record.path))
        console.print("Written: " + ", ".join(str(path) for path in paths))


def _numbers(option: str, text: str | None, default: Sequence[int]) -> list[int]:
    if text is None:
        return list(default)
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{option} takes positive numbers separated by commas, got {text!r}")
    return numbers


def _command(context: typer.Context) -> str:
    """What was asked for, as another would type it: all options that are not as by default, but where to write."""
    words = ["lln", "bench", context.info_name or ""]
    for option in context.command.params:
        value = context.params[option.name or ""]
        if option.name in ("out", "json", "fresh", "goals") or value == option.default:
            continue
        if option.param_type_name == "argument":
            words.append(str(value))
            continue
        words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return " ".join(words)


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; hands out the function that moves it one step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)
