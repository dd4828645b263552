"""What `lln bench distributed` has measured, and what a model fitted to it predicts for more processes and longer
sequences, beside ring attention and Ulysses.

The model: seconds = a N / P + b E (P - 1) + (c delay + e) E + d bytes / bandwidth, with E exchanges of a layer. a and b
are fitted to the time on a processor of each of several processes (one alone runs other code): other programs disturb
it less than they do the clock. c, at least 1, and e, the time until a process that waits is run again, are fitted to
what is left of the clock once the processes of one machine have waited for its processors. d is not fitted, because the
few bytes that LLN sends do not show in its time: it is what goes over the wire for each byte. The same coefficients are
taken for the other two, with their own messages and bytes and the quadratic time of softmax attention:

- ring attention: keys and values pass all processes, and in the backward pass they and their gradients;
- Ulysses: all-to-all from tokens to heads and back, for q, k, v and the output, and for their gradients. It needs at
  least as many heads as processes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.report.table import Table
from lln.results import Result, Row

PREDICTED_PROCESSES = (8, 16, 32, 64, 128, 256, 512, 1024)
PREDICTED_TOKENS = (1_000_000, 10_000_000, 100_000_000)
# Megabits a second of each process, and delay of a message in milliseconds.
PREDICTED_NETWORKS = {
    "1 Gbit/s, 0.2 ms": (1000, 0.2),
    "100 Mbit/s, 5 ms": (100, 5.0),
    "100 Gbit/s, 0.01 ms": (100_000, 0.01),
}
# Collectives of a layer, forward and backward: header, counts, means, squares, numbers; state there and back, twice.
EXCHANGES = 10
FEW = 16  # processes, with more of which the numbers are sent there and back, see `lln.distributed.statistics`
ATTENTIONS = ("lln", "ring", "ulysses")
LARGEST_ERROR = 0.25  # of a fit from which times of other sizes are predicted


def distributed_tables(result: Result) -> list[Table]:
    """Measurements, and if networks were among them, predictions."""
    rows, setting = result.rows, result.settings
    measured = [row for row in rows if "seconds" in row]
    is_quiet = all(x["quiet"] for x in result.origin.get("noise", []))
    measurements = Table(
        "One layer of attention, forward and backward",
        (
            "network",
            "attention",
            "processes",
            "heads",
            "tokens",
            *(["ms"] if is_quiet else []),
            "processor ms",
            "messages",
            "KB sent",
            "KB on the wire",
            "MB at peak",
        ),
        [
            (
                row["network"],
                row.get("attention", "lln"),
                str(row["processes"]),
                str(row["heads"]),
                f"{row['tokens']:,}",
                *([f"{row['seconds'] * 1e3:,.0f}"] if is_quiet else []),
                f"{row['cpu_seconds'] * 1e3:,.0f}",
                f"{row['messages']:.0f}",
                f"{row['sent_bytes'] / 1e3:,.1f}",
                f"{row['wire_bytes'] / 1e3:,.1f}" if row["wire_bytes"] else "",
                f"{row['peak_bytes'] / 1e6:,.0f}",
            )
            for row in measured
        ],
        (
            "All of it is of the process that has most."
            + ("" if is_quiet else " Other programs were at work, so times of the clock are left out."),
        ),
    )
    sizes = {"heads": setting["heads"], "width": setting["head_dim"]}
    used = [row for row in rows if row.get("heads", setting["heads"]) == setting["heads"]]
    if not any(row["megabits"] for row in used):
        return [measurements]
    fitted = fit(used, processors=result.origin["machine"]["cores"])
    has_times = fitted["error"] <= LARGEST_ERROR
    predicted = [row for row in predict(fitted, **sizes) if row["processes"] in (8, 64, 1024)]
    if not has_times:  # bytes do not depend on the network
        predicted = [row for row in predicted if row["network"] == next(iter(PREDICTED_NETWORKS))]
    what = {"bytes": "MB", "wire_seconds": "s wire", "seconds": "s in all"}
    shown = [(x, y) for y in (what if has_times else ("bytes",)) for x in ATTENTIONS]
    lines = [
        (
            *([row["network"]] if has_times else []),
            f"{row['tokens']:,}",
            str(row["processes"]),
            *(_number(row[f"{x}_{y}"], y) for x, y in shown),
        )
        for row in predicted
    ]
    verdict = (
        "" if has_times else f", more than {LARGEST_ERROR:.0%}: times are not predicted; repeat it on a quiet machine"
    )
    predictions = Table(
        f"Predicted for one layer of {sizes['heads']} heads of {sizes['width']}",
        (*(["network"] if has_times else []), "tokens", "processes", *(f"{x}, {what[y]}" for x, y in shown)),
        lines,
        (
            f"The model differs from the measurements by up to {fitted['error']:.0%}{verdict}.",
            "Ulysses needs a head a process.",
            ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()),
        ),
    )
    return [measurements, predictions]


def _number(x: float | None, what: str) -> str:
    return "" if x is None else f"{x / 1e6:,.1f}" if what == "bytes" else f"{x:,.2f}"


def fit(rows: Sequence[Row], *, processors: int) -> dict[str, float]:
    """The coefficients of the model from relative errors, and the largest relative error, `error`.

    Args:
        rows: measurements of several processes, with networks among them, and of softmax attention.
        processors: of the machine that all processes shared.
    """
    measured = [row for row in rows if "seconds" in row and row["processes"] > 1]
    work = torch.tensor([_work(row) for row in measured], dtype=torch.float64)
    cpu, seconds = (torch.tensor([row[x] for row in measured], dtype=torch.float64) for x in ("cpu_seconds", "seconds"))
    found = _least_squares(work / cpu[:, None], torch.ones_like(cpu))
    factor = max(row["wire_bytes"] / row["sent_bytes"] for row in measured if row["wire_bytes"])
    crowd = torch.tensor([max(1.0, row["processes"] / processors) for row in measured], dtype=torch.float64)
    transfer = [8 * row["sent_bytes"] / (1e6 * row["megabits"]) if row["megabits"] else 0.0 for row in measured]
    delay = [EXCHANGES * row["delay"] / 1e3 for row in measured]
    moved, delayed = (torch.tensor(x, dtype=torch.float64) for x in (transfer, delay))
    rest = (seconds - crowd * (work @ found) - factor * moved) / seconds
    waits = torch.stack((delayed, EXCHANGES * crowd), dim=1) / seconds[:, None]
    delays, wake = _least_squares(waits, rest)
    if delays < 1:
        delays = delays.new_tensor(1.0)
        wake = _least_squares(waits[:, 1:], rest - waits[:, 0])[0]
    error = float((waits @ torch.stack((delays, wake)) - rest).abs().max())
    softmax = [row["softmax_seconds"] / row["tokens"] ** 2 for row in rows if "softmax_seconds" in row]
    return {
        "seconds_per_token": float(found[0]),
        "seconds_per_message": float(found[1]),
        "delays_per_exchange": float(delays),
        "bandwidth_factor": factor,
        "seconds_per_exchange": float(wake),
        "error": error,
        "softmax_per_pair": softmax[0],
    }


def _least_squares(columns: Tensor, wanted: Tensor) -> Tensor:
    """Coefficients of at least 0; columns may differ by many orders of magnitude."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    unit = columns.amax(dim=0).clamp(min=1e-300)
    return torch.from_numpy(nnls((columns / unit).numpy(), wanted.numpy())[0]) / unit


def _work(row: Row) -> list[float]:
    """What a and b are multiplied with."""
    return [row["tokens"] / row["processes"], EXCHANGES * (row["processes"] - 1.0)]


def predict(fitted: dict[str, float], *, heads: int, width: int) -> Iterator[Row]:
    """Seconds and bytes of a layer, forward and backward, for the three attentions."""
    a, b, c, d, e = list(fitted.values())[:5]
    for network, (megabits, delay) in PREDICTED_NETWORKS.items():
        for tokens in PREDICTED_TOKENS:
            for size in PREDICTED_PROCESSES:
                row: dict[str, Any] = {"network": network, "tokens": tokens, "processes": size}
                for name, (exchanges, messages, numbers) in traffic(tokens, size, heads, width).items():
                    local = a * tokens / size if name == "lln" else fitted["softmax_per_pair"] * tokens**2 / size
                    wire = b * messages + (c * delay / 1e3 + e) * exchanges
                    wire += d * numbers * 32 / (megabits * 1e6)
                    row |= {f"{name}_bytes": 4 * numbers, f"{name}_wire_seconds": wire, f"{name}_seconds": local + wire}
                if size > heads:
                    row |= {f"ulysses_{x}": None for x in ("bytes", "wire_seconds", "seconds")}
                yield row


def traffic(tokens: int, size: int, heads: int, width: int) -> dict[str, tuple[float, float, float]]:
    """Exchanges, messages and numbers that each process sends in a layer, forward and backward."""
    share, part = (size - 1) / size, tokens / size
    state = heads * width * (width + 1)
    # Squares once, means and the state there and back, the state's gradients too; header and counts go to all.
    lln = share * (heads * width * (width + 1) + 4 * heads * width + 4 * state) + (size - 1) * 16
    lln += 8 * heads * (size - 1 if size <= FEW else 2 * share)
    exchanges = EXCHANGES + (size > FEW)
    ring_steps = size - 1
    return {
        "lln": (exchanges, exchanges * (size - 1), lln),
        "ring": (2 * ring_steps, 2 * ring_steps, 3 * ring_steps * part * heads * 2 * width),
        "ulysses": (8, 8 * (size - 1), 8 * share * part * heads * width),
    }
