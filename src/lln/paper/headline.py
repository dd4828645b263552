"""What the README shows first: time and quality against softmax attention, as a table and a picture.

Both are made of what is recorded. A result that is missing leaves its row, cell or bar out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln.paper import table1
from lln.paper.speed import recorded
from lln.report.speed import short
from lln.report.speed_styles import attention_label, attention_style
from lln.report.table import Table
from lln.results import Result, Row, machines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTENTION = "attention-float32"  # the run that times are taken from
SHOWN = ("softmax", "lln", "lln_diag")
MODELS = {"minilm": "all-MiniLM-L6-v2", "stories15m": "stories15M", "smollm2": "SmolLM2-135M"}
STATES = {"calibrate": "calibrated, not trained", "distil": "trained"}
COLUMNS = ["", "softmax", "LLN", "LLN+Diag", "more"]
# Rows of table 1 that stand for the columns: those of our forms where there are any, else the paper's.
GLUE = {"lln": ("lln_ours", "lln"), "lln_diag": ("lln_diag_ours", "lln_diag")}


def make(results: Path) -> Table:
    """The table of headline numbers; its links lead to pages from the folder above docs."""
    rows = [*_speed(results), *_decoding(results), *_kept(results), *_glue(results)]
    return Table("Measured; in brackets, how many times less than softmax", COLUMNS, rows, _notes(results))


def picture_rows(results: Path) -> list[dict[str, Any]]:
    """The numbers of the picture: times over tokens, and what is kept of softmax attention."""
    rows: list[dict[str, Any]] = []
    if (run := recorded(results, "attention").get(ATTENTION)) is not None:
        rows += [
            {"part": "time", "name": row["mechanism"], "tokens": row["tokens"], "value": float(row["milliseconds"])}
            for row in run.rows
            if row["pass"] == "forward" and row["mechanism"] in SHOWN and "milliseconds" in row
        ]
    for (model, state, method), row in kept(results).items():
        if "cosine" in row:
            name = f"{attention_label(method)}, {STATES[state]}: {MODELS.get(model, model)}, cosine"
            rows.append({"part": "kept", "name": name, "tokens": row["length"], "value": float(row["cosine"])})
    for method, share in glue_shares(results).items():
        name = f"{attention_label(method)}, fine-tuned: GLUE, score"
        rows.append({"part": "kept", "name": name, "tokens": "", "value": share})
    return rows


def draw(results: Path) -> "Figure":
    """Time over the number of tokens on the left, what is kept of softmax attention on the right."""
    from lln.report.plot import BLUE, PURPLE, panels, style

    rows = picture_rows(results)
    with style():
        title = "LLN attention against softmax attention"
        figure, (time, quality) = panels(_times(results), title, 2, size=(10.0, 3.9))
        for name in SHOWN:
            mine = [row for row in rows if row["part"] == "time" and row["name"] == name]
            attention_style(name).plot(time, [row["tokens"] for row in mine], [row["value"] for row in mine])
        time.set(xlabel="tokens", ylabel="time of a forward pass [ms]", xscale="log", yscale="log")
        lengths = sorted({row["tokens"] for row in rows if row["part"] == "time"})
        time.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        time.minorticks_off()
        time.set_title("Time, lower is better")
        time.legend()
        bars = [row for row in rows if row["part"] == "kept"][::-1]
        for place, row in enumerate(bars):
            color, text = (PURPLE, "black") if row["name"].startswith("LLN+Diag") else (BLUE, "white")
            quality.barh(place, row["value"], color=color, height=0.6)
            quality.text(0.02, place, f"{row['value']:.3f}", color=text, va="center", fontweight="bold")
        quality.set_yticks(range(len(bars)), [row["name"].replace(": ", "\n") for row in bars])
        quality.axvline(1.0, color="black", linewidth=1.2)
        quality.set(xlim=(0.0, 1.02), xlabel="softmax attention = 1")
        quality.grid(axis="y", visible=False)
        quality.set_title("What is kept of a pretrained model")
    return figure


def kept(results: Path) -> dict[tuple[str, str, str], Row]:
    """What a linearised model keeps at its greatest length, by model, state of training and method."""
    found: dict[tuple[str, str, str], Row] = {}
    for name, result in recorded(results, "linearized").items():
        model, _, method = name.removesuffix("-calibrated").partition("-")
        for state in STATES:
            rows = [row for row in result.rows if row["stage"] == state]
            if rows and method in SHOWN:
                found.setdefault((model, state, method), max(rows, key=lambda row: row["length"]))
    order = {key: place for place, key in enumerate([*STATES, *SHOWN])}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], order[item[0][1]], order[item[0][2]])))


def glue_shares(results: Path) -> dict[str, float]:
    """Sum of the scores of eight GLUE tasks as a share of softmax attention's, of methods that have all of them."""
    found = {}
    for method, rows in GLUE.items():
        shares = [share for row in rows if (share := table1.share_of_softmax(results, row)) is not None]
        if shares:
            found[method] = shares[0]
    return found


def _speed(results: Path) -> Iterator[list[str]]:
    run = recorded(results, "attention").get(ATTENTION)
    for pass_, tokens in (("forward", 1024), ("forward", 16384), ("forward+backward", 4096)):
        times = _values(run, "milliseconds", pass_, tokens)
        yield from _row(f"attention of {tokens:,} tokens, {pass_} (ms)", times, "[speed](docs/speed.md)")


def _decoding(results: Path) -> Iterator[list[str]]:
    names = {"cache": "softmax", "lln": "lln", "lln_diag": "lln_diag"}
    for result in recorded(results, "decode").values():
        tokens = max(row["tokens"] for row in result.rows)
        last = {
            names[row["mechanism"]]: row for row in result.rows if row["tokens"] == tokens and row["mechanism"] in names
        }
        times = {name: row["milliseconds"] for name, row in last.items()}
        held = {name: row["held_bytes"] / 2**20 for name, row in last.items()}
        yield from _row(f"one more token after {tokens:,} (ms)", times, "[speed](docs/speed.md)")
        yield from _row(f"memory held after {tokens:,} tokens (MiB)", held, "[speed](docs/speed.md)")


def _kept(results: Path) -> Iterator[list[str]]:
    by_state: dict[tuple[str, str], dict[str, Row]] = {}
    for (model, state, method), row in kept(results).items():
        by_state.setdefault((model, state), {})[method] = row
    for (model, state), rows in by_state.items():
        one = next(iter(rows.values()))
        title = f"{MODELS.get(model, model)}, {STATES[state]}, {one['length']:,} tokens"
        if "cosine" in one:
            numbers = {"softmax": "1"} | {method: f"{row['cosine']:.3f}" for method, row in rows.items()}
            title += ": cosine of the embeddings with softmax's"
        else:
            numbers = {method: f"{row['loss']:.3f}" for method, row in rows.items()}
            numbers["softmax"] = f"{one['softmax_loss']:.3f}"
            title += ": loss of the next token"
        yield [title, *(numbers.get(name, "-") for name in SHOWN), "[linearise](docs/linearize.md)"]


def _glue(results: Path) -> Iterator[list[str]]:
    if shares := glue_shares(results):
        numbers = {"softmax": "100%"} | {method: f"{share:.1%}" for method, share in shares.items()}
        title = "GLUE, 8 tasks, all-MiniLM-L6-v2 fine-tuned, then made linear: share of softmax's score"
        yield [title, *(numbers.get(name, "-") for name in SHOWN), "[results](docs/results.md)"]


def _row(title: str, values: Mapping[str, float], link: str) -> Iterator[list[str]]:
    """Values, each but softmax's with how many times it fits into that."""
    if len(values) < 2 or "softmax" not in values:
        return
    cells = []
    for name in SHOWN:
        value = values.get(name)
        less = "" if name == "softmax" or not value else f" ({short(values['softmax'] / value)}x)"
        cells.append("-" if value is None else f"{short(value)}{less}")
    yield [title, *cells, link]


def _values(run: Result | None, quantity: str, pass_: str, tokens: int) -> dict[str, float]:
    rows: Sequence[Row] = [] if run is None else run.rows
    chosen = (row for row in rows if (row["pass"], row["tokens"]) == (pass_, tokens) and row["mechanism"] in SHOWN)
    return {row["mechanism"]: row[quantity] for row in chosen if row.get(quantity) is not None}


def _times(results: Path) -> str:
    """Where the times of attention come from."""
    run = recorded(results, "attention").get(ATTENTION)
    if run is None:
        return "No times are recorded."
    setting = run.settings
    return (
        f"Attention: batch 1, {setting['heads']} heads of {setting['head_dim']}, {setting['dtype']}, {_origin([run])}."
    )


def _notes(results: Path) -> list[str]:
    """Where each part of the table comes from."""
    notes = [f"{_times(results)} Softmax is torch's `scaled_dot_product_attention`, in decoding over a cache."]
    if decoding := list(recorded(results, "decode").values()):
        notes.append(f"One more token: {_origin(decoding)}.")
    if linear := {name: run for name, run in recorded(results, "linearized").items() if name in _shown_runs(results)}:
        notes.append(
            f"Models: {_origin(linear.values())}. Their layers are those that `lln linearize` makes, not the "
            "ones timed above: the decomposed form with learned projections, LLN+Diag with a window and a gate."
        )
    if glue_shares(results):
        notes.append(
            f"GLUE: {table1.origin(results)}. LLN+Diag has blocks of 64 there, and is softmax attention in the "
            "examples that fit into one, which most do."
        )
    return notes


def _origin(runs: Iterable[Result]) -> str:
    runs = list(runs)
    noise = [part for run in runs for part in run.origin.get("noise", ())]
    quiet = "" if all(part["quiet"] for part in noise) else ", other programs were running"
    return f"{machines(runs)}{quiet}"


def _shown_runs(results: Path) -> set[str]:
    """Names of the runs that rows about models are from."""
    return {f"{model}-{method}{end}" for model, _, method in kept(results) for end in ("", "-calibrated")}
