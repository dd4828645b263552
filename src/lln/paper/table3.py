"""Table 3: accuracy of a ViT on Dogs vs Cats, the published row beside ours."""

from pathlib import Path

from lln.paper.jobs import ATTENTIONS, title_of, vision
from lln.report.table import Table
from lln.results import chosen_results, machines

PUBLISHED = {"softmax": "81.37", "lln_diag": "81.72", "lln_diag_learned": "-", "linformer": "79.89"}
IMAGE = ("softmax", "lln_diag_learned", "lln_diag", "linformer")
JOBS = [vision(name, *ATTENTIONS[name]) for name in IMAGE]


def make(results: Path, file: str = "table3") -> Table:
    names = [f"vision-{name}" for name in PUBLISHED]
    found = chosen_results(results / f"{file}.jsonl", names, made_by="lln reproduce table3")
    runs = dict(zip(PUBLISHED, found.values(), strict=True))
    rows = [
        [
            title_of(name),
            PUBLISHED[name],
            f"{100 * run.summary['eval_accuracy']:.2f}",
            f"{run.summary['eval_loss']:.3f}",
        ]
        for name, run in runs.items()
    ]
    config, summary = runs["softmax"].settings, runs["softmax"].summary
    note = (
        f"Ours, the same budget for every row: {config['layers']} layers of width {config['width']}, images of "
        f"{config['image_size']} x {config['image_size']} in patches of {config['patch_size']}, {summary['steps']:,} "
        f"steps of {config['batch_size']}. Published: 12 layers of width 128, 100 epochs."
    )
    columns = ["", "accuracy [%] (paper)", "accuracy [%]", "loss"]
    return Table("Table 3: ViT on Dogs vs Cats", columns, rows, (note, machines(runs.values())))
