"""Table 5: accuracy on the Long Range Arena, the published numbers beside ours."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from lln.paper.jobs import Job
from lln.paper.lra_tables import PUBLISHED_TASKS, TITLES, measured_on, number
from lln.report.table import Table
from lln.results import Result, read_results
from lln.tasks.lra.config import OPTIONS, LraConfig
from lln.tasks.lra.registry import TASKS

MADE_BY = "lln reproduce table5"
# Accuracy in per cent, in the order of `PUBLISHED_TASKS`.
PUBLISHED = {
    "softmax": (60.41, 38.05, 79.95, 71.3, 37.2),
    "reformer": (61.27, 37.05, 78.74, 67.23, 44.04),
    "performer": (57.85, 37.8, 80.5, 62.58, 37.56),
    "skyformer": (60.88, 39.36, 81.54, 70.23, 32.64),
    "lln_diag": (60.72, 38.91, 81.21, 69.81, 38.65),
}
METHODS = ("softmax", "reformer", "performer", "skyformer", "lln", "lln_diag")
SHARES = ("0.1", "0.9")  # LLN+Diag also with a learned share of LLN, from these on
# Settings that runs of a task need not have in common.
FREE = {"attention", "options", "seed", "log_every", "eval_every", "save_every", "keep_checkpoints", "record_every"}
FREE |= {"experiment"}


def jobs() -> list[Job]:
    def job(task: str, method: str, *options: str) -> Job:
        arguments = [part for option in options for part in ("--option", option)]
        name = "-".join([task, method, *options, "seed0"])
        return Job(name, ("lra", "--task", task, "--attention", method, *arguments), method=method, task=task)

    plain = [job(task, method) for task in TASKS for method in METHODS]
    return plain + [job(task, "lln_diag", "combine=ratio", f"share={share}") for share in SHARES for task in TASKS]


JOBS = jobs()


def make(results: Path, file: str = "table5") -> Table:
    """Accuracy on the test examples, of the tasks and methods that were run.

    Once all tasks were run it has averages, and rows of what was published for methods that were not.
    """
    path = results / f"{file}.jsonl"
    tested = [x for x in read_results(path, made_by=MADE_BY).values() if x.settings["evaluate_on"] == "test"]
    if not tested:
        raise ValueError(f"{path} has no run that was tested")
    settings = {task: _settings(tested, task) for task in TASKS if any(x.settings["task"] == task for x in tested)}
    complete = set(settings) >= set(PUBLISHED_TASKS)
    rows = []
    # Runs with other options than the comparison's are variants, with rows of their own after that of their method.
    for method, options in [
        (method, options)
        for method in TITLES
        for options in ["", *sorted({_unusual(x) for x in tested if x.settings["attention"] == method} - {""})]
    ]:
        runs = [x for x in tested if (x.settings["attention"], _unusual(x)) == (method, options)]
        published = not options and method in PUBLISHED
        if not runs and not (published and complete):
            continue
        ours = [_mean([x.summary["eval_accuracy"] for x in runs if x.settings["task"] == task]) for task in settings]
        reported = dict(zip(PUBLISHED_TASKS, PUBLISHED[method], strict=True)) if published else {}
        theirs = [reported.get(task) for task in settings]
        pairs = [*zip(theirs, ours, strict=True), *([(_all(theirs), _all(ours))] if complete else [])]
        percent = [(theirs, None if own is None else 100 * own) for theirs, own in pairs]
        title = f"{TITLES[method]}, {options}" if options else TITLES[method]
        rows.append([title, *(f"{number(a)} / {number(b)}" for a, b in percent)])
    sources = sorted({f"{TASKS[x.settings['task']].title}: {x.summary['source']}" for x in tested})
    seeds = sorted({x.settings["seed"] for x in tested})
    hours = sum(map(_seconds, tested)) / 3600
    return Table(
        title="Table 5: accuracy [%], published / ours",
        columns=["", *(TASKS[task].title for task in settings), *(["Average"] if complete else [])],
        rows=rows,
        notes=[
            f"Our data: {'; '.join(sources)}. Every test example counts; seeds {', '.join(map(str, seeds))}.",
            "Our budgets, the same for all methods: "
            + "; ".join(
                f"{task}: {run['steps']} steps of {run['batch_size']} at {run['learning_rate']:g}"
                f"{', means standardised' if run['standardise'] else ''}"
                for task, run in settings.items()
            )
            + ". Published: 50,000 steps.",
            measured_on(x.origin for x in tested)
            + f" The times of the {len(tested)} runs, with their tests, add up to {hours:.1f} hours.",
        ],
    )


def _settings(tested: Sequence[Result], task: str) -> dict[str, Any]:
    """The settings of a task's runs, which must be the same for all methods and seeds."""
    # A setting that a recorded run does not have yet was what is the default since.
    before = {field.name: field.default for field in fields(LraConfig)}
    runs = [before | {**x.settings, "steps": x.summary["steps"]} for x in tested if x.settings["task"] == task]
    for run in runs[1:]:
        unequal = [key for key in run if key not in FREE and run[key] != runs[0].get(key)]
        if unequal:
            raise ValueError(
                f"runs of {task} had unequal budgets ({', '.join(unequal)}), and a table compares equal ones: "
                "keep the others in another result file"
            )
    return dict(runs[0])


def _seconds(result: Result) -> float:
    """Of training and of testing."""
    return float(result.summary["seconds"] + sum(line["eval_seconds"] for line in result.tables["evaluations"]))


def _unusual(result: Result) -> str:
    """The options of a run that are not the comparison's, as text."""
    usual = OPTIONS.get(result.settings["attention"], {})
    return ", ".join(f"{key} = {x}" for key, x in result.settings["options"].items() if usual.get(key) != x)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _all(values: Sequence[float | None]) -> float | None:
    """The mean, if there is no gap in it."""
    return fmean(v for v in values if v is not None) if None not in values else None
