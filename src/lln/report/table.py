"""A table of text, as Markdown and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lln.report.plot import DPI, style

INCHES_A_LETTER, INCHES_A_LINE = 0.085, 0.27


@dataclass(frozen=True)
class Table:
    """A table as text: the first column names, the others hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()  # what it was measured with; a paragraph each

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---"] + ["---:"] * (len(self.columns) - 1))]
        return "\n".join([*lines, *map(_line, self.rows), *(f"\n{note}" for note in self.notes)]) + "\n"

    def picture(self, path: Path) -> None:
        from matplotlib.figure import Figure
        from matplotlib.transforms import Bbox

        widths = [max(map(len, cells)) + 2 for cells in zip(self.columns, *self.rows, strict=True)]
        notes = [line for note in self.notes for line in _wrapped(note, max(60, sum(widths)))]
        width, height = max(60, sum(widths)) * INCHES_A_LETTER, (len(self.rows) + len(notes) + 2.5) * INCHES_A_LINE
        with style():
            figure = Figure(figsize=(width, height))
            figure.text(0.01, 1 - 0.6 * INCHES_A_LINE / height, self.title, fontsize=11, fontweight="bold", va="center")
            axes = figure.add_axes((0, 0, 1, 1), frameon=False)
            axes.axis("off")
            below = len(notes) * INCHES_A_LINE / height
            drawn = axes.table(
                [list(row) for row in self.rows],
                colLabels=list(self.columns),
                colWidths=[part / sum(widths) for part in widths],
                bbox=Bbox.from_bounds(0.01, below + 0.01, 0.98, 0.99 - below - 1.2 * INCHES_A_LINE / height),
                edges="horizontal",
            )
            drawn.auto_set_font_size(False)
            drawn.set_fontsize(9)
            for (row, column), cell in drawn.get_celld().items():
                cell.set_edgecolor("#bbbbbb")
                cell.set_text_props(ha="left" if column == 0 else "right", fontweight="bold" if row == 0 else "normal")
            for number, note in enumerate(reversed(notes)):
                figure.text(
                    0.01, (number + 0.5) * INCHES_A_LINE / height, note, fontsize=7.5, color="#555555", va="center"
                )
            figure.savefig(path, dpi=DPI)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _wrapped(text: str, width: int) -> list[str]:
    from textwrap import wrap

    return wrap(text, int(width * 1.2))
