"""All that is recorded of a head, from what was captured of it."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from lln.instruments.bias import entropy_parts
from lln.instruments.capture import Capture
from lln.instruments.records import Record, clean
from lln.instruments.rows import LLNRows, MatrixRows, Rows, SoftmaxRows
from lln.instruments.spectral_gap import gap
from lln.instruments.temperature import of_scores, temperature


@torch.no_grad()
def measure_heads(capture: Capture, tokens: int, chance: random.Random) -> list[Record]:
    """The values of each captured head, from at most `tokens` rows; None for what is not a finite number."""
    nothing: Record = {"tokens": None, "keys": None, "limit": None} | dict.fromkeys(SCALARS)
    finite = bool(capture.query.isfinite().all()) and bool(capture.key.isfinite().all())
    pieces = capture.rows() if finite else []
    if not pieces or min(min(rows.num_rows, rows.num_columns) for rows in pieces) == 0:
        return [nothing.copy() for _ in capture.heads]
    kept = {"tokens": pieces[0].num_rows, "keys": pieces[0].num_columns}
    columns: dict[str, list[Tensor]] = {name: [] for name in ("limit", *SCALARS)}
    for rows in pieces:
        _sample_rows(rows, tokens, chance)
        limit, entropy, biased, _ = entropy_parts(rows).unbind(dim=-1)
        columns["limit"].append(limit)
        columns["entropy"].append(entropy)
        columns["bias"].append(biased)
        if isinstance(rows, SoftmaxRows) and (rows.is_causal or capture.mask is not None):
            columns["temperature"].append(of_scores(rows))
        for name, instrument in ROW_INSTRUMENTS.items():
            if (values_of_heads := instrument(rows)) is not None:
                columns[name].append(values_of_heads)
    if not columns["temperature"]:
        columns["temperature"] = [temperature(capture.query, capture.key, **capture.options).flatten()]
    scales = capture.scales()
    if scales is not None:
        columns["alpha"], columns["beta"] = [scales[0]], [scales[1]]
    values = {name: torch.cat(parts).tolist() for name, parts in columns.items() if parts}
    measured = range(len(capture.heads))
    return [clean(nothing | kept | {name: value[i] for name, value in values.items()}) for i in measured]


def _sample_rows(rows: Rows, tokens: int, chance: random.Random) -> None:
    """Let at most `tokens` rows be measured."""
    if rows.num_rows > tokens:
        chosen = sorted(chance.sample(range(rows.num_rows), tokens))
        rows.index = torch.tensor(chosen, device=rows.index.device)


def _affordable_gap(rows: Rows) -> Tensor | None:
    """The gap; or that of the chain among the sampled tokens, where the whole matrix would be too expensive.

    NaN where a sampled row has no weight among them: there is no such chain. None for cross attention.
    """
    if rows.num_rows != rows.num_columns:
        return None
    separate = isinstance(rows, SoftmaxRows) and rows.is_separate
    if len(rows.index) == rows.num_rows or rows.is_causal or isinstance(rows, LLNRows) or separate:
        return gap(rows)
    among = rows.block(rows.index)[:, :, rows.index]
    sums = among.sum(dim=-1, keepdim=True)
    connected = (sums > 0).all(dim=1)[:, 0]
    result = torch.full((rows.heads,), torch.nan, dtype=torch.float64, device=among.device)
    if bool(connected.any()):
        result[connected] = gap(MatrixRows((among / sums)[connected], is_causal=False))
    return result


# What is recorded beside entropy and bias, which are found together: a number for each head from `Rows`, or None where
# it cannot be measured. A new instrument is a file of this folder and a line here.
ROW_INSTRUMENTS: dict[str, Callable[[Rows], Tensor | None]] = {
    "gap": _affordable_gap,
}
SCALARS = ("temperature", "entropy", *ROW_INSTRUMENTS, "bias", "alpha", "beta")
