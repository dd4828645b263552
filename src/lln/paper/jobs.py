"""The runs behind tables and figures: what `lln reproduce` starts, one `lln train ...` for each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lln.zoo import describe

Run = TypeVar("Run")

# The paper's LLN+Diag.
AVERAGE = ("lln_diag", "--option", "combine=average")
# LLN+Diag whose heads learn how much they take of LLN, and begin with little.
LEARNED_SHARE = ("lln_diag", "--option", "combine=ratio", "--option", "share=0.1")
# LLN+Diag with a window, in the further forms: by the paper's average, and with shares that are estimated, not learned.
WINDOW = ("lln_diag", "--option", "near=window")
# What is compared: the name in runs, and the attention with its options.
ATTENTIONS = {
    **{name: (name,) for name in ("softmax", "lln", "elu", "performer", "nystrom", "cosformer", "linformer")},
    "lln_diag": AVERAGE,
    "lln_diag_learned": LEARNED_SHARE,
    "lln_diag_unbiased": (*WINDOW, "--option", "combine=average", "--option", "form=unbiased"),
    "lln_diag_decomposed": (*WINDOW, "--option", "combine=average", "--option", "form=decomposed"),
    "lln_diag_mass": (*WINDOW, "--option", "combine=mass", "--option", "form=unbiased"),
}
# What a table adds to an attention beside the title of its mechanism.
VARIANTS = {
    "lln_diag_learned": "learned share",
    "lln_diag_unbiased": "unbiased, window",
    "lln_diag_decomposed": "decomposed, window",
    "lln_diag_mass": "unbiased, window, estimated share",
}
# float16 has no fast path on most CPUs: these runs are short, and the loss scale grows fast enough to find its limit.
SHORT_HALF = ("--precision", "fp16", "--steps", "200", "--batch-size", "4", "--scale-window", "10", "--log-every", "1")


@dataclass(frozen=True)
class Job:
    """One run: `lln train ARGUMENTS`. `after` names the run that it starts from.

    `method`, `task` and `seed` are what `lln reproduce --method ... --task ... --seed ...` chooses by.
    """

    name: str
    arguments: tuple[str, ...]
    after: str | None = None
    method: str = ""
    task: str = ""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `lln reproduce` takes beside its target.

    Args:
        runs: the folder for the run folders.
        results: the folder for the result files.
        data_dir: the data folder; left out, the environment variable LLN_DATA.
        side_by_side: runs at a time, which share the cores.
        methods: these methods alone.
        tasks: these tasks alone.
        seeds: these seeds alone.

    Raises:
        ValueError: no run is to run at a time.
    """

    runs: Path = Path("runs")
    results: Path = Path("results")
    data_dir: Path | None = None
    side_by_side: int = 2
    methods: Sequence[str] = ()
    tasks: Sequence[str] = ()
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.side_by_side < 1:
            raise ValueError(f"at least one job must run at a time, got {self.side_by_side}")

    def select(self, target: str, runs: Iterable[Run], *, hint: str = "") -> list[Run]:
        """The runs of the methods, tasks and seeds that are requested; all where none are named.

        Args:
            target: what the runs are behind, for messages.
            runs: anything with `method`, `task` and `seed`.
            hint: which combinations there are, for the message where none is left.

        Returns:
            The runs, in their order.

        Raises:
            ValueError: there is no such method, task or seed, or no run of all of them together.
        """
        found = list(runs)
        given: dict[str, Sequence[Any]] = {"method": self.methods, "task": self.tasks, "seed": self.seeds}
        for kind, values in given.items():
            names = [x for x in dict.fromkeys(getattr(run, kind) for run in found) if x != ""]
            for value in values:
                if value not in names:
                    there = f"; there are: {', '.join(map(str, names))}" if names else ""
                    raise ValueError(f"{target} has no {kind} {value}{there}")
        found = [run for run in found if all(not x or getattr(run, kind) in x for kind, x in given.items())]
        if not found:
            raise ValueError(f"{target} has no run of this method, task and seed together{hint}")
        return found


def vision(name: str, attention: str, *arguments: str) -> Job:
    return Job(f"vision-{name}", ("vision", "--attention", attention, *arguments), method=name)


def title_of(name: str) -> str:
    """What a table calls an attention of `ATTENTIONS`."""
    if name in VARIANTS:
        return f"{describe('lln_diag').title}, {VARIANTS[name]} (ours)"
    return describe(name).title
