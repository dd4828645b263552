"""What the paper's table 1 is made of: methods, cells, budgets, and what each run costs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lln import zoo
from lln.linearize.config import LinearizeConfig
from lln.provenance import read_json
from lln.tasks.presets import GLUE_TASKS, PRETRAINED, GlueConfig
from lln.tasks.schedule import Planned
from lln.terminal import errors

REMAKE = "remove the folder, and the command makes it anew"


@dataclass(frozen=True)
class Method:
    """A row of the table: a mechanism, and the options that differ from those that `lln linearize` takes by itself."""

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def stage_steps(self, steps: Mapping[str, int]) -> dict[str, int]:
        """The steps of each stage, as many in all as `steps` has.

        Those of a stage with nothing to train go to distillation, or to alignment where that has all others.
        """
        from lln.linearize.stages import share_parameters

        options = LinearizeConfig(attention=self.attention, options=self.options).all_options(is_causal=False)
        mechanism = zoo.build(self.attention, num_heads=2, head_dim=8, max_len=64, **options)
        shares = {id(x) for x in share_parameters(mechanism)}
        useful = {"align": any(id(x) not in shares for x in mechanism.parameters()), "join": bool(shares)}
        used = {stage: count if useful.get(stage, True) else 0 for stage, count in steps.items()}
        last = "distil" if used["distil"] or not used["align"] else "align"
        return used | {last: used[last] + sum(steps.values()) - sum(used.values())}

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


@dataclass(frozen=True)
class Schedule:
    """The steps of each stage of `lln linearize`, and the learning rate of the weights in distillation."""

    steps: Mapping[str, int]
    rate: float

    @property
    def trial(self) -> "Schedule":
        """The same in half of the steps."""
        return Schedule({stage: count // 2 for stage, count in self.steps.items()}, self.rate)

    @property
    def flags(self) -> list[str]:
        """Of the rates: mechanisms learn ten times as fast as weights."""
        return ["--distil-rate", repr(self.rate), "--distil-feature-rate", f"{10 * self.rate:g}"]


PAPER = {"form": "paper", "statistics": "live", "projection": False, "signed": False}
METHODS = {
    "softmax": Method("softmax"),
    # Blocks, as the paper's layer has: the first token, by which a classifier decides, has 64 neighbours in its block,
    # and 33 in a window as large. On held-out training examples of QNLI predictions diverge a seventh as much.
    "lln_diag_ours": Method("lln_diag", {"near": "blocks"}),
    "lln_ours": Method("lln", {"feature_dim": 128}),
    "hedgehog": Method("hedgehog"),
    "elu": Method("elu"),
    "lln_diag": Method("lln_diag", PAPER | {"near": "blocks", "combine": "average"}),
    "lln": Method("lln", PAPER),
    **{name: Method(name) for name in ("performer", "cosformer", "nystrom", "longformer", "transformer_ls", "flash")},
    **{name: Method(name) for name in ("transnormer_t1", "transnormer_t2", "tnn", "reformer")},
}
SEVEN = tuple(METHODS)[:7]  # run on all tasks, with three seeds
OF_THE_PAPER = ("mnli", "qnli", "qqp", "sst2")  # run for every method
EIGHT = tuple(task for task in GLUE_TASKS if task != "imdb")
SEEDS = (0, 1, 2)

# Stage two. Every method tries both on TRIAL_TASK in half of the steps, and is judged by held-out training examples:
# where alignment leaves nearly no error, distillation adds some, because Adam's steps do not shrink with the gradients.
# A mechanism that has nothing to align has all steps in distillation, and so two rates.
SCHEDULES = {
    "align": Schedule({"align": 350, "join": 20, "distil": 0}, 3e-4),
    "distil": Schedule({"align": 150, "join": 20, "distil": 200}, 1e-4),
}
ALL_STEPS = 370
BATCH_TOKENS = 1024
LINEARIZE = ("--batch-tokens", str(BATCH_TOKENS), "--precision", "bf16", "--cost-tokens", "0")
TRIAL_TASK, TRIAL_EXAMPLES = "qnli", 400
# For estimates of time: tokens of an example with padding, and validation examples, of all-MiniLM-L6-v2 and the data
# that the recorded results were made with; training examples where there are fewer than the budget.
TOKENS = {"mnli": 43, "qnli": 54, "qqp": 36, "sst2": 18, "cola": 15, "mrpc": 57, "rte": 70, "stsb": 33, "imdb": 286}
VALIDATION = {"mnli": 7468, "qnli": 5463, "qqp": 7598, "sst2": 872, "cola": 1043, "mrpc": 408, "rte": 277, "stsb": 1500}
TRAINING = {"mrpc": 3667, "rte": 2490, "stsb": 5749}
FORWARD = 0.3  # the time of a token without gradients, as a share of a training step's


@dataclass(frozen=True)
class Cell:
    """One cell of the table with one seed."""

    method: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.task}-seed{self.seed}"

    @property
    def softmax(self) -> "Cell":
        """The fine-tuned model with softmax attention that this one starts from."""
        return Cell("softmax", self.task, self.seed)

    @property
    def learned(self) -> list[str]:
        """What `lln linearize` learns from: as many examples, and as long ones, as the model was fine-tuned on."""
        budget = PRETRAINED[self.task]
        length = budget.get("max_length", GlueConfig.max_length)
        return ["--examples", str(budget["train_examples"]), "--length", str(length)]

    @property
    def measured(self) -> list[str]:
        """What `lln linearize` measures on: the examples that the fine-tuned model was measured on."""
        count = PRETRAINED[self.task].get("eval_examples")
        return [] if count is None else ["--eval-examples", str(count)]


def cells() -> list[Cell]:
    """All of them, the most important ones first."""
    others = [method for method in METHODS if method not in SEVEN]
    return [
        *(Cell(method, task, 0) for method in SEVEN for task in EIGHT),
        *(Cell(method, "imdb", 0) for method in SEVEN),
        *(Cell(method, task, 0) for method in others for task in OF_THE_PAPER),
        *(Cell(method, task, seed) for seed in SEEDS[1:] for method in SEVEN for task in (*EIGHT, "imdb")),
    ]


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


def fine_tuning_cost(cell: Cell) -> float:
    """Of stage one, in tokens of training: trials of rates, training, and the validation examples."""
    task, preset = cell.task, GlueConfig.PRESETS["pretrained"]
    budget = PRETRAINED[task]
    examples = min(budget["train_examples"], TRAINING.get(task, budget["train_examples"])) * budget["epochs"]
    return float(TOKENS[task] * (examples * (1 + len(preset["rates"]) * preset["trial_share"]) + _measuring(task)))


def linearizing_cost(cell: Cell, steps: int = ALL_STEPS) -> float:
    """Of stage two, in tokens of training: both models run forward on the examples that are learned and measured."""
    return (1 + FORWARD) * steps * BATCH_TOKENS + 2 * TOKENS[cell.task] * _measuring(cell.task)


def learned_tokens(method: str, schedule: str) -> dict[str, int]:
    """The steps of each stage, and the tokens in all of them."""
    steps = METHODS[method].stage_steps(SCHEDULES[schedule].steps)
    return {f"{stage}_steps": count for stage, count in steps.items()} | {"tokens": sum(steps.values()) * BATCH_TOKENS}


def _measuring(task: str) -> float:
    return float(FORWARD * (PRETRAINED[task].get("eval_examples") or VALIDATION[task]))


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
