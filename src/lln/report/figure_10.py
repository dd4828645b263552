"""Figure 10: accuracy of a ViT with LLN attention over fixed alpha = beta, and the inverse loss scale in float16."""

from pathlib import Path
from typing import TYPE_CHECKING

from lln.report.plot import BLACK, BLUE, ORANGE, VERMILLION, Row, column, panels
from lln.report.recorded import origin, read_run
from lln.tasks.reproduce import FIXED_SCALES, HALF_SCALES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATCHED = "matching"
COLORS = (ORANGE, VERMILLION, BLUE)


def read(results: Path) -> tuple[list[Row], str]:
    runs = {scale: read_run(results, f"vision-lln-{scale}", made_by="figure10") for scale in FIXED_SCALES}
    runs[MATCHED] = read_run(results, "vision-lln", made_by="figure10")
    half = {scale: read_run(results, f"vision-fp16-lln-{scale}", made_by="figure10") for scale in HALF_SCALES}
    half[MATCHED] = read_run(results, "vision-fp16-lln", made_by="figure10")
    rows: list[Row] = [
        {"scale": scale, "quantity": "accuracy", "step": run.summary["steps"], "value": run.summary["eval_accuracy"]}
        for scale, run in runs.items()
    ]
    for scale, run in half.items():
        rows += [
            {"scale": scale, "quantity": "loss_scale", "step": step, "value": value}
            for step, value in zip(*run.curve("loss_scale"), strict=True)
        ]
    return rows, origin(*runs.values(), *half.values())


def draw(rows: list[Row], footer: str) -> "Figure":
    title = "A ViT with LLN attention: fixed alpha = beta against moment matching"
    figure, (left, right) = panels(footer, title, 2, size=(11.0, 4.2))
    (matched,) = column(rows, "value", quantity="accuracy", scale=MATCHED)
    left.axhline(100 * matched, color=BLUE, linestyle="--", label="moment matching")
    accuracy = [100 * column(rows, "value", quantity="accuracy", scale=scale)[0] for scale in FIXED_SCALES]
    left.plot([float(scale) for scale in FIXED_SCALES], accuracy, color=BLACK, marker="o", label="fixed")
    left.set(xlabel="alpha = beta", ylabel="accuracy [%]", title="(a) accuracy on Dogs vs Cats")
    left.legend()
    for scale, color in zip((*HALF_SCALES, MATCHED), COLORS, strict=True):
        chosen = {"quantity": "loss_scale", "scale": scale}
        inverse = [1 / value for value in column(rows, "value", **chosen)]
        label = "moment matching" if scale == MATCHED else f"alpha = beta = {scale}"
        right.plot(column(rows, "step", **chosen), inverse, color=color, drawstyle="steps-post", label=label)
    right.set(xlabel="step", ylabel="1 / loss scale", yscale="log", title="(b) inverse loss scale, float16 autocast")
    right.legend()
    return figure
