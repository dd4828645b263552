"""Measured times and memory as log-log pictures: PNG, SVG and CSV."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.report import plot
from lln.report.plot import CurveStyle, panels, save, style
from lln.report.speed import credible
from lln.report.speed_styles import DECODE_STYLES, attention_style
from lln.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_attention(result: Result, folder: Path) -> tuple[Path, Path, Path]:
    """Times of each pass and peak memory of the last one, in files of the folder that are named as the run."""
    rows, setting = credible(result.rows), result.settings
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    names = dict.fromkeys(row["mechanism"] for row in rows)
    styles = {name: attention_style(name) for name in names}
    kind = f"{setting['dtype']}{', causal' if setting['causal'] else ''}"
    about = f"B = 1, H = {setting['heads']}, D = {setting['head_dim']}, {kind}"
    with style():
        figure, axes = panels(
            footer(result, about), "Attention over the number of tokens", len(passes) + 1, size=(13.0, 4.6)
        )
        for panel, pass_ in zip(axes, passes, strict=False):
            chosen = [row for row in rows if row["pass"] == pass_]
            draw_curves(panel, chosen, styles, "milliseconds", ylabel="time [ms]")
            panel.set_title(pass_)
        chosen = [row for row in rows if row["pass"] == passes[-1]]
        draw_curves(axes[-1], chosen, styles, "peak_bytes", ylabel="peak memory beyond the inputs [MiB]", unit=2**20)
        axes[-1].set_title(passes[-1])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        columns = ("pass", "tokens", "mechanism", "milliseconds", "predicted_milliseconds", "peak_bytes", "extra_bytes")
        return save(figure, flat(rows, columns), folder, result.run)


def draw_decode(result: Result, folder: Path) -> tuple[Path, Path, Path]:
    """Time and memory of one more token, in files of the folder that are named as the run."""
    rows = result.rows
    about = f"B = 1, H = {result.settings['heads']}, D = {result.settings['head_dim']}, float32"
    with style():
        figure, axes = panels(footer(result, about), "One more token after a context", 2, size=(10.5, 4.4))
        draw_curves(axes[0], rows, DECODE_STYLES, "milliseconds", ylabel="time of a step [ms]")
        draw_curves(axes[1], rows, DECODE_STYLES, "total_bytes", ylabel="memory held and used [MiB]", unit=2**20)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        columns = ("tokens", "mechanism", "milliseconds", "held_bytes", "step_bytes")
        return save(figure, flat(rows, columns), folder, result.run)


def draw_curves(
    axes: "Axes",
    rows: Sequence[Row],
    styles: Mapping[str, CurveStyle],
    quantity: str,
    *,
    ylabel: str,
    unit: float = 1.0,
) -> None:
    """A curve for each mechanism; what was predicted is a hollow mark."""
    for name, curve in styles.items():
        mine = [row for row in rows if row["mechanism"] == name]
        points = [(row["tokens"], row[quantity] / unit) for row in mine if row.get(quantity)]
        predictions = [
            (row["tokens"], row[f"predicted_{quantity}"] / unit) for row in mine if f"predicted_{quantity}" in row
        ]
        curve.plot(axes, [n for n, _ in points], [y for _, y in points])
        axes.plot(
            [n for n, _ in predictions],
            [y for _, y in predictions],
            color=curve.color,
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


def footer(result: Result, about: str) -> str:
    origin = result.origin
    machine = f"{origin['machine']['processor']}, {origin['threads']} threads"
    commit = f"  ·  commit {origin['commit']}" if origin["commit"] else ""
    return f"{about}  ·  {machine}  ·  {origin['command']}{commit}"


def flat(rows: Sequence[Row], columns: Sequence[str]) -> list[plot.Row]:
    """Rows with the same columns each, empty where one has none."""
    value: Callable[[Row, str], Any] = lambda row, column: "" if row.get(column) is None else row[column]  # noqa: E731
    return [{column: value(row, column) for column in columns} for row in rows]
