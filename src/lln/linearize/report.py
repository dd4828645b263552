"""The report of a linearised model: report.json has every number, report.md and report.html show them.

The page is one file: no scripts, no network, light and dark.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
TITLES = {
    "length": "tokens",
    "passages": "passages",
    "cosine": "cosine",
    "rank_correlation": "rank correlation",
    "divergence": "divergence of predictions",
    "softmax_loss": "loss, softmax",
    "loss": "loss, linear",
    "softmax_perplexity": "perplexity, softmax",
    "perplexity": "perplexity, linear",
    "perplexity_ratio": "ratio",
    "branches": "branches",
    "stage": "after",
    "tokens": "tokens",
    "softmax_ms": "softmax, ms",
    "linear_ms": "linear, ms",
    "speed_up": "speed-up",
    "softmax_mib": "softmax, MiB",
    "linear_mib": "linear, MiB",
}
INSTRUMENTS = {
    "temperature": "Temperature (1 / standard deviation of ln P in a row)",
    "entropy": "Entropy (bits)",
    "gap": "Spectral gap",
    "bias": "Bias (bits)",
}
NO_MATRIX = "The linear model has none to show: its mechanism has no attention matrix."
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.heat td { min-width: 2.6rem; border: 0; color: #000; }
pre { overflow-x: auto; } div.wide { overflow-x: auto; }
"""


def write_report(report: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(page(report), encoding="utf-8")


def sections(report: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Title, explanation and rows of every table."""
    stages = [{"stage": stage} | dict(row) for stage, rows in report["kept"].items() for row in rows]
    found = [
        (
            "What was kept",
            "On held-out text, which was never trained on. Encoders: the cosine of mean embeddings before and after, "
            "and Spearman's correlation of the similarities of all pairs of passages. Decoders: the loss of the next "
            "token in nats.",
            stages,
        ),
        (
            "Which branch does it",
            "The same at the greatest length, with both branches of every layer, one of them alone, or none (attention "
            "outputs of zero).",
            list(report["ablation"]),
        ),
    ]
    if "pairs" in report:
        found.append(
            (
                "Labelled pairs of sentences",
                "Spearman's correlation of scores with cosines of mean embeddings; nothing was learned from them.",
                [report["pairs"]],
            )
        )
    if "labelled" in report:
        found.append(
            (
                "Labelled examples",
                "Metrics of the predictions of both models on held-out examples; nothing was learned from labels.",
                [
                    {"model": name}
                    | {x.removeprefix(f"{name}_"): y for x, y in report["labelled"].items() if name in x}
                    for name in ("softmax", "linear")
                ],
            )
        )
    if "cost" in report:
        found.append(
            (
                "Time and memory of one attention layer",
                f"Forward, float32, {report['cost']['threads']} threads, softmax by torch's fused attention; peak "
                f"memory beyond the inputs.{_noise(report['cost'])}",
                list(report["cost"]["rows"]),
            )
        )
    return found


def markdown(report: dict[str, Any]) -> str:
    parts = [f"# {headline(report)}", summary(report)]
    for title, text, rows in sections(report):
        parts += [f"## {title}", text, _markdown_table(rows)]
    missing = "" if "after" in _measured(report) else f" {NO_MATRIX}"
    about = f"Medians over all heads; report.json has every head.{missing}"
    parts += ["## Heads", about, _markdown_table(_medians(report))]
    parts += ["## Settings", "```json\n" + json.dumps(_origin(report), indent=1) + "\n```"]
    return "\n\n".join(parts) + "\n"


def page(report: dict[str, Any]) -> str:
    parts = [f"<h1>{html.escape(headline(report))}</h1>", f"<p>{html.escape(summary(report))}</p>"]
    for title, text, rows in sections(report):
        parts += [f"<h2>{html.escape(title)}</h2>", f"<p>{html.escape(text)}</p>", _html_table(rows)]
    parts.append(
        "<h2>Heads</h2><p>Layers are rows, heads are columns; on what each layer of the softmax model is given for a "
        "held-out passage of up to 512 tokens.</p>"
    )
    if report.get("heads_page"):
        link = html.escape(report["heads_page"], quote=True)
        parts.append(
            f'<p><a href="{link}">Both models side by side, head by head</a>, each on its own activations.</p>'
        )
    shown = _measured(report)
    if "after" not in shown:
        parts.append(f"<p>{html.escape(NO_MATRIX)}</p>")
    for name, title in INSTRUMENTS.items():
        values = [row[f"{name}_{when}"] for row in report["heads"] for when in shown]
        finite = [x for x in values if math.isfinite(x)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        for when, what in shown.items():
            parts.append(f"<h3>{html.escape(title)}, {what}</h3>")
            parts.append(_heat_map(report["heads"], f"{name}_{when}", low, high))
    parts += ["<h2>Settings</h2>", f"<pre>{html.escape(json.dumps(_origin(report), indent=1))}</pre>"]
    title = f"<title>{html.escape(headline(report))}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def headline(report: dict[str, Any]) -> str:
    model = report["origin"].get("model", "the model")
    return f"{model} with {report['settings']['attention']}: what was kept"


def summary(report: dict[str, Any]) -> str:
    """The first sentence: what is kept at the greatest length."""
    stage, rows = list(report["kept"].items())[-1]
    row = rows[-1]
    if "loss" in row:
        kept = f"the loss is {row['loss']:.3f} where softmax has {row['softmax_loss']:.3f}"
        kept += f", a perplexity of {row['perplexity_ratio']:.3f} times softmax's"
    else:
        kept = f"embeddings keep a cosine of {row['cosine']:.4f}"
        if "rank_correlation" in row:
            kept += f" and a rank correlation of similarities of {row['rank_correlation']:.4f}"
    where = f"at {row['length']} tokens" if row["length"] else "on held-out images"
    return f"After {stage}, {where}, {kept} ({row['passages']} held-out passages)."


def _origin(report: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x
        for name, x in report.items()
        if name not in ("kept", "ablation", "heads", "cost", "pairs", "labelled", "heads_page")
    }


def _noise(cost: Row) -> str:
    quiet = cost["noise"]["quiet"]
    return "" if quiet else f" The machine was busy with other work ({cost['noise']['busy_processors']} processors)."


def _measured(report: dict[str, Any]) -> dict[str, str]:
    """When heads were measured, and what the model then was."""
    known = {"before": "softmax", "after": "linear"}
    return {when: what for when, what in known.items() if all(f"bias_{when}" in row for row in report["heads"])}


def _medians(report: dict[str, Any]) -> list[dict[str, Any]]:
    def median(name: str) -> float:
        values = sorted(row[name] for row in report["heads"])
        return float(values[len(values) // 2])

    return [
        {"instrument": title} | {what: median(f"{name}_{when}") for when, what in _measured(report).items()}
        for name, title in INSTRUMENTS.items()
    ]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _markdown_table(rows: Sequence[Row]) -> str:
    columns = _columns(rows)
    lines = [[TITLES.get(name, name) for name in columns], ["---"] * len(columns)]
    lines += [[_text(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _html_table(rows: Sequence[Row]) -> str:
    columns = _columns(rows)
    head = "".join(f'<th scope="col">{html.escape(TITLES.get(name, name))}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(row.get(name, '')))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _heat_map(heads: Sequence[Row], name: str, low: float, high: float) -> str:
    layers = sorted({row["layer"] for row in heads})
    lines = []
    for layer in layers:
        cells = []
        for row in (row for row in heads if row["layer"] == layer):
            value = row[name]
            share = (value - low) / (high - low) if math.isfinite(value) and high > low else 0.0
            cells.append(f'<td style="background:hsl(210 70% {95 - 45 * share:.0f}%)">{_text(float(value))}</td>')
        lines.append(f'<tr><th scope="row">{layer}</th>{"".join(cells)}</tr>')
    return f'<div class="wide"><table class="heat">{"".join(lines)}</table></div>'
