"""`lln reproduce`: all runs behind a table or figure of the paper as one command that can be stopped at any moment.

A target is a list of jobs, each one `lln train ...` with a run folder of its own, run by `lln.tasks.schedule`. A run
that was interrupted goes on where its last checkpoint is, one that is finished is left alone, and the small files of
finished runs (no weights) are copied to the results. Table 1, which starts from a pretrained model, is in
`lln.tasks.table_1`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lln.provenance import read_json
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.glue import check_glue
from lln.tasks.data.images import find_dogs_vs_cats
from lln.tasks.data.text import check_source, default_source
from lln.tasks.run import CONFIG, PROVENANCE, RESTORE, SUMMARY, make_folder
from lln.tasks.schedule import Planned, run_jobs

# Files of a run folder that make up its result.
RESULT_FILES = (CONFIG, PROVENANCE, SUMMARY, "metrics.jsonl", "records.jsonl")

# The paper's LLN+Diag.
AVERAGE = ("lln_diag", "--option", "combine=average")
# LLN+Diag whose heads learn how much they take of LLN, and begin with little.
LEARNED_SHARE = ("lln_diag", "--option", "combine=ratio", "--option", "share=0.1")
# What is compared: the name in run folders, and the attention with its options.
ATTENTIONS = {
    **{name: (name,) for name in ("softmax", "lln", "elu", "performer", "nystrom", "cosformer", "linformer")},
    "lln_diag": AVERAGE,
    "lln_diag_learned": LEARNED_SHARE,
}
# Figure 1 has one head a layer, and all forms of LLN.
ONE_HEAD = {
    "softmax": ("softmax",),
    "lln": ("lln",),
    "lln_unbiased": ("lln", "--option", "form=unbiased"),
    "lln_decomposed": ("lln", "--option", "form=decomposed"),
}
PRETRAINED = ("softmax", "lln_diag_learned", "lln_diag", "lln", "elu", "performer", "nystrom", "cosformer")
GLUE = ("mnli", "qnli", "qqp", "sst2")
SECOND_SEED = ("softmax", "lln_diag_learned")
IMAGE = ("softmax", "lln_diag_learned", "lln_diag", "linformer")
# What LLN+Diag is compared with to find what matters in pre-training, at two thirds of the steps.
ABLATION = {
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
# Figure 10 sweeps alpha = beta around the values that matching finds (figure 9).
FIXED_SCALES = ("0.5", "1", "2", "4")
HALF_SCALES = ("2", "4")
SWEEP = ("--epochs", "2")  # of one attention, compared with itself
# float16 has no fast path on most CPUs: these runs are short, and the loss scale grows fast enough to find its limit.
SHORT_HALF = ("--precision", "fp16", "--steps", "200", "--batch-size", "4", "--scale-window", "10", "--log-every", "1")


@dataclass(frozen=True)
class Job:
    """One run: `lln train TASK ARGUMENTS`. `after` names the run that it starts from."""

    name: str
    arguments: tuple[str, ...]
    after: str | None = None


def pretraining(name: str) -> Job:
    return Job(f"mlm-{name}", ("mlm", "--attention", *ATTENTIONS[name]))


def fine_tuning(task: str, attention: str, seed: int) -> Job:
    name = f"glue-{task}-{attention}-seed{seed}"
    return Job(name, ("glue", "--task", task, "--seed", str(seed)), after=f"mlm-{attention}")


def vision(name: str, attention: str, *arguments: str) -> Job:
    return Job(f"vision-{name}", ("vision", "--attention", attention, *arguments))


def fixed(scale: str) -> tuple[str, ...]:
    return ("--option", f"alpha={scale}", "--option", f"beta={scale}")


def jobs(target: str) -> list[Job]:
    """The jobs of a target, in an order in which each comes after the one that it starts from; "all": of all."""
    seeds = {attention: (0, 1) if attention in SECOND_SEED else (0,) for attention in PRETRAINED}
    targets: dict[str, list[Job]] = {
        "mlm": [
            *map(pretraining, PRETRAINED),
            *(fine_tuning(task, name, seed) for name in PRETRAINED for seed in seeds[name] for task in GLUE),
        ],
        "table3": [vision(name, *ATTENTIONS[name]) for name in IMAGE],
        "figure1": [
            Job(
                f"one-head-{name}",
                ("mlm", "--attention", *arguments, "--heads", "1", "--record-every", "10", "--steps", "600"),
            )
            for name, arguments in ONE_HEAD.items()
        ],
        "figure8": [
            Job(f"fp16-{name}", ("mlm", "--attention", *ATTENTIONS[name], *SHORT_HALF))
            for name in ("softmax", "lln_diag")
        ],
        "figure10": [
            vision("lln", "lln", *SWEEP),
            *(vision(f"lln-{scale}", "lln", *SWEEP, *fixed(scale)) for scale in FIXED_SCALES),
            vision("fp16-lln", "lln", *SHORT_HALF),
            *(vision(f"fp16-lln-{scale}", "lln", *SHORT_HALF, *fixed(scale)) for scale in HALF_SCALES),
        ],
        "ablation": [
            Job(f"ablation-{name}", ("mlm", "--steps", "2000", "--attention", *arguments))
            for name, arguments in ABLATION.items()
        ],
    }
    targets["all"] = [job for listed in targets.values() for job in listed]
    if target not in targets:
        raise ValueError(f"nothing is called {target!r} here; what can be reproduced: {', '.join(targets)}")
    return targets[target]


def reproduce(
    target: str,
    *,
    runs: Path,
    results: Path,
    data_dir: Path | None,
    side_by_side: int = 2,
    say: Callable[[str], None] = print,
) -> None:
    """Run what is not finished of a target's jobs, and copy what they found to `results`."""
    if side_by_side < 1:
        raise ValueError(f"at least one job must run at a time, got {side_by_side}")
    planned = jobs(target)
    waiting = [job for job in planned if not _finished(runs / job.name)]
    data = find_data(data_dir)
    if data is not None:
        check_data(waiting, data)
    make_folder(runs, "--runs")
    make_folder(results, "--results")
    for job in planned:
        if job not in waiting:
            collect(runs / job.name, results / job.name, data_dir)
    say(f"{target}: {len(planned)} runs, {len(planned) - len(waiting)} of them finished before")

    def plan(job: Job) -> Planned:
        run = runs / job.name

        def collected() -> str:
            collect(run, results / job.name, data_dir)
            return _outcome(run)

        return Planned(
            name=job.name,
            log=runs / f"{job.name}.log",
            command=lambda: _command(job, runs, data_dir),
            is_finished=lambda: _finished(run),
            collect=collected,
            is_ready=lambda: job.after is None or _finished(runs / job.after),
        )

    run_jobs(list(map(plan, waiting)), side_by_side=side_by_side, say=say)


def check_data(planned: Sequence[Job], data: Path) -> None:
    """Refuse a data folder that lacks what some runs read, before any of them starts."""
    missing = []
    for task in dict.fromkeys(
        job.arguments[:3] if job.arguments[0] == "glue" else job.arguments[:1] for job in planned
    ):
        try:
            if task[0] == "mlm":
                check_source(default_source(data), data)
            elif task[0] == "vision":
                find_dogs_vs_cats(data)
            else:
                check_glue(task[-1], data)
        except ValueError as error:
            missing.append(str(error))
    if missing:
        raise ValueError(f"the data folder {data} lacks what the runs read: {'; '.join(missing)}")


def collect(run: Path, result: Path, data_dir: Path | None = None) -> None:
    """Copy the small files of a finished run, without the paths of this machine: they read `runs` and `DATA`."""
    result.mkdir(parents=True, exist_ok=True)
    for name in RESULT_FILES:
        if (run / name).exists():
            if name in RESTORE:
                read_json(run / name, RESTORE[name])  # refuses a damaged file
            text = (run / name).read_text(encoding="utf-8").replace(str(run.parent), "runs")
            text = text if data_dir is None else text.replace(str(data_dir), "DATA")
            (result / name).write_text(text, encoding="utf-8")


def _command(job: Job, runs: Path, data_dir: Path | None) -> list[str]:
    command = ["train", *job.arguments, "--preset", "laptop", "--quiet", "--out", str(runs / job.name)]
    if job.after is not None:
        command += ["--from", str(runs / job.after)]
    if data_dir is not None:
        command += ["--data-dir", str(data_dir)]
    return command


def _finished(run: Path) -> bool:
    return (run / SUMMARY).exists()


def _outcome(run: Path) -> str:
    summary = read_json(run / SUMMARY, RESTORE[SUMMARY])
    return ", ".join(f"{key} {value:.4g}" for key, value in summary.items() if isinstance(value, float))
