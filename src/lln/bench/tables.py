"""Records as tables: mechanisms down, lengths across. The terminal and the documentation show the same ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lln.bench import candidates, decode
from lln.bench.attention import PASSES
from lln.bench.forms import COMPANIONS, column
from lln.report.tables import Table

Row = dict[str, Any]

# What times are put in relation to, and whether a ratio is that of speeds (or else of times).
REFERENCES = {"softmax": True, "paper": True, "floor": False}
MEMORY_OF_PASS = {
    PASSES[0]: ("peak_bytes", "peak memory beyond the inputs (MiB)"),
    PASSES[1]: ("extra_bytes", "peak memory beyond inputs, output and gradients (MiB)"),
}


def attention_grids(record: Mapping[str, Any]) -> list[Table]:
    """For each pass: times, their ratios to softmax, to the paper's formula and to the matrix products, and memory."""
    rows: Sequence[Row] = record["rows"]
    origins: dict[str, str] = record["setting"].get("origins", {})
    grids = []
    for pass_ in dict.fromkeys(row["pass"] for row in rows):
        chosen = [row for row in rows if row["pass"] == pass_]
        reasons = _reasons(chosen, candidates.label)
        named = [f"{candidates.label(name)}: {where}" for name, where in origins.items() if not where.startswith("lln")]
        title = f"{pass_}: median time (ms) ± half the distance of the quartiles; ~ predicted"
        grids.append(pivot(title, chosen, candidates.label, _time, notes=(*reasons, *named)))
        for reference, speeds in REFERENCES.items():
            times = {row["tokens"]: row["milliseconds"] for row in chosen if _is_measured(row, reference)}
            if times:
                what = "times as fast as" if speeds else "time as a multiple of"
                title = f"{pass_}: {what} {candidates.label(reference)}"
                grids.append(pivot(title, chosen, candidates.label, _ratio_to(times, speeds=speeds)))
        quantity, words = MEMORY_OF_PASS[pass_]
        grids.append(pivot(f"{pass_}: {words}", chosen, candidates.label, _mebibytes(quantity)))
    return grids


def decode_grids(record: Mapping[str, Any]) -> list[Table]:
    rows: Sequence[Row] = record["rows"]

    def name(mechanism: str) -> str:
        return decode.LOOKS[mechanism].label

    return [
        pivot("time of one more token (ms) ± half the distance of the quartiles, over the context", rows, name, _time),
        pivot("memory held between tokens (MiB)", rows, name, _mebibytes("held_bytes")),
        pivot("peak memory of a step beyond that (MiB)", rows, name, _mebibytes("step_bytes")),
    ]


def forms_grids(record: Mapping[str, Any]) -> list[Table]:
    """The tables of a record: how near the attention is to softmax attention, and the loss if it was measured."""
    rows, setting = record["rows"], record["setting"]
    about = f"{setting['model']}, {setting['sequences']} x {setting['length']} tokens, {setting['layers']} layers"
    companions = f"softmax attention in blocks, and in a window, of {setting['block_size']} tokens"
    columns = {column("error", near): "error" if near is None else f"+{near}" for near in COMPANIONS}
    columns |= {"correlation": "correlation", "divergence": "divergence", "entropy": "entropy"}
    notes = [
        f"error: of the outputs, 1 = uniform attention; +blocks, +window: of the average with {companions}; "
        "correlation: of ln P with softmax's; divergence and entropy in bits. Means of layers and sequences.",
        *setting["notes"],
    ]
    grids = [_forms_grid(f"Attention: {about}", rows, columns, notes)]
    if "loss" in rows[0]:
        columns = {column("loss", near): "loss" if near is None else f"+{near}" for near in COMPANIONS}
        grids.append(
            _forms_grid(
                f"Loss of the whole model: {about}",
                rows,
                columns,
                ["Of the next token, in nats, without any training."],
            )
        )
    return grids


def pivot(
    title: str,
    rows: Sequence[Row],
    label: Callable[[str], str],
    cell: Callable[[Row], str],
    *,
    notes: tuple[str, ...] = (),
) -> Table:
    lengths = sorted({row["tokens"] for row in rows})
    cells = {(row["mechanism"], row["tokens"]): cell(row) for row in rows}
    names = dict.fromkeys(row["mechanism"] for row in rows)
    body = [[label(name), *(cells.get((name, tokens), "") for tokens in lengths)] for name in names]
    return Table(title, ["tokens", *(f"{tokens:,}" for tokens in lengths)], body, notes)


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _time(row: Row) -> str:
    if "milliseconds" in row:
        low, high = row["quartiles"]
        return f"{short(row['milliseconds'])} ±{(high - low) / 2 / row['milliseconds']:.0%}"
    return f"~{short(row['predicted_milliseconds'])}" if "predicted_milliseconds" in row else "-"


def _ratio_to(times: Mapping[int, float], *, speeds: bool) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if "milliseconds" not in row or row["tokens"] not in times:
            return "-"
        ratio = row["milliseconds"] / times[row["tokens"]]
        return short(1 / ratio if speeds else ratio)

    return cell


def _mebibytes(quantity: str) -> Callable[[Row], str]:
    return lambda row: short(row[quantity] / 2**20) if row.get(quantity) is not None else "-"


def _is_measured(row: Row, mechanism: str) -> bool:
    return row["mechanism"] == mechanism and "milliseconds" in row


def _reasons(rows: Sequence[Row], label: Callable[[str], str]) -> list[str]:
    """What was left out and why, the same reason once."""
    lengths: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if "skipped" in row:
            lengths.setdefault((row["mechanism"], row["skipped"]), []).append(row["tokens"])
    return [
        f"{label(name)} left out at {', '.join(f'{n:,}' for n in found)} tokens: {reason}"
        for (name, reason), found in lengths.items()
    ]


def _forms_grid(title: str, rows: Sequence[Row], columns: Mapping[str, str], notes: list[str]) -> Table:
    body = [[row["label"], *(f"{row[name]:.2f}" for name in columns)] for row in rows]
    return Table(title, ["", *columns.values()], body, notes)
