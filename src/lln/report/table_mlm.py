"""GLUE after pre-training from a random start with each attention, the published row of table 1 beside ours."""

from pathlib import Path
from statistics import fmean

from lln.report.recorded import Run, is_finished, origin, read_run, title_of
from lln.report.table_1 import OF_THE_PAPER, PUBLISHED, TITLES, Published
from lln.report.tables import Table

TASKS = {task: TITLES[task] for task in OF_THE_PAPER}
ROWS: dict[str, Published] = PUBLISHED | {"lln_diag_learned": (None, None, None, None, None)}


def make(results: Path) -> Table:
    softmax = read_run(results, "mlm-softmax", made_by="mlm")
    rows, used = [], [softmax]
    for name, published in ROWS.items():
        cells: list[str] = []
        if is_finished(results, f"mlm-{name}"):
            pretrained = read_run(results, f"mlm-{name}", made_by="mlm")
            accuracies = [_accuracies(results, task, name) for task in TASKS]
            used += [pretrained, *(run for runs in accuracies for run in runs)]
            means = [fmean(100 * run.summary["eval_accuracy"] for run in runs) if runs else None for runs in accuracies]
            average = fmean(m for m in means if m is not None) if all(m is not None for m in means) else None
            seeds = max(map(len, accuracies))
            cells = [f"{pretrained.summary['eval_loss']:.3f}", *map(_number, (*means, average)), str(seeds or "-")]
        else:
            cells = ["-"] * 7
        rows.append([title_of(name), *map(_number, published), *cells])
    config = softmax.config
    budget = (
        f"Ours, the same budget for every row: pre-training of {config['layers']} layers of width {config['width']} "
        f"with {config['heads']} heads on {softmax.summary['tokens']:,} tokens in {softmax.summary['steps']:,} steps "
        f"({config['source']}, length {config['length']}, batch {config['batch_size']}), then fine-tuning "
        f"{_fine_tuning(results)}; accuracy on the validation part, mean over seeds. The published models are "
        "RoBERTa-base on WikiText-103, so that rows may be compared within ours and within theirs, not across."
    )
    columns = ["", *(f"{task} (paper)" for task in TASKS.values()), "avg (paper)"]
    columns += ["MLM loss", *TASKS.values(), "avg", "seeds"]
    return Table("GLUE accuracy [%] after pre-training from a random start", columns, rows, (budget, origin(*used)))


def _accuracies(results: Path, task: str, attention: str) -> list[Run]:
    names = (f"glue-{task}-{attention}-seed{seed}" for seed in (0, 1))
    return [read_run(results, name, made_by="mlm") for name in names if is_finished(results, name)]


def _fine_tuning(results: Path) -> str:
    """The budget of fine-tuning, from the runs' own settings."""
    parts = []
    for task, title in TASKS.items():
        for run in _accuracies(results, task, "softmax")[:1]:
            parts.append(f"{title} {run.summary['steps']} steps of {run.config['batch_size']}")
    return ", ".join(parts) or "not done yet"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
