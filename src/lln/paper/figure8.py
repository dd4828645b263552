"""Figure 8: the loss while a RoBERTa is pre-trained, and the inverse loss scale of training in float16."""

from pathlib import Path
from typing import TYPE_CHECKING

from lln.paper.jobs import ATTENTIONS, SHORT_HALF, Job
from lln.report.plot import BLACK, BLUE, PURPLE, VERMILLION, Row, column, panels
from lln.results import chosen_results, machines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    "softmax": ("softmax", BLACK),
    "lln": ("LLN", BLUE),
    "lln_diag": ("LLN+Diag", PURPLE),
    "lln_diag_learned": ("LLN+Diag, learned share", VERMILLION),
}
HALF = ("softmax", "lln_diag")
JOBS = [Job(f"fp16-{name}", ("mlm", "--attention", *ATTENTIONS[name], *SHORT_HALF), method=name) for name in HALF]


def read(results: Path) -> tuple[list[Row], str]:
    names, half_names = [f"mlm-{name}" for name in STYLES], [job.name for job in JOBS]
    whole = chosen_results(results / "mlm.jsonl", names, made_by="lln reproduce mlm")
    part = chosen_results(results / "figure8.jsonl", half_names, made_by="lln reproduce figure8")
    runs, half = dict(zip(STYLES, whole.values(), strict=True)), dict(zip(HALF, part.values(), strict=True))
    rows: list[Row] = []
    for group, quantities in ((runs, ("loss", "eval_loss")), (half, ("loss_scale",))):
        for name, run in group.items():
            for quantity in quantities:
                rows += [
                    {"attention": name, "quantity": quantity, "step": step, "value": value}
                    for step, value in zip(*run.curve(quantity), strict=True)
                ]
    return rows, machines([*runs.values(), *half.values()])


def draw(rows: list[Row], footer: str) -> "Figure":
    figure, (left, right) = panels(footer, "Pre-training of RoBERTa", 2, size=(11.0, 4.2))
    for name, (label, color) in STYLES.items():
        for quantity, line, part in (("loss", ":", "training"), ("eval_loss", "-", "validation")):
            chosen = {"attention": name, "quantity": quantity}
            marker = "o" if quantity == "eval_loss" else ""
            left.plot(
                column(rows, "step", **chosen),
                column(rows, "value", **chosen),
                color=color,
                linestyle=line,
                marker=marker,
                label=f"{label}, {part}",
            )
    for name in HALF:
        label, color = STYLES[name]
        chosen = {"attention": name, "quantity": "loss_scale"}
        inverse = [1 / value for value in column(rows, "value", **chosen)]
        right.plot(column(rows, "step", **chosen), inverse, color=color, drawstyle="steps-post", label=label)
    left.set(xlabel="step", ylabel="masked language modelling loss [nats]", title="(a) loss")
    right.set(xlabel="step", ylabel="1 / loss scale", yscale="log", title="(b) inverse loss scale, float16 autocast")
    left.legend()
    right.legend()
    return figure
