"""Figure 10: accuracy of a ViT with LLN attention over fixed alpha = beta, and the inverse loss scale in float16."""

from pathlib import Path
from typing import TYPE_CHECKING

from lln.paper.jobs import SHORT_HALF, Job, vision
from lln.report.plot import BLACK, BLUE, ORANGE, VERMILLION, Row, column, panels
from lln.results import chosen_results, machines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATCHED = "matching"
COLORS = (ORANGE, VERMILLION, BLUE)
# alpha = beta around the values that matching finds (figure 9).
FIXED_SCALES = ("0.5", "1", "2", "4")
HALF_SCALES = ("2", "4")
SWEEP = ("--epochs", "2")  # of one attention, compared with itself


def jobs() -> list[Job]:
    fixed = {scale: ("--option", f"alpha={scale}", "--option", f"beta={scale}") for scale in FIXED_SCALES}
    return [
        vision("lln", "lln", *SWEEP),
        *(vision(f"lln-{scale}", "lln", *SWEEP, *fixed[scale]) for scale in FIXED_SCALES),
        vision("fp16-lln", "lln", *SHORT_HALF),
        *(vision(f"fp16-lln-{scale}", "lln", *SHORT_HALF, *fixed[scale]) for scale in HALF_SCALES),
    ]


JOBS = jobs()


def read(results: Path) -> tuple[list[Row], str]:
    found = chosen_results(results / "figure10.jsonl", [job.name for job in JOBS], made_by="lln reproduce figure10")
    runs = {scale: found[f"vision-lln-{scale}"] for scale in FIXED_SCALES} | {MATCHED: found["vision-lln"]}
    half = {scale: found[f"vision-fp16-lln-{scale}"] for scale in HALF_SCALES} | {MATCHED: found["vision-fp16-lln"]}
    rows: list[Row] = [
        {"scale": scale, "quantity": "accuracy", "step": run.summary["steps"], "value": run.summary["eval_accuracy"]}
        for scale, run in runs.items()
    ]
    for scale, run in half.items():
        rows += [
            {"scale": scale, "quantity": "loss_scale", "step": step, "value": value}
            for step, value in zip(*run.curve("loss_scale"), strict=True)
        ]
    return rows, machines(found.values())


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
