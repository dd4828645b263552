"""`lln reproduce table1`: the paper's table 1 from a pretrained model, fine-tuned and then made linear by each method.

Stage one, for each task: `lln train glue` fine-tunes the model with its softmax attention. Stage two, for each method:
`lln linearize` turns the fine-tuned model linear on the examples that it was fine-tuned on, without their labels, with
the same number of steps and tokens. Of two schedules each method has the one that keeps more of the predictions on
held-out training examples of one task. Every finished model is a line of RESULTS/table1.jsonl. Important runs come
first, so that a reproduction that is stopped has a table already.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln.paper.jobs import Request
from lln.paper.table1 import Line, read_lines
from lln.paper.table1_methods import (
    ALL_STEPS,
    LINEARIZE,
    METHODS,
    OF_THE_PAPER,
    REMAKE,
    SCHEDULES,
    SEVEN,
    TRIAL_EXAMPLES,
    TRIAL_TASK,
    Cell,
    Clock,
    Schedule,
    cells,
    fine_tuning_cost,
    learned_tokens,
    linearizing_cost,
    seconds_of_a_token,
)
from lln.provenance import read_json
from lln.results import Result, Row, add_result
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.glue import TASKS, check_glue
from lln.tasks.presets import PRETRAINED
from lln.tasks.run import PROVENANCE, RESTORE, SUMMARY, make_folder
from lln.tasks.schedule import Planned, run_jobs, threads_of_each
from lln.terminal import errors

RESULT = "table1.jsonl"


def chosen_cells(request: Request) -> list[Cell]:
    """Those of the methods, tasks and seeds that are asked for."""
    hint = (
        f": {', '.join(SEVEN)} run on all tasks with seeds 0 to 2, the other methods on {', '.join(OF_THE_PAPER)} with "
        "seed 0"
    )
    return request.select("table1", cells(), hint=hint)


def reproduce_table_1(model: Path | None, request: Request) -> None:
    """Run what is not finished, and write what was found to RESULTS/table1.jsonl."""
    check_model(model)
    assert model is not None
    planned = chosen_cells(request)
    place = Place(model, request.runs / "table1", request.results / RESULT, request.data_dir)
    place.check()
    waiting = [cell for cell in planned if place.line(cell) is None]
    data = find_data(request.data_dir)
    if data is not None:
        check_data([*waiting, *(trial.cell for trial in place.trials(waiting))], data)
    make_folder(place.runs, "--runs")
    make_folder(request.results, "--results")
    errors.print(f"table1: {len(planned)} runs, {len(planned) - len(waiting)} of them finished before")
    jobs, costs = place.plan(waiting)
    if not jobs:
        return
    threads = threads_of_each(request.side_by_side)
    clock = Clock(costs, seconds_of_a_token(model, threads), request.side_by_side)
    clock.print_time_left()
    run_jobs(jobs, side_by_side=request.side_by_side, on_end=clock.on_end)


def check_model(model: Path | None) -> None:
    from lln.tasks.start import HuggingFaceModel

    if model is None:
        raise ValueError("table 1 starts from a pretrained model: --model FOLDER, a Hugging Face encoder")
    if not (model / "config.json").is_file():
        raise ValueError(f"--model must name a folder with a Hugging Face encoder, and {model} is none")
    if HuggingFaceModel(str(model)).is_linear:
        raise ValueError(f"{model} is linear already; give the softmax model that it was made from")


def check_data(waiting: Sequence[Cell], data: Path) -> None:
    """Refuse a data folder that lacks what some runs read, before any of them starts."""
    missing = []
    for task in dict.fromkeys(cell.task for cell in waiting):
        try:
            check_glue(task, data)
        except ValueError as error:
            missing.append(str(error))
    if missing:
        raise ValueError(f"the data folder {data} lacks what the runs read: {'; '.join(missing)}")


@dataclass(frozen=True)
class Trial:
    """A method with one schedule, judged on held-out training examples of one task."""

    method: str
    schedule: str

    @property
    def name(self) -> str:
        return f"try-{self.method}-{self.schedule}"

    @property
    def cell(self) -> Cell:
        return Cell(self.method, TRIAL_TASK, 0)


@dataclass(frozen=True)
class Place:
    """Where the runs of table 1 lie, and what they are."""

    model: Path
    runs: Path
    result: Path
    data_dir: Path | None

    def lines(self) -> list[Line]:
        return read_lines(self.result)

    def line(self, cell: Cell) -> Line | None:
        """What was recorded of a finished run."""
        key = (cell.method, cell.task, cell.seed)
        found = [x for x in self.lines() if (x["method"], x["task"], x["seed"]) == key]
        return found[-1] if found else None

    def check(self) -> None:
        """Refuse to mix what was made from another model, or with other budgets, with what is to be run."""
        if others := {line["model"] for line in self.lines()} - {self.model.name}:
            raise ValueError(
                f"{self.result} holds runs from {', '.join(sorted(others))}, not from {self.model.name}; choose "
                "another folder, --results"
            )
        for line in self.lines():
            if "linearize" in line and line["linearize"] != learned_tokens(line["method"], line["schedule"]):
                raise ValueError(
                    f"{self.result} holds a run of {line['method']} that was made linear in other steps "
                    f"({line['linearize']}); remove its lines, or choose another folder, --results"
                )

    def trials(self, waiting: Iterable[Cell]) -> list[Trial]:
        """The schedules that are still to be tried for these cells."""
        methods = dict.fromkeys(cell.method for cell in waiting if cell.method != "softmax")
        found = [Trial(method, name) for method in methods if self._chosen(method) is None for name in SCHEDULES]
        return [trial for trial in found if not self._is_finished(self.runs / trial.name)]

    def plan(self, waiting: Sequence[Cell]) -> tuple[list[Planned], dict[str, float]]:
        """The jobs, each after those that it needs, and their costs in tokens of training."""
        trials = self.trials(waiting)
        jobs: dict[str, Planned] = {}
        costs: dict[str, float] = {}
        for cell in waiting:
            of_method = [trial for trial in trials if trial.method == cell.method]
            for fine_tuned in (cell.softmax, *(trial.cell.softmax for trial in of_method)):
                # Its folder is needed, even if its line is there.
                if fine_tuned == cell or not self._is_finished(self.runs / fine_tuned.name):
                    jobs.setdefault(fine_tuned.name, self.fine_tuning(fine_tuned))
                    costs[fine_tuned.name] = fine_tuning_cost(fine_tuned)
            for trial in of_method:
                jobs.setdefault(trial.name, self.trying(trial))
                costs[trial.name] = linearizing_cost(trial.cell, ALL_STEPS // 2)
            if cell.method != "softmax":
                jobs[cell.name] = self.linearizing(cell)
                costs[cell.name] = linearizing_cost(cell)
        return list(jobs.values()), costs

    def fine_tuning(self, cell: Cell) -> Planned:
        """Stage one of a task. Its folder is kept: all methods start from it."""
        folder = self.runs / cell.name
        flags = ["--task", cell.task, "--seed", str(cell.seed), "--from", str(self.model), "--preset", "pretrained"]

        def record() -> str:
            summary = read_json(folder / SUMMARY, RESTORE[SUMMARY])
            metrics = {name: summary[f"eval_{name}"] for name in TASKS[cell.task].metrics}
            settings = {name: summary[name] for name in ("learning_rate", "train_examples", "eval_examples")}
            settings["epochs"] = PRETRAINED[cell.task]["epochs"]
            found = {name: summary[name] for name in ("trials", "steps", "tokens", "seconds") if name in summary}
            origin = read_json(folder / PROVENANCE, RESTORE[PROVENANCE])
            return self._write(cell, settings, {"metrics": metrics} | found, origin)

        return self._planned(cell.name, ["train", "glue", *flags], folder / SUMMARY, record)

    def trying(self, trial: Trial) -> Planned:
        """A schedule of a method: how far predictions for held-out training examples are from those of softmax."""
        count = str(TRIAL_EXAMPLES)
        return self._planned(
            trial.name,
            [
                *self._linearize(trial.cell, SCHEDULES[trial.schedule].trial),
                *("--hold-out", "--eval-passages", count, "--eval-examples", count),
            ],
            self.runs / trial.name / "work" / SUMMARY,
            lambda: f"divergence {self._divergence(trial):.4g}",
            is_ready=lambda: self._is_finished(self.runs / trial.cell.softmax.name),
        )

    def linearizing(self, cell: Cell) -> Planned:
        """Stage two of a method on a task, with the better schedule."""
        folder = self.runs / cell.name

        def command() -> list[str]:
            chosen = self._chosen(cell.method)
            assert chosen is not None
            return [*self._linearize(cell, SCHEDULES[chosen[0]]), *cell.measured, "--eval-passages", "40"]

        def record() -> str:
            text = self.record(cell)
            shutil.rmtree(folder)
            return text

        return self._planned(
            cell.name,
            command,
            folder / "work" / SUMMARY,
            record,
            is_ready=lambda: self._is_finished(self.runs / cell.softmax.name) and self._chosen(cell.method) is not None,
        )

    def record(self, cell: Cell) -> str:
        """Write the line of a model that was made linear."""
        report = read_json(self.runs / cell.name / "report.json", REMAKE)
        chosen = self._chosen(cell.method)
        assert chosen is not None
        given, labelled = report["settings"], report["labelled"]
        names = TASKS[cell.task].metrics
        kept = list(report["kept"].values())[-1][-1]
        settings = {
            "options": given["options"],
            "schedule": chosen[0],
            "learning_rate": given["distil_rate"],
            "train_examples": report["data"]["training_examples"],
            "eval_examples": labelled["examples"],
            "linearize": learned_tokens(cell.method, chosen[0]),
        }
        found = {
            "metrics": {name: labelled[f"linear_{name}"] for name in names},
            # Those of the model that it was made from, measured in the same way.
            "softmax": {name: labelled[f"softmax_{name}"] for name in names},
            "trials": chosen[1],
            "kept": {name: kept[name] for name in ("cosine", "divergence") if name in kept},
        }
        return self._write(cell, settings, found, report, rows=report["ablation"])

    def _chosen(self, method: str) -> tuple[str, dict[str, float]] | None:
        """The better schedule of a method, and what each got; from its trials, or from what was recorded of them."""
        trials = [Trial(method, name) for name in SCHEDULES]
        if all(self._is_finished(self.runs / trial.name) for trial in trials):
            found = {trial.schedule: self._divergence(trial) for trial in trials}
        else:
            recorded = [x["trials"] for x in self.lines() if x["method"] == method and "linearize" in x]
            if not recorded:
                return None
            found = recorded[-1]
        return min(found, key=found.__getitem__), found

    def _divergence(self, trial: Trial) -> float:
        kept = read_json(self.runs / trial.name / "report.json", REMAKE)["kept"]
        return float(list(kept.values())[-1][-1]["divergence"])

    def _is_finished(self, folder: Path) -> bool:
        return (folder / SUMMARY).exists() or (folder / "work" / SUMMARY).exists()

    def _linearize(self, cell: Cell, schedule: Schedule) -> list[str]:
        start, method = self.runs / cell.softmax.name / "model", METHODS[cell.method]
        flags = ["--task", cell.task, "--seed", str(cell.seed), *cell.learned, *LINEARIZE, *schedule.flags]
        return ["linearize", str(start), *method.flags(schedule.steps), *flags]

    def _planned(
        self,
        name: str,
        command: list[str] | Callable[[], list[str]],
        finished: Path,
        record: Callable[[], str],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> Planned:
        data = [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        rest = ["--out", str(self.runs / name), "--quiet", *data]
        return Planned(
            name=name,
            log=self.runs / f"{name}.log",
            command=lambda: [*(command() if callable(command) else command), *rest],
            is_finished=finished.exists,
            record=record,
            is_ready=is_ready,
        )

    def _write(
        self,
        cell: Cell,
        settings: Mapping[str, Any],
        summary: Mapping[str, Any],
        report: Mapping[str, Any],
        rows: Sequence[Row] = (),
    ) -> str:
        """Write a line; what was recorded of the cell before is replaced."""
        origin = {name: report[name] for name in ("commit", "machine", "threads", "torch")}
        about = {"method": cell.method, "task": cell.task, "model": self.model.name, "precision": "bf16"}
        result = Result(
            cell.name,
            origin | {"command": self._plain(report["command"]), "seed": cell.seed},
            {**about, **settings},
            summary,
            {"rows": rows} if rows else {},
        )
        add_result(self.result, result)
        return ", ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())

    def _plain(self, command: str) -> str:
        """A command without the paths of this machine."""
        for path, name in ((self.runs, "runs/table1"), (self.model, "MODEL"), (self.data_dir, "DATA")):
            command = command if path is None else command.replace(str(path), name)
        return command
