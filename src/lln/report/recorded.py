"""Recorded runs as `lln reproduce` leaves them in the results folder: figures 1, 8, 9, 10 and tables mlm, 3."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lln.instruments.records import read_records
from lln.provenance import read_json
from lln.zoo import describe


@dataclass(frozen=True)
class Run:
    """What a finished run found."""

    name: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]  # lines of the training loss, and lines of evaluations
    records: list[dict[str, Any]]  # what the heads did

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric."""
        lines = [line for line in self.metrics if line.get(name) is not None]
        return [line["step"] for line in lines], [line[name] for line in lines]

    def layers(self, name: str) -> dict[str, tuple[list[int], list[float]]]:
        """Steps and values of what was recorded of each layer, the mean over its heads."""
        found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for record in self.records:
            if record.get(name) is not None:
                found[record["layer"]][record["step"]].append(record[name])
        return {
            layer: (sorted(steps), [fmean(steps[step]) for step in sorted(steps)]) for layer, steps in found.items()
        }


def read_run(results: Path, name: str, *, made_by: str) -> Run:
    """A run of the results; `made_by` is what `lln reproduce` calls the runs that it belongs to."""
    if not is_finished(results, name):
        raise ValueError(f"{results} has no run {name}; `lln reproduce {made_by}` makes it")
    return load_run(results / "runs" / name)


def load_run(folder: Path) -> Run:
    """A finished run, from its folder or from the small files of it that are kept as its result."""
    config, provenance, summary = (
        read_json(folder / f"{part}.json", "make the run anew, or copy the file from its run folder")
        for part in ("config", "provenance", "summary")
    )
    records = folder / "records.jsonl"
    return Run(
        folder.name,
        config,
        provenance,
        summary,
        read_records(folder / "metrics.jsonl"),
        read_records(records) if records.exists() else [],
    )


def is_finished(results: Path, name: str) -> bool:
    return (results / "runs" / name / "summary.json").is_file()


def title_of(name: str) -> str:
    """What a table calls the attention of a run, by the name that `lln reproduce` gives it."""
    if name == "lln_diag_learned":
        return f"{describe('lln_diag').title}, learned share (ours)"
    return describe(name).title


def origin(*runs: Run) -> str:
    """Machine and commits behind some runs, for the foot of a picture or table."""
    machines = sorted(
        {f"{run.provenance['machine']['cores']} cores of {run.provenance['machine']['processor']}" for run in runs}
    )
    commits = sorted({str(run.provenance["commit"]) for run in runs})
    seeds = sorted({run.config["seed"] for run in runs})
    return (
        f"{', '.join(machines)}, commit {', '.join(commits)}, "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    )
