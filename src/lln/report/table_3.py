"""Table 3: accuracy of a ViT on Dogs vs Cats, the published row beside ours."""

from pathlib import Path

from lln.report.recorded import origin, read_run, title_of
from lln.report.tables import Table

PUBLISHED = {"softmax": "81.37", "lln_diag": "81.72", "lln_diag_learned": "-", "linformer": "79.89"}


def make(results: Path) -> Table:
    runs = {name: read_run(results, f"vision-{name}", made_by="table3") for name in PUBLISHED}
    rows = [
        [
            title_of(name),
            PUBLISHED[name],
            f"{100 * run.summary['eval_accuracy']:.2f}",
            f"{run.summary['eval_loss']:.3f}",
        ]
        for name, run in runs.items()
    ]
    config, summary = runs["softmax"].config, runs["softmax"].summary
    budget = (
        f"Ours, the same budget for every row: {config['layers']} layers of width {config['width']}, images of "
        f"{config['image_size']} x {config['image_size']} in patches of {config['patch_size']}, {summary['steps']:,} "
        f"steps of {config['batch_size']}. Published: 12 layers of width 128, 100 epochs."
    )
    columns = ["", "accuracy [%] (paper)", "accuracy [%]", "loss"]
    return Table("Table 3: ViT on Dogs vs Cats", columns, rows, (budget, origin(*runs.values())))
