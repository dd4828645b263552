"""Table 1: GLUE after a fine-tuned model was made linear by each method, the published row beside ours.

Read from RESULTS/table1.jsonl, a line for each run that `lln reproduce table1` finished.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lln.report.table import Table
from lln.results import read_results
from lln.zoo import describe

TITLES = {
    "mnli": "MNLI",
    "qnli": "QNLI",
    "qqp": "QQP",
    "sst2": "SST-2",
    "cola": "CoLA",
    "mrpc": "MRPC",
    "rte": "RTE",
    "stsb": "STS-B",
    "imdb": "IMDB",
}
OF_THE_PAPER = ("mnli", "qnli", "qqp", "sst2")
EIGHT = tuple(TITLES)[:8]
METRIC = {"cola": "matthews", "mrpc": "f1", "stsb": "spearman"}  # accuracy of the others, as in the paper's sources

# Accuracy in per cent, MNLI, QNLI, QQP, SST-2 and their mean, as printed; None where the paper has a dash.
Published = tuple[float | None, float | None, float | None, float | None, float | None]
PUBLISHED: dict[str, Published] = {
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
}
NOTHING: Published = (None, None, None, None, None)
# The rows: what is published of the method, if anything, and its title where that is not the mechanism's.
ROWS: dict[str, tuple[Published, str]] = {name: (published, "") for name, published in PUBLISHED.items()} | {
    "lln_ours": (NOTHING, "LLN Attention, decomposed, 256 features (ours)"),
    "lln_diag_ours": (NOTHING, "LLN+Diag Attention, decomposed, gate (ours)"),
    "hedgehog": (NOTHING, ""),
}
Line = dict[str, Any]


def make(results: Path, file: str = "table1") -> Table:
    lines = _read(results, file)
    rows = []
    for method, (published, title) in ROWS.items():
        cells = [_cell(_values(lines, method, task)) for task in TITLES]
        shares = [_percent(_share(lines, method, tasks)) for tasks in (OF_THE_PAPER, EIGHT)]
        rows.append([title or describe(method).title, *map(_number, published), *cells, *shares])
    columns = ["", *(f"{TITLES[task]} (paper)" for task in OF_THE_PAPER), "avg (paper)", *TITLES.values()]
    columns += ["of softmax, 4 tasks", "of softmax, 8 tasks"]
    notes = _notes(lines) if lines else ["Nothing is recorded yet: `lln reproduce table1` writes table1.jsonl."]
    return Table("Table 1: GLUE [%]", columns, rows, notes)


def share_of_softmax(results: Path, method: str) -> float | None:
    """The sum over eight tasks as a share of softmax attention's; None where a task is not recorded."""
    return _share(_read(results), method, EIGHT)


def origin(results: Path) -> str:
    """Machines, commits and seeds of the runs."""
    return _origin(_read(results))


def read_lines(path: Path) -> list[Line]:
    """What was recorded of each run: where it comes from, its settings and its summary in one; none without a file."""
    if not path.exists():
        return []
    found = read_results(path, made_by="lln reproduce table1").values()
    return [{**x.origin, **x.settings, **x.summary} for x in found]


def _read(results: Path, file: str = "table1") -> list[Line]:
    return read_lines(results / f"{file}.jsonl")


def _values(lines: Sequence[Line], method: str, task: str, metrics: str = "metrics") -> list[float]:
    """In per cent, one for each seed."""
    metric = METRIC.get(task, "accuracy")
    return [100 * x[metrics][metric] for x in lines if (x["method"], x["task"]) == (method, task)]


def _cell(values: Sequence[float]) -> str:
    if len(values) < 2:
        return _number(values[0] if values else None)
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"


def _share(lines: Sequence[Line], method: str, tasks: Sequence[str]) -> float | None:
    """The sum over the tasks as a share of that of the models it was made from; None where a task is missing."""
    found = [_values(lines, method, task) for task in tasks]
    if not all(found):
        return None
    if method == "softmax":
        return 1.0
    began = [_values(lines, method, task, "softmax") for task in tasks]
    return sum(map(fmean, found)) / sum(map(fmean, began))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _notes(lines: Sequence[Line]) -> list[str]:
    linear = [line for line in lines if "linearize" in line]
    first = f"Ours: {_listed(lines, 'model')}, fine-tuned with softmax attention ({_budgets(lines)})"
    if linear:
        steps, tokens = (sorted({count(line["linearize"]) for line in linear}) for count in (_steps, _tokens))
        first += (
            f", then made linear by each method in {_counts(steps)} steps ({_counts(tokens)} tokens) on the examples "
            "that it was fine-tuned on, without their labels. Each method has the better of two schedules, all steps "
            "in alignment, or half of them in distillation, by what is kept of the predictions on held-out training "
            "examples of QNLI. A mechanism with nothing to align has all steps in distillation, with a rate of 3e-4 "
            "or 1e-4. Shares are of the scores of the very models that were made linear"
        )
    return [
        first + ".",
        "Accuracy on the validation examples; CoLA: Matthews correlation, MRPC: F1, STS-B: Spearman's correlation. "
        "Mean ± standard deviation over seeds where there are several. The published models are RoBERTa-base "
        "pre-trained with each attention, and fine-tuned on all examples.",
        _origin(lines),
    ]


def _budgets(lines: Sequence[Line]) -> str:
    found = {
        x["task"]: f"{TITLES[x['task']]} {x['train_examples']:,} examples, {x['steps']} steps"
        for x in lines
        if "steps" in x
    }
    return "; ".join(found[task] for task in TITLES if task in found)


def _steps(linearize: dict[str, Any]) -> int:
    return sum(value for name, value in linearize.items() if name.endswith("_steps"))


def _tokens(linearize: dict[str, Any]) -> int:
    return int(linearize["tokens"])


def _counts(values: Sequence[int]) -> str:
    return " or ".join(f"{value:,}" for value in values)


def _listed(lines: Sequence[Line], name: str) -> str:
    return ", ".join(sorted({str(line[name]) for line in lines}))


def _origin(lines: Sequence[Line]) -> str:
    machines = sorted(
        {f"{x['threads']} of {x['machine']['cores']} cores of {x['machine']['processor']}" for x in lines}
    )
    return f"{', '.join(machines)} for each run, commit {_listed(lines, 'commit')}, seeds {_listed(lines, 'seed')}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
