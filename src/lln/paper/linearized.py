"""What pretrained models keep when `lln linearize` makes them linear: after each stage, and with which branches."""

from pathlib import Path

from lln.report.table import Table
from lln.results import machines, read_results

MADE_BY = "lln reproduce linearized --model FOLDER --data-dir DATA"
STAGES = {"calibrate": "calibrated, not trained", "align": "aligned", "join": "joined", "distil": "distilled"}
BRANCHES = {"both": "both branches", "far": "the far branch alone", "near": "the near branch alone", "none": "neither"}


def make(results: Path, file: str = "linearized") -> Table:
    found = read_results(results / f"{file}.jsonl", made_by=MADE_BY)
    rows = []
    for name, result in found.items():
        kept = [row for row in result.rows if row["stage"] not in ("pairs", "labelled")]
        pairs = [row for row in result.rows if row["stage"] == "pairs"]
        longest = max(row["length"] for row in kept)
        last = [row["stage"] for row in kept if row["stage"] in STAGES][-1]
        for row in kept:
            # What was kept in the end at every length but the shortest ones, and all else at the greatest.
            if row["length"] == longest or (row["stage"] == last and row["length"] >= longest // 4):
                what = STAGES.get(row["stage"]) or BRANCHES[row["branches"]]
                numbers = [f"{row[key]:.4f}" if key in row else "" for key in ("cosine", "rank_correlation")]
                losses = [f"{row[key]:.3f}" if key in row else "" for key in ("loss", "softmax_loss")]
                rows.append([f"{name}: {what}", f"{row['length']:,}", *numbers, *losses, ""])
        for row in pairs:
            score = f"{row['linear']:.4f} ({row['softmax']:.4f})"
            rows.append([f"{name}: {row['pairs']:,} labelled pairs", "", "", "", "", "", score])
    columns = [
        "model and attention",
        "tokens",
        "cosine",
        "rank correlation",
        "loss",
        "loss, softmax",
        "pairs (softmax)",
    ]
    notes = [f"{name}: {describe(result.settings)}" for name, result in found.items()]
    title = "What is kept of pretrained models, on text that nothing was fitted to"
    return Table(title, columns, rows, (*notes, machines(found.values())))


def describe(settings: object) -> str:
    """Steps and tokens of a run."""
    assert isinstance(settings, dict)
    if settings["steps"] == 0:
        return f"calibration on {settings['calibration_tokens']:,} tokens alone; seed {settings['seed']}."
    steps = ", ".join(f"{stage} {settings[f'{stage}_steps']}" for stage in ("align", "join", "distil"))
    return f"steps: {steps}, of {settings['batch_tokens']:,} tokens; seed {settings['seed']}."
