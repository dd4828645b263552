"""Table 2 of the paper: time and memory of a training step of RoBERTa-base, the published numbers beside ours.

The published ones are of one A100 with 40 GB, ours of the machine that the record names: columns compare, not cells.
"""

from collections.abc import Mapping
from pathlib import Path

from lln.report.plot import panels, save, style
from lln.report.speed import credible, short
from lln.report.speed_pictures import draw_curves, flat, footer
from lln.report.speed_styles import MODEL_STYLES
from lln.report.table import Table
from lln.results import Result, Row, chosen_results

MADE_BY = "lln bench model --out results/table2.jsonl"
RUN = "model"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # of the paper
# Over `LENGTHS`; None is "out of memory". Softmax attention there has explicit matrices.
PUBLISHED_SECONDS: dict[str, tuple[float | None, ...]] = {
    "eager": (0.95, 1.05, 2.4, 6.8, None, None),
    "nystrom": (1.8, 1.9, 2.6, 4.7, 8.8, 16.7),
    "lln": (1.0, 1.05, 1.6, 3.2, 6.1, 11.8),
    "lln_diag": (1.2, 1.3, 1.9, 3.6, 6.9, 13.3),
}
PUBLISHED_GIGABYTES: dict[str, tuple[float | None, ...]] = {
    "eager": (4.0, 5.5, 12.6, 32.1, None, None),
    "nystrom": (4.0, 4.5, 5.5, 7.3, 11.6, 19.1),
    "lln": (4.1, 4.4, 5.7, 7.5, 12.0, 20.1),
    "lln_diag": (4.1, 4.6, 6.1, 8.1, 13.4, 23.0),
}
PARTS = {
    "seconds": ("Time of a training step (s)", PUBLISHED_SECONDS, 1.0),
    "peak_bytes": ("Peak memory (GB)", PUBLISHED_GIGABYTES, 1e9),
}


def read(results: Path, file: str = "table2") -> Result:
    return chosen_results(results / f"{file}.jsonl", [RUN], made_by=MADE_BY)[RUN]


def make(results: Path, file: str = "table2") -> Table:
    result = read(results, file)
    time, memory = parts(result)
    rows = [
        [f"{attention}, {quantity}", *rest]
        for quantity, part in zip(("time [s]", "memory [GB]"), (time, memory), strict=True)
        for attention, *rest in part.rows
    ]
    title = "Table 2: a training step of RoBERTa-base, batch 1, over the number of tokens; ~ predicted"
    return Table(title, ["", *time.columns[1:]], rows, (*memory.notes, f"commit {result.origin['commit']}"))


def parts(result: Result) -> list[Table]:
    """Time and memory; the published rows show only lengths that the paper has."""
    rows = credible(result.rows)
    lengths = sorted({row["tokens"] for row in rows})
    cells = {(row["mechanism"], row["tokens"]): row for row in rows}
    tables = []
    for quantity, (title, published, unit) in PARTS.items():
        body = []
        for name, curve in MODEL_STYLES.items():
            if any((name, tokens) in cells for tokens in lengths):
                ours = [_cell(cells.get((name, tokens)), quantity, unit) for tokens in lengths]
                body.append([curve.label, "here", *ours])
            if name in published:
                theirs = dict(zip(LENGTHS, published[name], strict=True))
                body.append([curve.label, "published", *(_published(theirs, tokens) for tokens in lengths)])
        tables.append(
            Table(
                f"{title}; ~ predicted", ["attention", "", *(f"{n:,}" for n in lengths)], body, _notes(result, quantity)
            )
        )
    return tables


def draw(result: Result, folder: Path) -> tuple[Path, Path, Path]:
    """Time and memory, ours as in all pictures and the published ones thin, in files of the folder."""
    rows = credible(result.rows)
    with style():
        title = "A training step of RoBERTa-base, batch 1 (thin: published, on an A100)"
        figure, axes = panels(footer(result, "float32"), title, 2, size=(11.5, 4.6))
        for panel, (quantity, (label, published, unit)) in zip(axes, PARTS.items(), strict=True):
            draw_curves(panel, rows, MODEL_STYLES, quantity, ylabel=label, unit=unit)
            for name, values in published.items():
                points = [(n, y) for n, y in zip(LENGTHS, values, strict=True) if y is not None]
                panel.plot(
                    [n for n, _ in points], [y for _, y in points], color=MODEL_STYLES[name].color, lw=0.7, ls="-"
                )
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        columns = (
            "tokens",
            "mechanism",
            "seconds",
            "predicted_seconds",
            "peak_bytes",
            "predicted_peak_bytes",
            "skipped",
        )
        return save(figure, flat(rows, columns), folder, "table2" if result.run == RUN else f"table2-{result.run}")


def _cell(row: Row | None, quantity: str, unit: float) -> str:
    if row is None:
        return ""
    if quantity in row:
        return short(row[quantity] / unit)
    prediction = row.get(f"predicted_{quantity}")
    return "-" if prediction is None else f"~{short(prediction / unit)}"


def _published(values: Mapping[int, float | None], tokens: int) -> str:
    if tokens not in values:
        return ""
    value = values[tokens]
    return "OOM" if value is None else f"{value:g}"


def _notes(result: Result, quantity: str) -> tuple[str, ...]:
    if quantity != "peak_bytes":
        return ()
    reasons = [
        f"{MODEL_STYLES[row['mechanism']].label} left out at {row['tokens']:,} tokens: {row['skipped']}"
        for row in result.rows
        if "skipped" in row
    ]
    machine = f"{result.origin['machine']['processor']}, {result.origin['threads']} threads"
    where = f"here: {machine}, float32; published: A100, 40 GB"
    return (where, *reasons)
