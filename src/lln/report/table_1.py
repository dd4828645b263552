"""Table 1: accuracy on GLUE after pre-training with each attention, the published row beside ours."""

from pathlib import Path
from statistics import fmean

from lln.report.recorded import Run, is_finished, origin, read_run, title_of
from lln.report.tables import Table

TASKS = {"mnli": "MNLI", "qnli": "QNLI", "qqp": "QQP", "sst2": "SST-2"}
# Accuracy in per cent, in the order of TASKS, as printed; None where the paper has a dash.
PUBLISHED: dict[str, tuple[float | None, float | None, float | None, float | None, float | None]] = {
    "softmax": (80.3, 87.2, 89.9, 90.6, 87.0),
    "reformer": (35.4, None, 63.2, 50.9, 49.8),
    "performer": (58.8, 63.4, 79.1, 81.4, 70.6),
    "elu": (74.8, 82.5, 86.9, 87.2, 82.8),
    "longformer": (77.2, None, 85.5, 88.6, 83.7),
    "transformer_ls": (77.0, 84.8, 86.8, 90.2, 84.7),
    "tnn": (76.72, 85.06, 88.3, 90.6, 85.17),
    "transnormer_t2": (77.28, 85.39, 88.56, 90.71, 85.48),
    "cosformer": (76.7, None, 89.2, 91.0, 85.6),
    "transnormer_t1": (79.06, 87.0, 88.61, 91.17, 86.46),
    "flash": (79.45, 87.1, 88.83, 90.71, 86.52),
    "nystrom": (80.9, 88.7, 86.3, 91.4, 86.8),
    "lln": (77.0, 85.1, 88.9, 90.6, 85.4),
    "lln_diag": (80.0, 86.5, 89.7, 91.6, 86.9),
    "lln_diag_learned": (None, None, None, None, None),
}


def make(results: Path) -> Table:
    softmax = read_run(results, "mlm-softmax", made_by="table1")
    rows, used = [], [softmax]
    for name, published in PUBLISHED.items():
        cells: list[str] = []
        if is_finished(results, f"mlm-{name}"):
            pretrained = read_run(results, f"mlm-{name}", made_by="table1")
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
    return Table("Table 1: GLUE accuracy [%]", columns, rows, (budget, origin(*used)))


def _accuracies(results: Path, task: str, attention: str) -> list[Run]:
    names = (f"glue-{task}-{attention}-seed{seed}" for seed in (0, 1))
    return [read_run(results, name, made_by="table1") for name in names if is_finished(results, name)]


def _fine_tuning(results: Path) -> str:
    """The budget of fine-tuning, from the runs' own settings."""
    parts = []
    for task, title in TASKS.items():
        for run in _accuracies(results, task, "softmax")[:1]:
            parts.append(f"{title} {run.summary['steps']} steps of {run.config['batch_size']}")
    return ", ".join(parts) or "not done yet"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
