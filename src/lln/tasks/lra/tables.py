"""The paper's tables 4 (what training costs) and 5 (accuracy): the published numbers beside ours.

Both read what was recorded: `lra-cost.json` by `lln lra bench --out`, `lra.json` by `lln lra run` in the folder of its
runs.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from lln.provenance import read_json
from lln.report.tables import Table
from lln.tasks.lra.examples import TASKS
from lln.tasks.lra.model import OPTIONS
from lln.tasks.lra.recipe import LraConfig
from lln.tasks.lra.runner import RESULTS

COSTS = "lra-cost.json"
OURS = "lln_diag"
TITLES = {
    "softmax_explicit": "Softmax (explicit)",
    "softmax": "Softmax",
    "reformer": "Reformer",
    "performer": "Performer",
    "skyformer": "Skyformer",
    "nystrom": "Nyströmformer",
    "lln": "LLN",
    "lln_diag": "LLN + Diag",
}
# Table 4: seconds and MB of training on one GPU, in the order of TASKS. The paper's softmax holds the whole matrix.
PUBLISHED_SECONDS = {
    "softmax_explicit": (21468, 5905, 21866, 6754, 13228),
    "reformer": (4610, 2439, 4714, 4694, 8737),
    "performer": (3456, 1966, 3761, 3553, 13169),
    "skyformer": (4523, 2970, 5602, 5240, 9347),
    "lln_diag": (3043, 1774, 3135, 3042, 4053),
}
PUBLISHED_MEGABYTES = {
    "softmax_explicit": (17108, 4458, 8934, 4817, 9632),
    "reformer": (3261, 1631, 3008, 3258, 6514),
    "performer": (2176, 1122, 2178, 2180, 4353),
    "skyformer": (3068, 1697, 2974, 4041, 8079),
    "lln_diag": (1641, 821, 1586, 1639, 3276),
}
# Table 5: accuracy in per cent.
PUBLISHED_ACCURACY = {
    "softmax": (60.41, 38.05, 79.95, 71.3, 37.2),
    "reformer": (61.27, 37.05, 78.74, 67.23, 44.04),
    "performer": (57.85, 37.8, 80.5, 62.58, 37.56),
    "skyformer": (60.88, 39.36, 81.54, 70.23, 32.64),
    "lln_diag": (60.72, 38.91, 81.21, 69.81, 38.65),
}
MISSING = "-"
# Settings that runs of a task need not have in common.
_FREE = {"attention", "options", "seed", "log_every", "eval_every", "save_every", "keep_checkpoints", "record_every"}


def table_4(results: Path) -> Table:
    """Time and memory of training, as multiples of LLN + Diag's."""
    recorded = _read(results, COSTS, "lln lra bench", dict)
    cost = {(row["task"], row["method"]): row for row in recorded["rows"]}
    rows = []
    for quantity, published, key in (
        ("time", PUBLISHED_SECONDS, "milliseconds"),
        ("memory", PUBLISHED_MEGABYTES, "peak_bytes"),
    ):
        for method, title in TITLES.items():
            cells = []
            for number, task in enumerate(TASKS):
                theirs = published[method][number] / published[OURS][number] if method in published else None
                row, base = cost.get((task, method)), cost.get((task, OURS))
                ours = row[key] / base[key] if row and base else None
                cells.append(f"{_number(theirs)} / {_number(ours)}")
            rows.append([f"{title}, {quantity}", *cells])
    base = [cost.get((task, OURS)) for task in TASKS]
    rows.append(["LLN + Diag, ms a step", *(f"{row['milliseconds']:.0f}" if row else MISSING for row in base)])
    rows.append(["LLN + Diag, MiB a step", *(f"{row['peak_bytes'] / 2**20:.0f}" if row else MISSING for row in base)])
    batches = ", ".join(f"{task} {row['batch']}" for task, row in zip(TASKS, base, strict=True) if row)
    return Table(
        title="Table 4: what training costs, published / ours, as multiples of LLN + Diag",
        columns=["", *(task.title for task in TASKS.values())],
        rows=rows,
        notes=[
            "Published: whole training on a GPU, in float16 around attention. Ours: one training step in float32 on "
            f"full-length inputs, examples in a step: {batches}. Softmax (explicit) holds the N x N matrix, as the "
            "paper's baseline; Softmax is torch's scaled_dot_product_attention.",
            _measured(recorded),
        ],
    )


def table_5(results: Path) -> Table:
    """Accuracy on the test examples, of the tasks and methods that were run.

    Once all tasks were run it has averages, and rows of what was published for methods that were not.
    """
    recorded = _read(results, RESULTS, "lln lra run", list)
    tested = [result for result in recorded if result["evaluated_on"] == "test"]
    if not tested:
        raise ValueError(f"{results / RESULTS} has no run that was tested")
    budgets = {task: _budget(tested, task) for task in TASKS if any(result["task"] == task for result in tested)}
    complete = len(budgets) == len(TASKS)
    rows = []
    # Runs with other options than the comparison's are variants, with rows of their own after that of their method.
    for method, options in [
        (method, options)
        for method in TITLES
        for options in ["", *sorted({_unusual(result) for result in tested if result["attention"] == method} - {""})]
    ]:
        runs = [result for result in tested if (result["attention"], _unusual(result)) == (method, options)]
        published = not options and method in PUBLISHED_ACCURACY
        if not runs and not (published and complete):
            continue
        ours = [_mean([result["accuracy"] for result in runs if result["task"] == task]) for task in budgets]
        reported = dict(zip(TASKS, PUBLISHED_ACCURACY[method], strict=True)) if published else {}
        theirs = [reported.get(task) for task in budgets]
        pairs = [*zip(theirs, ours, strict=True), *([(_all(theirs), _all(ours))] if complete else [])]
        percent = [(theirs, None if own is None else 100 * own) for theirs, own in pairs]
        title = f"{TITLES[method]}, {options}" if options else TITLES[method]
        rows.append([title, *(f"{_number(a)} / {_number(b)}" for a, b in percent)])
    sources = sorted({f"{TASKS[result['task']].title}: {result['source']}" for result in tested})
    seeds = sorted({result["seed"] for result in tested})
    hours = sum(map(_seconds, tested)) / 3600
    return Table(
        title="Table 5: accuracy [%], published / ours",
        columns=["", *(TASKS[task].title for task in budgets), *(["Average"] if complete else [])],
        rows=rows,
        notes=[
            f"Our data: {'; '.join(sources)}. Every test example counts; seeds {', '.join(map(str, seeds))}.",
            "Our budgets, the same for all methods: "
            + "; ".join(
                f"{task}: {run['steps']} steps of {run['batch_size']} at {run['learning_rate']:g}"
                f"{', means standardised' if run['standardise'] else ''}"
                for task, run in budgets.items()
            )
            + ". Published: 50,000 steps.",
            _measured(*(result["provenance"] for result in tested))
            + f" The times of the {len(tested)} runs, with their tests, add up to {hours:.1f} hours.",
        ],
    )


def _read(results: Path, name: str, command: str, kind: type) -> Any:
    path = results / name
    if not path.exists():
        raise ValueError(f"{path} is missing: it is recorded with `{command}`")
    return read_json(path, f"record it anew with `{command}`", kind=kind)


def _budget(tested: Sequence[dict[str, Any]], task: str) -> dict[str, Any]:
    """The settings of a task's runs, which must be the same for all methods and seeds."""
    # A setting that a recorded run does not have yet was what is the default since.
    before = {field.name: field.default for field in fields(LraConfig)}
    runs = [before | result["settings"] | {"steps": result["steps"]} for result in tested if result["task"] == task]
    for run in runs[1:]:
        unequal = [key for key in run if key not in _FREE and run[key] != runs[0].get(key)]
        if unequal:
            raise ValueError(
                f"runs of {task} had unequal budgets ({', '.join(unequal)}), and a table compares equal ones: "
                "keep the others in another folder"
            )
    return dict(runs[0])


def _measured(*recorded: dict[str, Any]) -> str:
    processors = sorted({run["machine"]["processor"] for run in recorded})
    threads, versions, commits = (sorted({str(run[key]) for run in recorded}) for key in ("threads", "torch", "commit"))
    return (
        f"Measured on {', '.join(processors)}, threads: {', '.join(threads)}, torch {', '.join(versions)}, "
        f"commit {', '.join(commits)}."
    )


def _seconds(result: dict[str, Any]) -> float:
    """Of training and of testing."""
    return float(result["seconds"] + sum(line["eval_seconds"] for line in result["evaluations"]))


def _unusual(result: dict[str, Any]) -> str:
    """The options of a run that are not the comparison's, as text."""
    usual = OPTIONS.get(result["attention"], {})
    return ", ".join(f"{key} = {value}" for key, value in result["options"].items() if usual.get(key) != value)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _all(values: Sequence[float | None]) -> float | None:
    """The mean, if there is no gap in it."""
    return fmean(v for v in values if v is not None) if None not in values else None


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"
