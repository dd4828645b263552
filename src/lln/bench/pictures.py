"""Records as log-log pictures: PNG, SVG and CSV beside the JSON that they are made from."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.bench import candidates, decode
from lln.bench.attention import PASSES
from lln.report import plot
from lln.report.plot import GREY, Look, panels, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


def draw_attention(record: Mapping[str, Any], path: Path) -> tuple[Path, Path, Path]:
    """Times of each pass and peak memory of the last one, in files named as `path` with other endings."""
    rows: Sequence[Row] = record["rows"]
    setting = record["setting"]
    passes = [pass_ for pass_ in PASSES if any(row["pass"] == pass_ for row in rows)]
    names = dict.fromkeys(row["mechanism"] for row in rows)
    looks = {name: candidates.LOOKS.get(name, Look(name, GREY, "--")) for name in names}
    kind = f"{setting['dtype']}{', causal' if setting['causal'] else ''}"
    about = f"B = 1, H = {setting['heads']}, D = {setting['head_dim']}, {kind}"
    with style():
        figure, axes = panels(
            footer(record, about), "Attention over the number of tokens", len(passes) + 1, size=(13.0, 4.6)
        )
        for panel, pass_ in zip(axes, passes, strict=False):
            chosen = [row for row in rows if row["pass"] == pass_]
            draw_curves(panel, chosen, looks, "milliseconds", ylabel="time [ms]")
            panel.set_title(pass_)
        chosen = [row for row in rows if row["pass"] == passes[-1]]
        draw_curves(axes[-1], chosen, looks, "peak_bytes", ylabel="peak memory beyond the inputs [MiB]", unit=2**20)
        axes[-1].set_title(passes[-1])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        columns = ("pass", "tokens", "mechanism", "milliseconds", "predicted_milliseconds", "peak_bytes", "extra_bytes")
        return save(figure, flat(rows, columns), path.parent, path.stem)


def draw_decode(record: Mapping[str, Any], path: Path) -> tuple[Path, Path, Path]:
    rows: Sequence[Row] = record["rows"]
    about = f"B = 1, H = {record['setting']['heads']}, D = {record['setting']['head_dim']}, float32"
    with style():
        figure, axes = panels(footer(record, about), "One more token after a context", 2, size=(10.5, 4.4))
        draw_curves(axes[0], rows, decode.LOOKS, "milliseconds", ylabel="time of a step [ms]")
        draw_curves(axes[1], rows, decode.LOOKS, "total_bytes", ylabel="memory held and used [MiB]", unit=2**20)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        columns = ("tokens", "mechanism", "milliseconds", "held_bytes", "step_bytes")
        return save(figure, flat(rows, columns), path.parent, path.stem)


def draw_curves(
    axes: "Axes", rows: Sequence[Row], looks: Mapping[str, Look], quantity: str, *, ylabel: str, unit: float = 1.0
) -> None:
    """A curve for each mechanism; what was predicted is a hollow mark."""
    for name, look in looks.items():
        mine = [row for row in rows if row["mechanism"] == name]
        points = [(row["tokens"], row[quantity] / unit) for row in mine if row.get(quantity)]
        guesses = [
            (row["tokens"], row[f"predicted_{quantity}"] / unit) for row in mine if f"predicted_{quantity}" in row
        ]
        look.plot(axes, [n for n, _ in points], [y for _, y in points])
        axes.plot(
            [n for n, _ in guesses],
            [y for _, y in guesses],
            color=look.color,
            linestyle="",
            marker="o",
            fillstyle="none",
        )
    axes.set(xlabel="tokens", ylabel=ylabel, xscale="log")
    if any(len(line.get_xdata()) for line in axes.lines):  # type: ignore[arg-type]
        axes.set_yscale("log")
    lengths = sorted({row["tokens"] for row in rows})
    ticks = [n for n in lengths if n & (n - 1) == 0 and n.bit_length() % 2] or lengths
    axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axes.minorticks_off()


def footer(record: Mapping[str, Any], about: str) -> str:
    machine = f"{record['machine']['processor']}, {record['threads']} threads"
    commit = f"  ·  commit {record['commit']}" if record["commit"] else ""
    return f"{about}  ·  {machine}  ·  {record['command']}{commit}"


def flat(rows: Sequence[Row], columns: Sequence[str]) -> list[plot.Row]:
    """Rows with the same columns each, empty where one has none."""
    value: Callable[[Row, str], Any] = lambda row, column: "" if row.get(column) is None else row[column]  # noqa: E731
    return [{column: value(row, column) for column in columns} for row in rows]
