"""`lln reproduce table1`: the paper's table 1 from a pretrained model, made linear by each method and then fine-tuned.

Stage one, for each method: `lln linearize MODEL` with the same number of steps and tokens, on passages of up to as many
tokens as the tasks have. Stage two: `lln train glue` on each task. Every finished fine-tuning is a line of
RESULTS/table1.jsonl, and its folder is removed. Important runs come first, so that a reproduction that is stopped has a
table already.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lln import zoo
from lln.instruments.records import read_records
from lln.linearize.config import LinearizeConfig
from lln.paper.jobs import Request
from lln.provenance import read_json
from lln.results import write_lines
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.glue import TASKS, check_glue
from lln.tasks.data.text import check_source, default_source
from lln.tasks.presets import GLUE_TASKS, PRETRAINED, GlueConfig
from lln.tasks.run import PROVENANCE, RESTORE, SUMMARY, make_folder
from lln.tasks.schedule import Planned, run_jobs, threads_of_each
from lln.terminal import errors

RESULT = "table1.jsonl"
REMAKE = "remove the folder, and the command makes it anew"


@dataclass(frozen=True)
class Method:
    """A row of the table: a mechanism, and the options that differ from those that `lln linearize` takes by itself."""

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def stage_steps(self, steps: Mapping[str, int]) -> dict[str, int]:
        """The steps of each stage, as many in all as `steps` has: what cannot be used in one goes to the last."""
        from lln.linearize.stages import share_parameters

        options = LinearizeConfig(attention=self.attention, options=self.options).all_options()
        mechanism = zoo.build(self.attention, num_heads=2, head_dim=8, max_len=64, **options)
        shares = {id(x) for x in share_parameters(mechanism)}
        useful = {"align": any(id(x) not in shares for x in mechanism.parameters()), "join": bool(shares)}
        used = {stage: count if useful.get(stage, True) else 0 for stage, count in steps.items()}
        return used | {"distil": used["distil"] + sum(steps.values()) - sum(used.values())}

    def flags(self, steps: Mapping[str, int]) -> list[str]:
        """The flags of `lln linearize` with so many steps in all."""
        options = [part for name, value in self.options.items() for part in ("--option", f"{name}={value}")]
        counts = self.stage_steps(steps).items()
        return [
            *("--attention", self.attention, *options),
            *(part for stage, count in counts for part in (f"--{stage}-steps", str(count))),
        ]

    def check(self, folder: Path, model: Path, steps: Mapping[str, int]) -> None:
        """Refuse a folder of `lln linearize` that was made from another model or with other steps."""
        report = read_json(folder / "report.json", REMAKE)
        started_from = Path(report.get("origin", {}).get("model", model)).name
        found = {stage: report["settings"][f"{stage}_steps"] for stage in steps}
        if started_from != model.name or found != self.stage_steps(steps):
            raise ValueError(
                f"{folder} was made from another model or with other steps ({started_from}, {found}); {REMAKE}"
            )


PAPER = {"form": "paper", "statistics": "live", "projection": False, "signed": False}
METHODS = {
    "softmax": Method("softmax"),
    # While it is fine-tuned a model learns what to attend to anew, which the far branch does not follow as well.
    "lln_diag_wide": Method("lln_diag", {"block_size": 128}),
    "lln_diag_ours": Method("lln_diag"),
    "lln_ours": Method("lln"),
    "hedgehog": Method("hedgehog"),
    "lln_diag": Method("lln_diag", PAPER | {"near": "blocks", "combine": "average"}),
    "elu": Method("elu"),
    "lln": Method("lln", PAPER),
    **{name: Method(name) for name in ("performer", "cosformer", "nystrom", "longformer", "transformer_ls", "flash")},
    **{name: Method(name) for name in ("transnormer_t1", "transnormer_t2", "tnn", "reformer")},
}
SIX = ("softmax", "lln_diag_wide", "lln_ours", "hedgehog", "lln_diag", "elu")  # run on all tasks, with three seeds
OF_THE_PAPER = ("mnli", "qnli", "qqp", "sst2")  # run for every method
EIGHT = tuple(task for task in GLUE_TASKS if task != "imdb")
SEEDS = (0, 1, 2)

# Steps of stage one. Those of a stage in which a mechanism has nothing to train go to the last one.
STEPS = {"align": 60, "join": 15, "distil": 325}
BATCH_TOKENS = 2048
LINEARIZE = (
    *("--tokens", "500000", "--batch-tokens", str(BATCH_TOKENS), "--precision", "bf16"),
    *("--eval-passages", "40", "--cost-tokens", "0"),
)
# For estimates of time: tokens of an example with padding, and validation examples, of all-MiniLM-L6-v2 and the data
# that the recorded results were made with; training examples where there are fewer than the budget.
TOKENS = {"mnli": 43, "qnli": 54, "qqp": 36, "sst2": 18, "cola": 15, "mrpc": 57, "rte": 70, "stsb": 33, "imdb": 286}
VALIDATION = {"mnli": 7468, "qnli": 5463, "qqp": 7598, "sst2": 872, "cola": 1043, "mrpc": 408, "rte": 277, "stsb": 1500}
TRAINING = {"mrpc": 3667, "rte": 2490, "stsb": 5749}
FORWARD = 0.3  # the time of a token without gradients, as a share of a training step's


@dataclass(frozen=True)
class FineTuning:
    """One cell of the table with one seed."""

    method: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.task}-seed{self.seed}"

    @property
    def length(self) -> int:
        """Longer examples of the task are cut to so many tokens."""
        return int(PRETRAINED[self.task].get("max_length", GlueConfig.max_length))


def cells() -> list[FineTuning]:
    """All of them, the most important ones first."""
    others = [method for method in METHODS if method not in SIX]
    return [
        *(FineTuning(method, task, 0) for method in SIX for task in EIGHT),
        *(FineTuning(method, task, 0) for method in others for task in OF_THE_PAPER),
        *(FineTuning(method, "imdb", 0) for method in SIX),
        *(FineTuning(method, task, seed) for seed in SEEDS[1:] for method in SIX for task in EIGHT),
        *(FineTuning(method, "imdb", seed) for seed in SEEDS[1:] for method in SIX),
    ]


def chosen_cells(request: Request) -> list[FineTuning]:
    """Those of the methods, tasks and seeds that are asked for."""
    hint = (
        f": {', '.join(SIX)} run on all tasks with seeds 0 to 2, the other methods on {', '.join(OF_THE_PAPER)} with "
        "seed 0"
    )
    return request.select("table1", cells(), hint=hint)


def reproduce_table_1(model: Path | None, request: Request) -> None:
    """Run what is not finished, and write what was found to RESULTS/table1.jsonl."""
    check_model(model)
    assert model is not None
    planned = chosen_cells(request)
    place = Place(model, request.runs / "table1", request.results / RESULT, request.data_dir)
    place.check(planned)
    waiting = [cell for cell in planned if place.line(cell) is None]
    data = find_data(request.data_dir)
    if data is not None:
        check_data(waiting, data)
    make_folder(place.runs, "--runs")
    make_folder(request.results, "--results")
    errors.print(f"table1: {len(planned)} runs, {len(planned) - len(waiting)} of them finished before")
    jobs: list[Planned] = []
    costs: dict[str, float] = {}  # in tokens of training
    for cell in waiting:
        first = place.linear(cell).name
        if first not in costs and not place.is_linearized(cell):
            jobs.append(place.linearizing(cell))
            costs[first] = linearizing_cost()
        jobs.append(place.fine_tuning(cell, after_seed_0=FineTuning(cell.method, cell.task, 0) in planned))
        costs[cell.name] = fine_tuning_cost(cell, tries_rates=cell.seed == 0)
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


def check_data(waiting: Sequence[FineTuning], data: Path) -> None:
    """Refuse a data folder that lacks what some runs read, before any of them starts."""
    missing = []
    checks: list[Callable[[], object]] = [
        lambda task=task: check_glue(task, data)  # type: ignore[misc]
        for task in dict.fromkeys(cell.task for cell in waiting)
    ]
    if any(cell.method != "softmax" for cell in waiting):
        checks.append(lambda: check_source(default_source(data), data))
    for check in checks:
        try:
            check()
        except ValueError as error:
            missing.append(str(error))
    if missing:
        raise ValueError(f"the data folder {data} lacks what the runs read: {'; '.join(missing)}")


@dataclass(frozen=True)
class Place:
    """Where the runs of table 1 lie, and what they are."""

    model: Path
    runs: Path
    result: Path
    data_dir: Path | None

    def lines(self) -> list[dict[str, Any]]:
        return read_records(self.result) if self.result.exists() else []

    def line(self, cell: FineTuning) -> dict[str, Any] | None:
        """What was recorded of a finished run."""
        key = (cell.method, cell.task, cell.seed)
        found = [x for x in self.lines() if (x["method"], x["task"], x["seed"]) == key]
        return found[-1] if found else None

    def check(self, planned: Iterable[FineTuning]) -> None:
        """Refuse to mix what was made from another model, or with other budgets, with what is to be run."""
        if others := {line["model"] for line in self.lines()} - {self.model.name}:
            raise ValueError(
                f"{self.result} holds runs from {', '.join(sorted(others))}, not from {self.model.name}; choose "
                "another folder, --results"
            )
        for line in self.lines():
            if "linearize" in line:
                found = {stage: line["linearize"][f"{stage}_steps"] for stage in STEPS}
                if found != METHODS[line["method"]].stage_steps(STEPS):
                    raise ValueError(
                        f"{self.result} holds a run of {line['method']} that was made linear in other steps ({found}); "
                        "remove its lines, or choose another folder, --results"
                    )
        for cell in {self.linear(cell): cell for cell in planned if cell.method != "softmax"}.values():
            if self.is_linearized(cell):
                METHODS[cell.method].check(self.linear(cell), self.model, STEPS)

    def linear(self, cell: FineTuning) -> Path:
        return self.runs / f"linear-{cell.method}-{cell.length}"

    def is_linearized(self, cell: FineTuning) -> bool:
        return cell.method == "softmax" or (self.linear(cell) / "work" / SUMMARY).exists()

    def linearizing(self, cell: FineTuning) -> Planned:
        """Stage one of a method, for tasks of the length of this one."""
        folder = self.linear(cell)
        command = ["linearize", str(self.model), *METHODS[cell.method].flags(STEPS), *LINEARIZE]
        command += ["--length", str(cell.length)]
        return Planned(
            name=folder.name,
            log=folder.with_suffix(".log"),
            command=lambda: [*command, "--out", str(folder), "--quiet", *self._data()],
            is_finished=lambda: self.is_linearized(cell),
            record=lambda: f"cosine {self._linearized(cell)['cosine']:.4f}",
        )

    def fine_tuning(self, cell: FineTuning, *, after_seed_0: bool) -> Planned:
        """Stage two of a method on a task. Other seeds take the rate that the first one has chosen, if it is run."""
        folder, first = self.runs / cell.name, FineTuning(cell.method, cell.task, 0)

        def command() -> list[str]:
            start = self.model if cell.method == "softmax" else self.linear(cell)
            chosen = self.line(first)
            rate = [] if cell.seed == 0 or chosen is None else ["--learning-rate", repr(chosen["learning_rate"])]
            flags = ["--task", cell.task, "--seed", str(cell.seed), "--from", str(start), "--preset", "pretrained"]
            return ["train", "glue", *flags, *rate, "--out", str(folder), "--quiet", *self._data()]

        def is_ready() -> bool:
            waits = cell.seed > 0 and after_seed_0 and self.line(first) is None
            return self.is_linearized(cell) and not waits

        return Planned(
            name=cell.name,
            log=folder.with_suffix(".log"),
            command=command,
            is_finished=lambda: (folder / SUMMARY).exists(),
            record=lambda: self.record(cell),
            is_ready=is_ready,
        )

    def record(self, cell: FineTuning) -> str:
        """Write the line of a finished run, remove its folder, and say what it found."""
        folder = self.runs / cell.name
        summary = read_json(folder / SUMMARY, RESTORE[SUMMARY])
        origin = read_json(folder / PROVENANCE, RESTORE[PROVENANCE])
        metrics = {name: summary[f"eval_{name}"] for name in (*TASKS[cell.task].metrics, "loss")}
        kept = ("attention", "options", "learning_rate", "trials", "train_examples", "eval_examples", "steps", "tokens")
        line = {"method": cell.method, "task": cell.task, "seed": cell.seed, "metrics": metrics}
        line |= {name: summary[name] for name in (*kept, "seconds", "parameters") if name in summary}
        line |= {"epochs": PRETRAINED[cell.task]["epochs"], "precision": GlueConfig.PRESETS["pretrained"]["precision"]}
        if cell.method != "softmax":
            line["linearize"] = self._linearized(cell)
        line |= {"model": self.model.name, "command": self._plain(origin["command"])}
        line |= {name: origin[name] for name in ("commit", "machine", "threads", "torch")}
        others = [x for x in self.lines() if (x["method"], x["task"], x["seed"]) != (cell.method, cell.task, cell.seed)]
        write_lines(self.result, [*others, line])
        shutil.rmtree(folder)
        return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None)

    def _linearized(self, cell: FineTuning) -> dict[str, Any]:
        """Steps and tokens of stage one, and what was kept of the embeddings of held-out text."""
        report = read_json(self.linear(cell) / "report.json", REMAKE)
        settings, kept = report["settings"], list(report["kept"].values())[-1][-1]
        steps = {f"{stage}_steps": settings[f"{stage}_steps"] for stage in STEPS}
        tokens = sum(steps.values()) * settings["batch_tokens"]
        return (
            steps
            | {"tokens": tokens, "length": settings["length"]}
            | {x: kept[x] for x in ("cosine", "rank_correlation") if x in kept}
        )

    def _data(self) -> list[str]:
        return [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]

    def _plain(self, command: str) -> str:
        """A command without the paths of this machine."""
        for path, name in ((self.runs, "runs/table1"), (self.model, "MODEL"), (self.data_dir, "DATA")):
            command = command if path is None else command.replace(str(path), name)
        return command


@dataclass
class Clock:
    """How long the rest will take: tokens by a measured speed at first, then by the time that finished jobs took."""

    costs: dict[str, float]
    seconds_of_a_token: float
    side_by_side: int
    spent: float = 0.0  # seconds of finished jobs
    done: float = 0.0  # their tokens

    def on_end(self, job: Planned, seconds: float) -> None:
        self.done += self.costs.pop(job.name)
        self.spent += seconds
        self.print_time_left()

    def print_time_left(self) -> None:
        pace = self.spent / self.done if self.done else self.seconds_of_a_token
        hours = sum(self.costs.values()) * pace / self.side_by_side / 3600
        errors.print(f"{len(self.costs)} jobs to go, about {hours:.1f} hours")


def fine_tuning_cost(cell: FineTuning, *, tries_rates: bool) -> float:
    """Of a run, in tokens of training."""
    task, preset = cell.task, GlueConfig.PRESETS["pretrained"]
    budget = PRETRAINED[task]
    examples = min(budget["train_examples"], TRAINING.get(task, budget["train_examples"])) * budget["epochs"]
    trials = len(preset["rates"]) * preset["trial_share"] if tries_rates else 0.0
    validation = budget.get("eval_examples") or VALIDATION[task]
    return float(TOKENS[task] * (examples * (1 + trials) + FORWARD * validation))


def linearizing_cost() -> float:
    """Of stage one, in tokens of training: the teacher runs forward, and what is kept is measured."""
    return (1 + FORWARD) * sum(STEPS.values()) * BATCH_TOKENS + 100_000


def seconds_of_a_token(model: Path, threads: int) -> float:
    """The time of a token in a training step of the model as it is, from a few steps of 32 examples of 40 tokens."""
    import torch

    from lln.tasks.start import HuggingFaceModel

    start = HuggingFaceModel(str(model))
    network = start.build(GlueConfig.preset("pretrained", start=str(model), attention="softmax", seed=0), 2).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
    tokens = torch.randint(network.config.vocab_size, (32, min(40, start.length)))
    before, seconds = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for _ in range(4):
            began = time.perf_counter()
            network(input_ids=tokens, labels=torch.zeros(32, dtype=torch.long)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return median(seconds[1:]) / tokens.numel()
