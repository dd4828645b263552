"""Measurements of speed in the documentation: a summary, all tables, and the goals of development; and what is known
of GPUs without one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lln.paper import table2
from lln.report.goals import ATTENTION_GOALS, DECODE_GOALS, check, goals_table
from lln.report.kernels import bounds_tables, kernels_tables
from lln.report.speed import attention_tables, decode_tables, ratio_tables, short
from lln.report.speed_styles import attention_label
from lln.report.table import Table
from lln.results import Result, machines, read_results

ATTENTION = {
    "attention-float32": "Attention, float32",
    "attention-float32-causal": "Causal attention, float32",
    "attention-bfloat16": "Attention, bfloat16",
}


NOTHING = "Nothing has been measured yet.\n"


def make(results: Path) -> str:
    """All measurements of a folder that there are in Markdown, each with its machine, commit and command."""
    attention, decode, model = (recorded(results, name) for name in ("attention", "decode", "table2"))
    sections = []
    for run, title in ATTENTION.items():
        if (result := attention.get(run)) is not None:
            tables = attention_tables(result)
            if run != "attention-float32":
                tables = [table for table in tables if "median time" in table.title or "SDPA" in table.title]
            sections.append(_section(title, result, tables))
    for result in decode.values():
        sections.append(_section("One more token", result, decode_tables(result)))
    for result in model.values():
        sections.append(_section("Table 2: a training step of RoBERTa-base", result, table2.parts(result)))
    return "\n".join(sections) or NOTHING


def goals(results: Path) -> str:
    """Which goals of development the measurements reach."""
    outcomes = []
    if (result := recorded(results, "attention").get("attention-float32")) is not None:
        outcomes += check(ATTENTION_GOALS, result)
    for result in recorded(results, "decode").values():
        outcomes += check(DECODE_GOALS, result)
    sections = [goals_table(outcomes).markdown()] if outcomes else []
    for name, result in recorded(results, "spine").items():
        sections.append(_section(f"Ratios: {name}", result, ratio_tables(result)))
    return "\n".join(sections) or NOTHING


def kernels(results: Path) -> str:
    """Kernels for GPUs as they are compiled, and bounds of their time."""
    found = recorded(results, "kernels")
    if not {"kernels", "bounds"} <= set(found):
        return "Nothing has been compiled yet.\n"
    tables = bounds_tables(found["bounds"], table2.PUBLISHED_SECONDS) + kernels_tables(found["kernels"])
    origin, settings = found["kernels"].origin, found["kernels"].settings
    head = f"`{origin['command']}`, commit {origin['commit']}, Triton {settings['triton']}, without a GPU.\n"
    return "\n".join([head, *(table.markdown() for table in tables)])


def summary(results: Path) -> str:
    """LLN and LLN+Diag beside softmax attention, at all lengths: times, and how many times as fast."""
    tables = []
    if (result := recorded(results, "attention").get("attention-float32")) is not None:
        for pass_ in dict.fromkeys(row["pass"] for row in result.rows):
            times = {
                (row["mechanism"], row["tokens"]): row["milliseconds"]
                for row in result.rows
                if row["pass"] == pass_ and "milliseconds" in row
            }
            tables.append(_beside_softmax(f"Attention, {pass_}, median time (ms)", times, "softmax", result))
    for result in recorded(results, "decode").values():
        times = {(row["mechanism"], row["tokens"]): row["milliseconds"] for row in result.rows}
        tables.append(_beside_softmax("One more token after a context, median time (ms)", times, "cache", result))
    return "\n".join(table.markdown() for table in tables) or NOTHING


def _beside_softmax(title: str, times: Mapping[tuple[str, int], float], softmax: str, result: Result) -> Table:
    lengths = sorted({tokens for _, tokens in times})

    def cells(value: Callable[[int], float | None]) -> list[str]:
        return ["-" if (found := value(tokens)) is None else short(found) for tokens in lengths]

    rows = [["softmax", *cells(lambda tokens: times.get((softmax, tokens)))]]
    for name in ("lln", "lln_diag"):
        label = attention_label(name)

        def speed(tokens: int, name: str = name) -> float | None:
            ours, theirs = times.get((name, tokens)), times.get((softmax, tokens))
            return theirs / ours if ours and theirs else None

        rows.append([label, *cells(lambda tokens, name=name: times.get((name, tokens)))])  # type: ignore[misc]
        rows.append([f"{label}: times as fast", *cells(speed)])
    return Table(
        title, ["tokens", *(f"{tokens:,}" for tokens in lengths)], rows, [f"{machines([result])}.{_noise(result)}"]
    )


def recorded(results: Path, name: str) -> dict[str, Result]:
    """The runs of a result file, none if there is no such file."""
    path = results / f"{name}.jsonl"
    return read_results(path, made_by="lln bench") if path.exists() else {}


def _section(title: str, result: Result, tables: Sequence[Table]) -> str:
    origin = result.origin
    machine = f"{origin['machine']['processor']}, {origin['threads']} threads, torch {origin['torch']}"
    kernel = origin.get("kernel", {}).get("explained") or "no compiled kernel"
    head = f"`{origin['command']}` on {machine}, commit {origin['commit']}; {kernel}."
    return f"### {title}\n\n{head}{_noise(result)}\n\n" + "\n".join(table.markdown() for table in tables)


def _noise(result: Result) -> str:
    is_quiet = all(run["quiet"] for run in result.origin.get("noise", ()))
    return "" if is_quiet else " Other programs were running: times are too long."
