"""What the compiler says of the Triton kernels, and the bounds that follow, as tables. Nothing in them is timed."""

from collections.abc import Mapping, Sequence
from typing import Any

from lln.report.table import Table

Row = Mapping[str, Any]
NOT_TIMED = "Compiled, not timed: a bound is the least time that a GPU could take, not a measurement."


def kernels_table(compiled: Sequence[Any], title: str) -> Table:
    """Registers, spills, shared memory and occupancy of `lln.bench.kernels.Compiled` kernels."""
    header = ["kernel", "for", "tile / warps / stages", "registers", "spilled bytes", "shared bytes", "occupancy"]
    rows = [
        [
            *(x.kernel, x.arch, f"{x.tile} / {x.warps} / {x.stages}", str(x.registers), str(x.stack)),
            *(f"{x.shared:,}", f"{x.occupancy:.0%}", x.problem or "none"),
        ]
        for x in compiled
    ]
    return Table(title, [*header, "problem"], rows, [NOT_TIMED])


def bounds_table(rows: Sequence[Row], published: Mapping[str, Sequence[float | None]], title: str) -> Table:
    """The rows of `lln.bench.kernels.bound_rows` beside the `published` seconds of a training step."""
    header = ["tokens", "MB", "GFLOP", "bound (µs)", "of one read and write", "strict"]
    header += ["LLN, 12 layers, bound (ms)", "LLN, published step (s)"]
    header += ["LLN+Diag, 12 layers, bound (ms)", "LLN+Diag, published step (s)"]
    lines = [
        [
            f"{row['tokens']:,}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['operations'] / 1e9:.2f}",
            f"{row['seconds'] * 1e6:.0f}",
            f"{row['of_once']:.2f}",
            f"{row['strict_of_once']:.2f}",
            f"{row['lln_seconds'] * 1e3:.2f}",
            str(published["lln"][place]),
            f"{row['lln_diag_seconds'] * 1e3:.2f}",
            str(published["lln_diag"][place]),
        ]
        for place, row in enumerate(rows)
    ]
    notes = [
        NOT_TIMED,
        "First columns: LLN forward of one layer. 12 layers: forward and backward of the attention alone; a published "
        "step is the training step of all of RoBERTa-base on an A100, with all that is not attention.",
    ]
    return Table(title, header, lines, notes)
