"""What all figures share: Gaussian inputs, a style for all, a footer, and files that can be compared.

matplotlib is imported when a picture is made, and its global state (settings, backend, pyplot) stays as it was.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, float | int | str]

# Okabe and Ito's palette, distinguishable with any kind of colour blindness; yellow is too light for lines.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"

DPI = 110
FOOTER_HEIGHT = 0.045  # of the picture's height
STYLE: dict[Any, Any] = {  # matplotlib types its keys as one long Literal
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
    "svg.hashsalt": "lln",  # or else the ids in an SVG are random
}


@dataclass(frozen=True)
class Setup:
    """What a figure is made for; `commit` is that of this library's checkout, if it runs from one."""

    name: str
    head_dim: int
    tokens: int
    seed: int
    commit: str | None

    def footer(self, about: str = "Gaussian queries and keys") -> str:
        made = f"lln show {self.name} --head-dim {self.head_dim} --tokens {self.tokens} --seed {self.seed}"
        return f"{about}, N = {self.tokens}, D = {self.head_dim}, seed {self.seed}  ·  {made}" + (
            f"  ·  commit {self.commit}" if self.commit else ""
        )


@dataclass(frozen=True)
class CurveStyle:
    """How one curve is drawn; no two curves of a picture share both colour and line style."""

    label: str
    color: str
    line: str = "-"
    marker: str = ""

    def plot(self, axes: "Axes", x: Sequence[float], y: Sequence[float]) -> None:
        axes.plot(x, y, color=self.color, linestyle=self.line, marker=self.marker, label=self.label)


def gaussian_inputs(setup: Setup, draw: int = 0) -> tuple[Tensor, Tensor]:
    """Standard Gaussian query and key (1, 1, N, D) in float64; each draw has a seed of its own."""
    generator = torch.Generator().manual_seed(setup.seed * 1000 + draw)
    shape = (1, 1, setup.tokens, setup.head_dim)
    query = torch.randn(shape, generator=generator, dtype=torch.float64)
    return query, torch.randn(shape, generator=generator, dtype=torch.float64)


def palette(count: int) -> list[Any]:
    """Colours of an ordered series, dark to light; the lightest, which do not show on white, are left out."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(1, count - 1)) for i in range(count)]


def column(rows: Sequence[Row], name: str, **where: float | str) -> list[float]:
    """The numbers of a column, of the rows where other columns have the given values."""
    return [float(row[name]) for row in rows if all(row[key] == value for key, value in where.items())]


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults and `STYLE`, whatever the user's own settings are; they are put back."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('figures need matplotlib: pip install "lln-attention[cli]"') from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def panels(
    footer: str,
    title: str,
    count: int,
    *,
    size: tuple[float, float],
    rows: int = 1,
) -> tuple["Figure", list["Axes"]]:
    """An empty picture with `count` panels in some rows, a title, and a footer on what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, count // rows, squeeze=False)
    engine = figure.get_layout_engine()
    assert engine is not None
    # The base class does not declare what the constrained layout takes: space for the footer and between the panels.
    engine.set(rect=(0.0, FOOTER_HEIGHT, 1.0, 1.0 - FOOTER_HEIGHT), w_pad=0.09)  # type: ignore[call-arg]
    figure.suptitle(title, fontsize=11.5, fontweight="bold")
    figure.text(0.008, 0.012, footer, fontsize=7.0, color="#555555", ha="left", va="bottom")
    return figure, list(grid.flat)


def save(figure: "Figure", rows: Sequence[Row], directory: Path, stem: str) -> tuple[Path, Path, Path]:
    """Write PNG, SVG and CSV; the same rows give the same bytes."""
    png, svg, table = (directory / f"{stem}.{ending}" for ending in ("png", "svg", "csv"))
    save_png(figure, png)
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    table.write_text(csv_text(rows), encoding="utf-8", newline="")
    return png, svg, table


def save_png(figure: "Figure", path: Path) -> Path:
    """Write a picture of 256 colours, which is a third of the size."""
    from PIL import Image  # matplotlib needs it, too

    # The layout's solver differs in the last digit from run to run, which an SVG's ids are hashes of.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position((round(left, 4), round(bottom, 4), round(width, 4), round(height, 4)))
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=DPI)
    Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def csv_text(rows: Sequence[Row]) -> str:
    """Rows with the same columns as CSV."""
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _text(value) for key, value in row.items()} for row in rows)
    return file.getvalue()


def _text(value: float | int | str) -> str:
    return format(value, ".10g") if isinstance(value, float) else str(value)
