"""Measured times and memory as tables, mechanisms down and lengths across: of the terminal and the documentation."""

import math
from collections.abc import Callable, Mapping, Sequence

from lln.report.speed_styles import DECODE_STYLES, attention_label
from lln.report.table import Table
from lln.results import Result, Row

# What times are put in relation to, and whether a ratio is that of speeds (or else of times).
REFERENCES = {"softmax": True, "paper": True, "floor": False}
MEMORY_OF_PASS = {
    "forward": ("peak_bytes", "peak memory beyond the inputs (MiB)"),
    "forward+backward": ("extra_bytes", "peak memory beyond inputs, output and gradients (MiB)"),
}
COMPANIONS = {"": "", "_blocks": "+blocks", "_window": "+window"}  # of the columns of `lln bench forms`


def credible(rows: Sequence[Row]) -> list[Row]:
    """Rows without predictions that a shorter input of the same mechanism contradicts, because it took longer."""
    kept = []
    for row in rows:
        shorter = [x for x in rows if x["tokens"] < row["tokens"] and _kind(x) == _kind(row)]
        wrong = {
            f"predicted_{quantity}"
            for quantity in ("milliseconds", "seconds", "peak_bytes")
            if any(x.get(quantity, 0.0) > row.get(f"predicted_{quantity}", math.inf) for x in shorter)
        }
        kept.append({key: value for key, value in row.items() if key not in wrong})
    return kept


def _kind(row: Row) -> tuple[str, str]:
    return row["mechanism"], row.get("pass", "")


def attention_tables(result: Result) -> list[Table]:
    """For each pass: times, their ratios to softmax, to the paper's formula and to the matrix products, and memory."""
    rows = credible(result.rows)
    origins: dict[str, str] = result.settings.get("origins", {})
    tables = []
    for pass_ in dict.fromkeys(row["pass"] for row in rows):
        chosen = [row for row in rows if row["pass"] == pass_]
        reasons = _reasons(chosen, attention_label)
        named = [f"{attention_label(name)}: {where}" for name, where in origins.items() if not where.startswith("lln")]
        title = f"{pass_}: median time (ms) ± half the distance of the quartiles; ~ predicted"
        tables.append(pivot(title, chosen, attention_label, _time, notes=(*reasons, *named)))
        for reference, speeds in REFERENCES.items():
            times = {row["tokens"]: row["milliseconds"] for row in chosen if _is_measured(row, reference)}
            if times:
                what = "times as fast as" if speeds else "time as a multiple of"
                title = f"{pass_}: {what} {attention_label(reference)}"
                tables.append(pivot(title, chosen, attention_label, _ratio_to(times, speeds=speeds)))
        quantity, title = MEMORY_OF_PASS[pass_]
        tables.append(pivot(f"{pass_}: {title}", chosen, attention_label, _mebibytes(quantity)))
    return tables


def decode_tables(result: Result) -> list[Table]:
    rows = result.rows

    def name(mechanism: str) -> str:
        return DECODE_STYLES[mechanism].label

    return [
        pivot("time of one more token (ms) ± half the distance of the quartiles, over the context", rows, name, _time),
        pivot("memory held between tokens (MiB)", rows, name, _mebibytes("held_bytes")),
        pivot("peak memory of a step beyond that (MiB)", rows, name, _mebibytes("step_bytes")),
    ]


def ratio_tables(result: Result) -> list[Table]:
    """Times beside those of what they are compared with, and whether a goal is met."""
    columns = ["part", "case", "tokens", "ms", "other, ms", "ratio", "goal", "met"]
    return [Table("Ratios of median times, measured in turns", columns, [_ratio_line(row) for row in result.rows])]


def _ratio_line(row: Row) -> list[str]:
    times = (f"{row[name]:.3g}" for name in ("milliseconds", "other_milliseconds"))
    if "goal" in row:
        is_met, goal = row["ratio"] <= row["goal"], f"{row['goal']:.3g}"
    else:  # a time, judged by the least of many
        is_met = row["least"] <= row["goal_milliseconds"]
        goal = f"{row['goal_milliseconds']} ms (least {row['least']:.3g})"
    met = "yes" if is_met else "no"
    return [row["part"], row["case"], f"{row['tokens']:,}", *times, f"{row['ratio']:.3g}", goal, met]


def forms_tables(result: Result) -> list[Table]:
    """How near the attention is to softmax attention, and the loss if it was measured."""
    rows, setting = result.rows, result.settings
    about = f"{setting['model']}, {setting['sequences']} x {setting['length']} tokens, {setting['layers']} layers"
    companions = f"softmax attention in blocks, and in a window, of {setting['block_size']} tokens"
    columns = {f"error{near}": title or "error" for near, title in COMPANIONS.items()}
    columns |= {"correlation": "correlation", "divergence": "divergence", "entropy": "entropy"}
    notes = [
        f"error: of the outputs, 1 = uniform attention; +blocks, +window: of the average with {companions}; "
        "correlation: of ln P with softmax's; divergence and entropy in bits. Means of layers and sequences.",
        *setting["notes"],
    ]
    tables = [_forms_table(f"Attention: {about}", rows, columns, notes)]
    if "loss" in rows[0]:
        columns = {f"loss{near}": title or "loss" for near, title in COMPANIONS.items()}
        tables.append(
            _forms_table(
                f"Loss of the whole model: {about}",
                rows,
                columns,
                ["Of the next token, in nats, without any training."],
            )
        )
    return tables


def lra_tables(result: Result) -> list[Table]:
    """Time and memory of training steps, a row for each task and method; ratios are to the first method."""
    body = [
        [
            f"{row['task']}, {row['method']}",
            f"{row['batch']} x {row['length']:,}",
            f"{row['milliseconds']:.0f}",
            f"{row['time_ratio']:.2f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['memory_ratio']:.2f}",
        ]
        for row in result.rows
    ]
    return [Table("A training step", ["task, method", "tokens", "ms", "less by", "MiB", "less by"], body)]


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


def _forms_table(title: str, rows: Sequence[Row], columns: Mapping[str, str], notes: list[str]) -> Table:
    body = [[row["label"], *(f"{row[name]:.2f}" for name in columns)] for row in rows]
    return Table(title, ["", *columns.values()], body, notes)
