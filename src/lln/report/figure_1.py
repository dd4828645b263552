"""Figure 1: temperature, entropy and spectral gap of every layer while a RoBERTa with one head a layer is trained."""

from pathlib import Path
from typing import TYPE_CHECKING

from lln.report.plot import BLACK, Row, palette, panels
from lln.report.recorded import origin, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTENTIONS = {"softmax": "-", "lln": "--"}
QUANTITIES = {"temperature": "temperature", "entropy": "entropy [bits]", "gap": "spectral gap"}


def read(results: Path) -> tuple[list[Row], str]:
    runs = {name: read_run(results, f"one-head-{name}", made_by="figure1") for name in ATTENTIONS}
    rows: list[Row] = []
    for name, run in runs.items():
        for quantity in QUANTITIES:
            for layer, (steps, values) in enumerate(run.layers(quantity).values(), start=1):
                rows += [
                    {"attention": name, "quantity": quantity, "layer": layer, "step": step, "value": value}
                    for step, value in zip(steps, values, strict=True)
                ]
    return rows, origin(*runs.values())


def draw(rows: list[Row], footer: str) -> "Figure":
    title = "Concentration while training: one head a layer"
    figure, axes = panels(footer, title, len(QUANTITIES), size=(12.4, 4.2))
    layers = sorted({int(row["layer"]) for row in rows})
    for panel, (quantity, label) in zip(axes, QUANTITIES.items(), strict=True):
        for layer, color in zip(layers, palette(len(layers)), strict=True):
            for name, line in ATTENTIONS.items():
                chosen = [r for r in rows if (r["quantity"], r["layer"], r["attention"]) == (quantity, layer, name)]
                x, y = [float(row["step"]) for row in chosen], [float(row["value"]) for row in chosen]
                panel.plot(x, y, color=color, linestyle=line)
        panel.set(xlabel="training step", ylabel=label)
    axes[0].set_yscale("log")
    for layer, color in zip(layers, palette(len(layers)), strict=True):
        axes[0].plot([], [], color=color, label=f"layer {layer}")
    for name, line in ATTENTIONS.items():
        axes[0].plot([], [], color=BLACK, linestyle=line, label={"softmax": "softmax", "lln": "LLN"}[name])
    figure.legend(loc="outside right center")
    return figure
