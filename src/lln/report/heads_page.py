"""One HTML file that shows what every head of one or two models does: heat maps, and the details of a chosen head.

The file needs no network: style, script and data are inside (web/heads.css, web/heads.js). The heat maps are plain
tables, which are there without the script too.
"""

import base64
import html
import json
import math
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.instruments.inspect import PANELS, Inspection, grid

MAPS = (*PANELS, ("ks_distance", "distance to log-normal", ""))
ABOUT = {
    "temperature": "1 / standard deviation of ln P in a row: low is concentrated",
    "entropy": "mean over rows: low is concentrated",
    "gap": "of the attention matrix: near 1 all queries attend to the same keys",
    "bias": "concentration on the same keys for all queries",
    "ks_distance": "Kolmogorov-Smirnov distance of ln P from the fitted normal: 0 is log-normal",
}
DASH = ". A dash: not finite, as the temperature of nearly uniform attention, or not measured"
# What the details list, in this order: column and title.
NUMBERS = {
    "temperature": "temperature",
    "entropy": "entropy (bits)",
    "limit": "entropy of uniform attention (bits)",
    "gap": "spectral gap",
    "bias": "bias (bits)",
    "ks_distance": "distance to log-normal",
    "log_mean": "mean of ln P",
    "log_variance": "variance of ln P",
    "skewness": "skewness of ln P",
    "excess_kurtosis": "excess kurtosis of ln P",
    "zeros": "share of zeros",
    "alpha": "alpha",
    "beta": "beta",
}
LOG_RANGE = 16.0  # weights below 2^-16 are shown as zero


def write_heads_page(inspections: Sequence[Inspection], path: str | Path) -> Path:
    """Write `heads_page` to a file and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(heads_page(inspections), encoding="utf-8")
    return path


def heads_page(inspections: Sequence[Inspection]) -> str:
    """The page of one model, or of two side by side.

    Args:
        inspections: results of `lln.instruments.inspect.inspect_details` or `inspect_network`; one or two.

    Returns:
        The HTML of one file.

    Raises:
        ValueError: there are no inspections or more than two, or one has no details.
    """
    if not 1 <= len(inspections) <= 2:
        raise ValueError(f"a page shows one model or two, got {len(inspections)}")
    for inspection in inspections:
        if len(inspection.details) != len(inspection.records):
            raise ValueError(f"the inspection of {inspection.name} has no details; make it with_details=True")
    title = " and ".join(inspection.name for inspection in inspections)
    maps = "".join(_section(inspections, *panel) for panel in MAPS)
    data = json.dumps([_data(inspection) for inspection in inspections], separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # so that no text can end the script element
    web = files("lln.report").joinpath("web")
    style, script = (web.joinpath(f"heads.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    summaries = "".join(f"<p>{html.escape(_summary(inspection))}</p>" for inspection in inspections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(f"Heads of {title}")}</title><link rel="icon" href="data:,"><style>
{style}</style></head><body>
<header><h1>{html.escape(f"Heads of {title}")}</h1>{summaries}
<p>Rows are layers, columns are heads. Choose a head by a click or with the arrow keys; Enter goes to its details,
Escape comes back. Colours go from the 2nd to the 98th percentile{" of both models" * (len(inspections) - 1)}.</p>
</header>
<main><div id="maps">{maps}</div>
<section id="details" aria-labelledby="chosen"><h2 id="chosen" tabindex="-1">Choose a head</h2>
<noscript><p>The details of a head need JavaScript.</p></noscript>
<div id="models"></div></section></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script></body></html>
"""


def _summary(inspection: Inspection) -> str:
    first = inspection.records[0]
    note = f" Note: {first['note']}." if first["note"] else ""
    limit = "" if first["limit"] is None else f", uniform attention has {first['limit']:.2f} bits"
    return f"{inspection.name}: {first['tokens']} tokens{limit}.{note}"


def _section(inspections: Sequence[Inspection], column: str, title: str, unit: str) -> str:
    grids = [grid(inspection.records, column) for inspection in inspections]
    values = sorted(x for _, rows in grids for row in rows for x in row if not math.isnan(x))
    low, high = (0.0, 0.0) if not values else (values[0], values[0])
    if len(values) > 1:
        cuts = statistics.quantiles(values, n=50, method="inclusive")
        low, high = cuts[0], cuts[-1]
    name = f"{title} ({unit})" if unit else title
    tables = "".join(
        _heat_map(number, inspection.name, name, *shown, low, high)
        for number, (inspection, shown) in enumerate(zip(inspections, grids, strict=True))
    )
    scale = f'<p class="scale"><span>{low:.2f}</span><i></i><span>{high:.2f}</span></p>'
    dash = DASH if any(math.isnan(x) for _, rows in grids for row in rows for x in row) else ""
    about = f"<p>{html.escape(ABOUT[column] + dash)}</p>"
    return f'<section><h2>{html.escape(name)}</h2>{about}{scale}<div class="pair">{tables}</div></section>'


def _heat_map(
    model: int, model_name: str, title: str, layers: list[str], values: list[list[float]], low: float, high: float
) -> str:
    label = html.escape(f"{title} of {model_name}", quote=True)
    head = "".join(f'<th scope="col">{number}</th>' for number in range(len(values[0])))
    lines = []
    for layer, (name, row) in enumerate(zip(layers, values, strict=True)):
        cells = "".join(
            f'<td role="gridcell" tabindex="-1" data-at="{model},{layer},{number}"{_color(x, low, high)}>'
            f"{'-' if math.isnan(x) else f'{x:.2f}'}</td>"
            for number, x in enumerate(row)
        )
        lines.append(f'<tr role="row"><th scope="row">{html.escape(name)}</th>{cells}</tr>')
    return (
        f"<figure><figcaption>{html.escape(model_name)}</figcaption>"
        f'<table role="grid" aria-label="{label}, layers by heads"><tr role="row"><th scope="col">layer</th>{head}</tr>'
        f"{''.join(lines)}</table></figure>"
    )


def _color(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return ' class="none"'
    share = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
    return f' style="--share:{share:.0%}"'


def _data(inspection: Inspection) -> dict[str, Any]:
    """What the script reads, as described in its comments."""
    layers = list(dict.fromkeys(record["layer"] for record in inspection.records))
    heads = []
    for record, details in zip(inspection.records, inspection.details, strict=True):
        head: dict[str, Any] = {"at": [layers.index(record["layer"]), record["head"]]}
        head["numbers"] = [None if record[name] is None else float(f"{record[name]:.6g}") for name in NUMBERS]
        if details is not None:
            head["weights"] = _packed(_weight_bytes(details.weights))
            # 2^11 levels a bit: entropies below 32 bits fit.
            head["entropy"], head["limit"] = (_packed(_words(x * 2**11)) for x in (details.entropy, details.limit))
            head["histogram"] = _packed(_words(details.histogram * 65535))
        heads.append(head)
    return {
        "name": inspection.name,
        "layers": layers,
        "titles": list(NUMBERS.values()),
        "tokens": inspection.records[0]["tokens"],
        "pieces": inspection.pieces,
        "queries": inspection.queries,
        "heads": heads,
    }


def _weight_bytes(weights: Tensor) -> bytes:
    """A byte for each weight: 0 for what is below 2^-16, else 1 to 255 for its logarithm, which keeps 2.2 %."""
    levels = (1 + 254 * (1 + weights.log2() / LOG_RANGE)).round()
    return bytes(levels.nan_to_num(0.0, neginf=0.0).clamp(0, 255).to(torch.uint8).flatten().tolist())


def _words(values: Tensor) -> bytes:
    """Two bytes for each number, the lower one first."""
    return b"".join(int(x).to_bytes(2, "little") for x in values.round().clamp(0, 65535).tolist())


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()
