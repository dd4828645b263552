"""What tables 4 and 5 share: the methods and the tasks of the Long Range Arena as the paper has them."""

from collections.abc import Iterable, Mapping
from typing import Any

PUBLISHED_TASKS = ("text", "listops", "retrieval", "pathfinder", "image")  # the order of the published numbers
TITLES = {
    "softmax_explicit": "Softmax (explicit)",
    "softmax": "Softmax",
    "reformer": "Reformer",
    "performer": "Performer",
    "skyformer": "Skyformer",
    "nystrom": "Nyströmformer",
    "lln": "LLN",
    "lln_diag": "LLN + Diag",
}
MISSING = "-"


def measured_on(origins: Iterable[Mapping[str, Any]]) -> str:
    origins = list(origins)
    processors = sorted({origin["machine"]["processor"] for origin in origins})
    threads, versions, commits = (sorted({str(x[key]) for x in origins}) for key in ("threads", "torch", "commit"))
    return (
        f"Measured on {', '.join(processors)}, threads: {', '.join(threads)}, torch {', '.join(versions)}, "
        f"commit {', '.join(commits)}."
    )


def number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"
