"""Figure 1: temperature, entropy, gap and bias of every layer while a RoBERTa with one head a layer is trained.

The paper shows softmax attention and its own form of LLN; the other forms are ours.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from lln.paper.jobs import Job
from lln.report.plot import BLACK, BLUE, GREEN, VERMILLION, CurveStyle, Row, panels
from lln.results import chosen_results, machines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    "softmax": CurveStyle("softmax", BLACK, "-"),
    "lln": CurveStyle("LLN", VERMILLION, "--"),
    "lln_unbiased": CurveStyle("LLN, unbiased", BLUE, "-"),
    "lln_decomposed": CurveStyle("LLN, decomposed", GREEN, "-."),
}
QUANTITIES = {"temperature": "temperature", "entropy": "entropy [bits]", "gap": "spectral gap", "bias": "bias [bits]"}


# One head a layer, and all forms of LLN.
ATTENTIONS = {
    "softmax": ("softmax",),
    "lln": ("lln",),
    "lln_unbiased": ("lln", "--option", "form=unbiased"),
    "lln_decomposed": ("lln", "--option", "form=decomposed"),
}
JOBS = [
    Job(
        f"one-head-{name}",
        ("mlm", "--attention", *arguments, "--heads", "1", "--record-every", "10", "--steps", "600"),
        method=name,
    )
    for name, arguments in ATTENTIONS.items()
]


def read(results: Path) -> tuple[list[Row], str]:
    names = {f"one-head-{name}": name for name in STYLES}
    runs = chosen_results(results / "figure1.jsonl", names, made_by="lln reproduce figure1")
    rows: list[Row] = []
    for name, run in zip(names.values(), runs.values(), strict=True):
        for quantity in QUANTITIES:
            for layer, (steps, values) in enumerate(run.layers(quantity).values(), start=1):
                rows += [
                    {"attention": name, "quantity": quantity, "layer": layer, "step": step, "value": value}
                    for step, value in zip(steps, values, strict=True)
                ]
    return rows, machines(runs.values())


def draw(rows: list[Row], footer: str) -> "Figure":
    layers = sorted({int(row["layer"]) for row in rows})
    title = "Concentration while training: one head a layer"
    size = (13.6, 0.9 + 2.6 * len(layers))
    figure, axes = panels(footer, title, len(QUANTITIES) * len(layers), size=size, rows=len(layers))
    places = [(layer, quantity) for layer in layers for quantity in QUANTITIES]
    for panel, (layer, quantity) in zip(axes, places, strict=True):
        for name, curve in STYLES.items():
            chosen = [r for r in rows if (r["quantity"], r["layer"], r["attention"]) == (quantity, layer, name)]
            curve.plot(panel, [float(row["step"]) for row in chosen], [float(row["value"]) for row in chosen])
        panel.set(title=f"layer {layer}", ylabel=QUANTITIES[quantity])
        if quantity == "temperature":
            panel.set_yscale("log")
        if layer == layers[-1]:
            panel.set_xlabel("training step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure
