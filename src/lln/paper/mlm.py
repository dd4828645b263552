"""GLUE after pre-training from a random start with each attention, the published row of table 1 beside ours."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from lln.paper.jobs import ATTENTIONS, VARIANTS, Job, title_of
from lln.paper.table1 import OF_THE_PAPER, PUBLISHED, TITLES, Published
from lln.report.table import Table
from lln.results import Result, chosen_results, machines, read_results

MADE_BY = "lln reproduce mlm"
TASKS = {task: TITLES[task] for task in OF_THE_PAPER}
ROWS: dict[str, Published] = PUBLISHED | dict.fromkeys(VARIANTS, (None, None, None, None, None))
PRETRAINED = ("softmax", *VARIANTS, "lln_diag", "lln", "elu", "performer", "nystrom", "cosformer")
SECOND_SEED = ("softmax", "lln_diag_learned")


def jobs() -> list[Job]:
    """Pre-training with each attention, then fine-tuning."""
    pretraining = [Job(f"mlm-{name}", ("mlm", "--attention", *ATTENTIONS[name]), method=name) for name in PRETRAINED]
    cells = [
        (name, seed, task) for name in PRETRAINED for seed in (0, 1)[: 1 + (name in SECOND_SEED)] for task in TASKS
    ]
    return pretraining + [
        Job(
            f"glue-{task}-{name}-seed{seed}",
            ("glue", "--task", task, "--seed", str(seed)),
            after=f"mlm-{name}",
            method=name,
            task=task,
            seed=seed,
        )
        for name, seed, task in cells
    ]


JOBS = jobs()


def make(results: Path, file: str = "mlm") -> Table:
    path = results / f"{file}.jsonl"
    softmax = chosen_results(path, ["mlm-softmax"], made_by=MADE_BY)["mlm-softmax"]
    runs = read_results(path, made_by=MADE_BY)
    rows, used = [], [softmax]
    for name, published in ROWS.items():
        cells = ["-"] * 7
        if (pretrained := runs.get(f"mlm-{name}")) is not None:
            fine_tuned = [_fine_tuned(runs, task, name) for task in TASKS]
            used += [pretrained, *(run for seeds in fine_tuned for run in seeds)]
            means = [fmean(100 * x.summary["eval_accuracy"] for x in seeds) if seeds else None for seeds in fine_tuned]
            average = fmean(m for m in means if m is not None) if all(m is not None for m in means) else None
            seeds = max(map(len, fine_tuned))
            cells = [f"{pretrained.summary['eval_loss']:.3f}", *map(_number, (*means, average)), str(seeds or "-")]
        rows.append([title_of(name), *map(_number, published), *cells])
    config = softmax.settings
    steps = [
        f"{title} {run.summary['steps']} steps of {run.settings['batch_size']}"
        for task, title in TASKS.items()
        for run in _fine_tuned(runs, task, "softmax")[:1]
    ]
    note = (
        f"Ours, the same budget for every row: pre-training of {config['layers']} layers of width {config['width']} "
        f"with {config['heads']} heads on {softmax.summary['tokens']:,} tokens in {softmax.summary['steps']:,} steps "
        f"({config['source']}, length {config['length']}, batch {config['batch_size']}), then fine-tuning "
        f"{', '.join(steps) or 'not done yet'}; accuracy on the validation part, mean over seeds. The published models "
        "are RoBERTa-base on WikiText-103, so that rows may be compared within ours and within theirs, not across."
    )
    columns = ["", *(f"{task} (paper)" for task in TASKS.values()), "avg (paper)"]
    columns += ["MLM loss", *TASKS.values(), "avg", "seeds"]
    return Table("GLUE accuracy [%] after pre-training from a random start", columns, rows, (note, machines(used)))


def _fine_tuned(runs: Mapping[str, Result], task: str, attention: str) -> list[Result]:
    names = (f"glue-{task}-{attention}-seed{seed}" for seed in (0, 1))
    return [runs[name] for name in names if name in runs]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
