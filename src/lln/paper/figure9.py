"""Figure 9: the alpha and beta that moment matching finds in each layer while a ViT is trained on Dogs vs Cats."""

from pathlib import Path
from typing import TYPE_CHECKING

from lln.report.plot import Row, column, palette, panels
from lln.results import chosen_results, machines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = (2.0, 2.2)  # the range in the paper's figure, for a wider and deeper ViT


def read(results: Path) -> tuple[list[Row], str]:
    runs = chosen_results(results / "table3.jsonl", ["vision-lln_diag"], made_by="lln reproduce table3")
    run = runs["vision-lln_diag"]
    rows: list[Row] = []
    for quantity in ("alpha", "beta"):
        for layer, (steps, values) in enumerate(run.layers(quantity).values(), start=1):
            rows += [
                {"quantity": quantity, "layer": layer, "step": step, "value": value}
                for step, value in zip(steps, values, strict=True)
            ]
    return rows, machines([run])


def draw(rows: list[Row], footer: str) -> "Figure":
    title = "alpha and beta while training a ViT with LLN+Diag (mean over heads)"
    figure, axes = panels(footer, title, 2, size=(10.5, 4.2))
    layers = sorted({int(row["layer"]) for row in rows})
    for panel, quantity in zip(axes, ("alpha", "beta"), strict=True):
        panel.axhspan(*PUBLISHED, color="#eeeeee", label="range in the paper")
        for layer, color in zip(layers, palette(len(layers)), strict=True):
            x, y = (column(rows, name, quantity=quantity, layer=layer) for name in ("step", "value"))
            panel.plot(x, y, color=color, label=f"layer {layer}")
        panel.set(xlabel="step", ylabel=quantity)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure
