"""What the compiler reports on the Triton kernels, and the bounds that follow, as tables. Nothing in them is timed."""

from collections.abc import Mapping, Sequence
from typing import Any

from lln.report.table import Table
from lln.results import Result, Row

NOT_TIMED = "Compiled, not timed: a bound is the least time that a GPU could take, not a measurement."


def kernels_tables(result: Result) -> list[Table]:
    """Of each kernel and architecture the most registers, spills and shared memory of all variants."""
    header = ["kernel", "for", "variants", "tiles", "warps", "registers", "spilled bytes", "shared bytes", "occupancy"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in result.rows:
        groups.setdefault((row["kernel"], row["arch"]), []).append(row)
    rows = [
        [
            *(kernel.removesuffix("_kernel"), arch, str(len(some))),
            *(_range(row[name] for row in some) for name in ("tile", "warps")),
            *(str(max(row[name] for row in some)) for name in ("registers", "spilled")),
            f"{max(row['shared'] for row in some):,}",
            f"{min(row['occupancy'] for row in some):.0%}",
        ]
        for (kernel, arch), some in sorted(groups.items())
    ]
    problems = sorted({row["problem"] for row in result.rows if row["problem"] is not None})
    counted = f"{len(result.rows):,} variants: no spills, shared memory within the limit."
    settings = result.settings
    title = f"Kernels, {', '.join(settings['dtypes'])}, head dimension {settings['head_dim']}"
    return [Table(title, header, rows, [NOT_TIMED, *(problems or [counted])])]


def _range(numbers: Any) -> str:
    ordered = sorted(numbers)
    return str(ordered[0]) if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def bounds_tables(result: Result, published: Mapping[str, Sequence[float | None]]) -> list[Table]:
    """The bounds of each GPU and dtype beside the `published` seconds of a training step."""
    header = ["tokens", "MB", "GFLOP", "bound (µs)", "of one read and write"]
    header += ["LLN, 12 layers, bound (ms)", "LLN, published step (s)"]
    header += ["LLN+Diag, 12 layers, bound (ms)", "LLN+Diag, published step (s)"]
    notes = [
        NOT_TIMED,
        "First columns: LLN forward of one layer. 12 layers: forward and backward of the attention alone; a published "
        "step is the training step of all of RoBERTa-base on an A100, with all that is not attention.",
    ]
    groups: dict[str, list[Row]] = {}
    for row in result.rows:
        sizes = f"batch 1, {row['heads']} heads of {row['head_dim']}, {row['dtype']}"
        groups.setdefault(f"Bounds on {row['gpu']}: {sizes}", []).append(row)
    return [Table(title, header, _bound_lines(rows, published), notes) for title, rows in groups.items()]


def _bound_lines(rows: Sequence[Row], published: Mapping[str, Sequence[float | None]]) -> list[list[str]]:
    return [
        [
            f"{row['tokens']:,}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['operations'] / 1e9:.2f}",
            f"{row['seconds'] * 1e6:.0f}",
            f"{row['of_once']:.2f}",
            f"{row['lln_seconds'] * 1e3:.2f}",
            str(published["lln"][place]),
            "-" if row["lln_diag_seconds"] is None else f"{row['lln_diag_seconds'] * 1e3:.2f}",
            str(published["lln_diag"][place]),
        ]
        for place, row in enumerate(rows)
    ]
