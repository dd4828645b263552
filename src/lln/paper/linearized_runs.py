"""`lln reproduce linearized`: pretrained models made linear, without labels, each by one `lln linearize`.

`--model` names a folder that holds the models as folders minilm (all-MiniLM-L6-v2), stories15m and smollm2
(SmolLM2-135M-Instruct); those that are not there are left out. All methods of a model have the same budget.
"""

from dataclasses import dataclass
from pathlib import Path

from lln.paper.jobs import Request
from lln.paper.table1_methods import REMAKE, Method
from lln.provenance import read_json
from lln.results import add_result, check_writable
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.run import SUMMARY, make_folder
from lln.tasks.schedule import Planned, run_jobs
from lln.terminal import errors

RESULT = "linearized.jsonl"
METHODS = {
    "lln": Method("lln"),
    "lln_diag": Method("lln_diag"),
    "hedgehog": Method("hedgehog"),
    "hedgehog_window": Method("hybrid", {"far": "hedgehog"}),
    "elu_window": Method("hybrid", {"far": "elu"}),
}
# What is read, and how much is learned from it, by model. Texts are in the data folder.
MODELS: dict[str, tuple[str, ...]] = {
    "minilm": ("--pairs", "{data}/glue/stsb/dev.jsonl"),
    "stories15m": ("--text", "{data}/tinystories/stories.jsonl", "--length", "256"),
    "smollm2": (
        *("--text", "wikitext-2", "--length", "4096", "--batch-tokens", "4096", "--calibration-tokens", "8192"),
        *("--eval-passages", "8", "--lora-rank", "16", "--distil-rate", "1e-3"),
    ),
}
STEPS = {
    "minilm": {"align": 300, "join": 60, "distil": 600},
    "stories15m": {"align": 60, "join": 20, "distil": 100},
    "smollm2": {"align": 60, "join": 20, "distil": 60},
}


@dataclass(frozen=True)
class Run:
    """One model and one method; without steps it is calibrated and not trained."""

    task: str  # the name of the model
    method: str
    is_trained: bool = True
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.task}-{self.method}{'' if self.is_trained else '-calibrated'}"


RUNS = (
    Run("minilm", "lln", is_trained=False),
    Run("stories15m", "lln_diag"),
    Run("minilm", "lln_diag"),
    Run("minilm", "lln"),
    Run("smollm2", "lln_diag"),
    Run("stories15m", "hedgehog_window"),
    Run("stories15m", "elu_window"),
    Run("smollm2", "hedgehog_window"),
    Run("smollm2", "elu_window"),
    Run("minilm", "hedgehog"),
)


def reproduce_linearized(models: Path | None, request: Request) -> None:
    """Run what is not finished, and write what was kept to RESULTS/linearized.jsonl; tasks are names of models.

    Raises:
        ValueError: models or data are missing, a folder holds a run of another model or with other steps, or runs
            failed, which are named.
    """
    from lln.linearize.linear import linearized_result

    if models is None or not any((models / name / "config.json").is_file() for name in MODELS):
        raise ValueError(f"--model must name a folder that holds Hugging Face models as folders {', '.join(MODELS)}")
    data = find_data(request.data_dir)
    if data is None:
        raise ValueError("these runs read texts and pairs of sentences: give --data-dir, or set LLN_DATA")
    runs, results = request.runs, request.results
    planned = request.select("linearized", (run for run in RUNS if (models / run.task / "config.json").is_file()))
    make_folder(runs, "--runs")
    make_folder(results, "--results")
    check_writable(results / RESULT)

    def plan(run: Run) -> Planned:
        folder = runs / "linearized" / run.name

        def record() -> str:
            report = read_json(folder / "report.json", REMAKE)
            add_result(results / RESULT, linearized_result(report, run.name))
            kept = list(report["kept"].values())[-1][-1]
            return ", ".join(f"{key} {x:.4g}" for key, x in kept.items() if isinstance(x, float))

        return Planned(
            name=run.name,
            log=folder.with_suffix(".log"),
            command=lambda: command(run, models, folder, data),
            is_finished=lambda: (folder / "work" / SUMMARY).exists(),
            record=record,
        )

    jobs = [plan(run) for run in planned]
    make_folder(runs / "linearized", "--runs")
    finished = [job for job in jobs if job.is_finished()]
    for run, job in zip(planned, jobs, strict=True):
        if job in finished:
            METHODS[run.method].check(runs / "linearized" / run.name, models / run.task, STEPS[run.task])
            job.record()
    errors.print(f"linearized: {len(jobs)} runs, {len(finished)} of them finished before")
    run_jobs([job for job in jobs if job not in finished], side_by_side=request.side_by_side)


def command(run: Run, models: Path, folder: Path, data: Path) -> list[str]:
    """The `lln linearize` of a run."""
    reads = [part.format(data=data) for part in MODELS[run.task]]
    return [
        *("linearize", str(models / run.task), *METHODS[run.method].flags(STEPS[run.task]), *reads),
        *(() if run.is_trained else ("--steps", "0")),
        *("--precision", "bf16", "--data-dir", str(data), "--out", str(folder), "--quiet"),
    ]
