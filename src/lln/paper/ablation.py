"""What matters in LLN+Diag when a small RoBERTa is pre-trained: one change at a time, the same steps for all."""

from pathlib import Path

from lln.paper.jobs import AVERAGE, LEARNED_SHARE, Job
from lln.report.table import Table
from lln.results import chosen_results, machines

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
ATTENTIONS = {
    "softmax": ("softmax",),
    "blocks": ("block_diagonal",),
    "average": AVERAGE,
    "entropy": (*AVERAGE, "--option", "matching=entropy"),
    "block32": (*AVERAGE, "--option", "block_size=32"),
    "alpha1": (*AVERAGE, "--option", "alpha=1", "--option", "beta=1"),
    "alpha2": (*AVERAGE, "--option", "alpha=2", "--option", "beta=2"),
    "scale": ("lln_diag", "--option", "combine=scale"),
    "learned": LEARNED_SHARE,
}
# Two thirds of the steps of the preset.
JOBS = [
    Job(f"ablation-{name}", ("mlm", "--steps", "2000", "--attention", *arguments), method=name)
    for name, arguments in ATTENTIONS.items()
]


def make(results: Path, file: str = "ablation") -> Table:
    names = [f"ablation-{name}" for name in ROWS]
    found = chosen_results(results / f"{file}.jsonl", names, made_by="lln reproduce ablation")
    runs = dict(zip(ROWS, found.values(), strict=True))
    base = runs["softmax"].summary["eval_loss"]
    rows = [
        [title, f"{runs[name].summary['eval_loss']:.3f}", f"{runs[name].summary['eval_loss'] / base - 1:+.1%}"]
        for name, title in ROWS.items()
    ]
    config, summary = runs["softmax"].settings, runs["softmax"].summary
    note = (
        f"Validation loss of masked language modelling after {summary['steps']:,} steps ({summary['tokens']:,} tokens "
        f"of {config['source']}), {config['layers']} layers of width {config['width']}, {config['heads']} heads."
    )
    return Table("Ablation of LLN+Diag", ["", "loss", "against softmax"], rows, (note, machines(runs.values())))
