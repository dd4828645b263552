"""The measured part of docs/speed.md."""

from collections.abc import Sequence
from pathlib import Path

from lln.paper import table2
from lln.report.goals import ATTENTION_GOALS, DECODE_GOALS, check, goals_table
from lln.report.speed import attention_tables, decode_tables
from lln.report.table import Table
from lln.results import Result, read_results

ATTENTION = {
    "attention-float32": "Attention, float32",
    "attention-float32-causal": "Causal attention, float32",
    "attention-bfloat16": "Attention, bfloat16",
}


def make(results: Path, file: str = "") -> str:
    """All measurements of a folder that there are in Markdown, each with its machine, commit and command."""
    attention, decode, model = (_read(results, name) for name in ("attention", "decode", "table2"))
    sections, outcomes = [], []
    for run, title in ATTENTION.items():
        if (result := attention.get(run)) is not None:
            tables = attention_tables(result)
            if run == "attention-float32":
                outcomes += check(ATTENTION_GOALS, result)
            else:
                tables = [table for table in tables if "median time" in table.title or "SDPA" in table.title]
            sections.append(_section(title, result, tables))
    for result in decode.values():
        outcomes += check(DECODE_GOALS, result)
        sections.append(_section("One more token", result, decode_tables(result)))
    for result in model.values():
        sections.append(_section("Table 2: a training step of RoBERTa-base", result, table2.parts(result)))
    if outcomes:
        sections.insert(0, f"### Goals\n\n{goals_table(outcomes).markdown()}")
    return "\n".join(sections) or "Nothing has been measured yet.\n"


def _read(results: Path, name: str) -> dict[str, Result]:
    path = results / f"{name}.jsonl"
    return read_results(path, made_by="lln bench") if path.exists() else {}


def _section(title: str, result: Result, tables: Sequence[Table]) -> str:
    origin = result.origin
    machine = f"{origin['machine']['processor']}, {origin['threads']} threads, torch {origin['torch']}"
    kernel = origin.get("kernel", {}).get("explained") or "no compiled kernel"
    head = f"`{origin['command']}` on {machine}, commit {origin['commit']}; {kernel}."
    noisy = "" if all(run["quiet"] for run in origin["noise"]) else " Other programs were running: times are too long."
    return f"### {title}\n\n{head}{noisy}\n\n" + "\n".join(table.markdown() for table in tables)
