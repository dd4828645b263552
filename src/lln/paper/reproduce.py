"""`lln reproduce`: all runs behind a table or figure of the paper as one command that can be stopped at any moment.

A target is a list of jobs, each one `lln train ...` with a run folder of its own, run by `lln.tasks.schedule`. A run
that was interrupted goes on where its last checkpoint is, one that is finished is left alone, and what finished runs
found becomes lines of RESULTS/TARGET.jsonl. Table 1, which starts from a pretrained model, is in
`lln.paper.table1_runs`.
"""

from collections.abc import Sequence
from pathlib import Path

from lln.paper import NAMES, load
from lln.paper.jobs import Job, Request
from lln.provenance import read_json
from lln.results import add_result, check_writable
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.glue import check_glue
from lln.tasks.data.images import find_dogs_vs_cats
from lln.tasks.data.text import check_source, default_source
from lln.tasks.lra.config import LraConfig
from lln.tasks.lra.data import load as load_lra
from lln.tasks.run import RESTORE, SUMMARY, make_folder, run_result
from lln.tasks.schedule import Planned, run_jobs
from lln.terminal import errors

NOT_IN_ALL = ("table5",)  # hours


def jobs(target: str) -> list[Job]:
    """The jobs of a target, in an order in which each comes after the one that it starts from."""
    module = load(target)
    if hasattr(module, "MADE_BY") and not hasattr(module, "JOBS"):
        raise ValueError(f"{target} is measured, not trained: `{module.MADE_BY}`")
    if not hasattr(module, "JOBS"):
        raise ValueError(f"no runs of its own are behind {target}; what can be reproduced: {', '.join(targets())}, all")
    found: list[Job] = module.JOBS
    return found


def targets() -> list[str]:
    """What has jobs."""
    return [name for name in NAMES if hasattr(load(name), "JOBS")]


def chosen_jobs(target: str, request: Request) -> list[Job]:
    """The jobs that are requested, with those that they start from."""
    planned = jobs(target)
    found = request.select(target, planned)
    needed = {job.after for job in found}
    return [job for job in planned if job in found or job.name in needed]


def reproduce(target: str, request: Request) -> None:
    """Run what is not finished of a target's jobs, and record what they found.

    Args:
        target: one of `targets()` but table1 and linearized, which have functions of their own, or all (but table5).
        request: folders, and which runs.

    Raises:
        ValueError: there is no such target, data are missing, or runs failed, which are named.

    Example:
        >>> reproduce("table5", Request(tasks=["listops"], methods=["lln"]))
    """
    runs, data_dir = request.runs, request.data_dir
    chosen = [name for name in targets() if name not in NOT_IN_ALL] if target == "all" else [target]
    planned = {
        job.name: (job, request.results / f"{name}.jsonl") for name in chosen for job in chosen_jobs(name, request)
    }
    waiting = [job for job, _ in planned.values() if not _is_finished(runs / job.name)]
    check_data(waiting, find_data(data_dir))
    make_folder(runs, "--runs")
    make_folder(request.results, "--results")

    def record(job: Job) -> None:
        add_result(planned[job.name][1], run_result(runs / job.name, data_dir=data_dir))

    for job, file in planned.values():
        check_writable(file)
        if job not in waiting:
            record(job)
    errors.print(f"{target}: {len(planned)} runs, {len(planned) - len(waiting)} of them finished before")

    def plan(job: Job) -> Planned:
        run = runs / job.name

        def recorded() -> str:
            record(job)
            summary = read_json(run / SUMMARY, RESTORE[SUMMARY])
            return ", ".join(f"{key} {value:.4g}" for key, value in summary.items() if isinstance(value, float))

        return Planned(
            name=job.name,
            log=runs / f"{job.name}.log",
            command=lambda: _command(job, runs, data_dir),
            is_finished=lambda: _is_finished(run),
            record=recorded,
            is_ready=lambda: job.after is None or _is_finished(runs / job.after),
        )

    run_jobs(list(map(plan, waiting)), side_by_side=request.side_by_side)


def check_data(planned: Sequence[Job], data: Path | None) -> None:
    """Refuse a data folder that lacks what some runs read, before any of them starts.

    Tasks of the Long Range Arena that are generated are made now, once for all their runs.
    """
    missing = []
    for kind, task in dict.fromkeys((job.arguments[0], job.task) for job in planned):
        try:
            if kind == "lra":
                load_lra(task, data_dir=data, examples=LraConfig.preset("laptop", task=task).examples)
            elif data is None:  # the others have text and images of their own
                continue
            elif kind == "mlm":
                check_source(default_source(data), data)
            elif kind == "vision":
                find_dogs_vs_cats(data)
            else:
                check_glue(task, data)
        except ValueError as error:
            missing.append(str(error))
    if missing:
        where = "" if data is None else f"the data folder {data} lacks what the runs read: "
        raise ValueError(where + "; ".join(missing))


def _command(job: Job, runs: Path, data_dir: Path | None) -> list[str]:
    command = ["train", *job.arguments, "--preset", "laptop", "--quiet", "--out", str(runs / job.name)]
    if job.after is not None:
        command += ["--from", str(runs / job.after)]
    if data_dir is not None:
        command += ["--data-dir", str(data_dir)]
    return command


def _is_finished(run: Path) -> bool:
    return (run / SUMMARY).exists()
