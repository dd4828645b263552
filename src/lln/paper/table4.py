"""Table 4: what training on the Long Range Arena costs, the published numbers beside ours."""

from pathlib import Path

from lln.paper.lra_tables import MISSING, PUBLISHED_TASKS, TITLES, measured_on, number
from lln.report.table import Table
from lln.results import chosen_results
from lln.tasks.lra.registry import TASKS

MADE_BY = "lln bench lra --out results/table4.jsonl"
RUN = "lra"
OURS = "lln_diag"
# Seconds and MB of training on one GPU, in the order of `PUBLISHED_TASKS`. The paper's softmax holds the whole matrix.
PUBLISHED_SECONDS = {
    "softmax_explicit": (21468, 5905, 21866, 6754, 13228),
    "reformer": (4610, 2439, 4714, 4694, 8737),
    "performer": (3456, 1966, 3761, 3553, 13169),
    "skyformer": (4523, 2970, 5602, 5240, 9347),
    "lln_diag": (3043, 1774, 3135, 3042, 4053),
}
PUBLISHED_MEGABYTES = {
    "softmax_explicit": (17108, 4458, 8934, 4817, 9632),
    "reformer": (3261, 1631, 3008, 3258, 6514),
    "performer": (2176, 1122, 2178, 2180, 4353),
    "skyformer": (3068, 1697, 2974, 4041, 8079),
    "lln_diag": (1641, 821, 1586, 1639, 3276),
}


def make(results: Path, file: str = "table4") -> Table:
    """Time and memory of training, as multiples of LLN + Diag's."""
    result = chosen_results(results / f"{file}.jsonl", [RUN], made_by=MADE_BY)[RUN]
    cost = {(row["task"], row["method"]): row for row in result.rows}
    tasks = [task for task in TASKS if task in PUBLISHED_TASKS or (task, OURS) in cost]
    rows = []
    for quantity, published, key in (
        ("time", PUBLISHED_SECONDS, "milliseconds"),
        ("memory", PUBLISHED_MEGABYTES, "peak_bytes"),
    ):
        base = dict(zip(PUBLISHED_TASKS, published[OURS], strict=True))
        for method, title in TITLES.items():
            cells = []
            theirs = dict(zip(PUBLISHED_TASKS, published.get(method, ()), strict=False))
            for task in tasks:
                ratio = theirs[task] / base[task] if task in theirs else None
                row, own = cost.get((task, method)), cost.get((task, OURS))
                cells.append(f"{number(ratio)} / {number(row[key] / own[key] if row and own else None)}")
            rows.append([f"{title}, {quantity}", *cells])
    ours = [cost.get((task, OURS)) for task in tasks]
    rows.append(["LLN + Diag, ms a step", *(f"{row['milliseconds']:.0f}" if row else MISSING for row in ours)])
    rows.append(["LLN + Diag, MiB a step", *(f"{row['peak_bytes'] / 2**20:.0f}" if row else MISSING for row in ours)])
    batches = ", ".join(f"{task} {row['batch']}" for task, row in zip(tasks, ours, strict=True) if row)
    return Table(
        title="Table 4: what training costs, published / ours, as multiples of LLN + Diag",
        columns=["", *(TASKS[task].title for task in tasks)],
        rows=rows,
        notes=[
            "Published: whole training on a GPU, in float16 around attention. Ours: one training step in float32 on "
            f"full-length inputs, examples in a step: {batches}. Softmax (explicit) holds the N x N matrix, as the "
            "paper's baseline; Softmax is torch's scaled_dot_product_attention.",
            measured_on([result.origin]),
        ],
    )
