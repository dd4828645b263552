"""What matters in LLN+Diag when a small RoBERTa is pre-trained: one change at a time, the same budget for all."""

from pathlib import Path

from lln.report.recorded import origin, read_run
from lln.report.tables import Table

ROWS = {
    "softmax": "softmax",
    "blocks": "blocks of 64 alone, no LLN",
    "average": "LLN+Diag: average, variance matching, blocks of 64",
    "entropy": "... entropy matching",
    "block32": "... blocks of 32",
    "alpha2": "... alpha = beta = 2 instead of matching",
    "alpha1": "... alpha = beta = 1 instead of matching",
    "scale": "... learned scales, 0.5 at first",
    "learned": "... a learned share of LLN, 0.1 at first",
}


def make(results: Path) -> Table:
    runs = {name: read_run(results, f"ablation-{name}", made_by="ablation") for name in ROWS}
    base = runs["softmax"].summary["eval_loss"]
    rows = [
        [title, f"{runs[name].summary['eval_loss']:.3f}", f"{runs[name].summary['eval_loss'] / base - 1:+.1%}"]
        for name, title in ROWS.items()
    ]
    config, summary = runs["softmax"].config, runs["softmax"].summary
    budget = (
        f"Validation loss of masked language modelling after {summary['steps']:,} steps ({summary['tokens']:,} tokens "
        f"of {config['source']}), {config['layers']} layers of width {config['width']}, {config['heads']} heads."
    )
    return Table("Ablation of LLN+Diag", ["", "loss", "against softmax"], rows, (budget, origin(*runs.values())))
