"""`lln demo`: in two minutes, what moment matching does and what linear attention costs, as tables and pictures.

Each part hands out its rows as they are measured, and what was measured is written also when the demo is interrupted.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lln.bench.attention import compare_attention
from lln.bench.record import write_whole
from lln.functional import attention_matrix
from lln.instruments import entropy, lognormality, spectral_gap
from lln.provenance import provenance
from lln.report.plot import BLACK, BLUE, DPI, GREEN, ORANGE, PURPLE, SKY, Look, panels, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

TEMPERATURES = (4.0, 2.8, 2.0, 1.4, 1.0, 0.85, 0.7, 0.6, 0.5)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS, HEAD_DIM, DRAWS = 256, 64, 2
BENCH_HEADS = 2

MATRICES: dict[str, tuple[Look, dict[str, Any]]] = {
    "softmax": (Look("softmax", BLACK, "-"), {"kind": "softmax"}),
    "unmatched": (Look("LLN unmatched", ORANGE, ":"), {"kind": "lln", "alpha": 1.0, "beta": 1.0}),
    "variance": (Look("LLN, variance matched", BLUE, "--"), {"kind": "lln", "matching": "variance"}),
    "entropy": (Look("LLN, entropy matched", GREEN, "-."), {"kind": "lln", "matching": "entropy"}),
}
COSTS = {
    "softmax": Look("softmax", BLACK, "-", "o"),
    "lln": Look("LLN", SKY, "--", "s"),
    "lln_diag": Look("LLN+Diag", PURPLE, "-.", "^"),
}


def concentration_rows(seed: int) -> Iterator[Row]:
    """Log-variance, entropy and spectral gap over temperature: means of a few draws of Gaussian inputs."""
    for temperature in TEMPERATURES:
        generator = torch.Generator().manual_seed(seed)
        shape = (DRAWS, 1, TOKENS, HEAD_DIM)
        # q . k / sqrt(D) has variance sigma_q² sigma_k² for independent entries, and temperature is 1 over its root.
        query, key = (
            torch.randn(shape, generator=generator, dtype=torch.float64) * temperature**-0.5 for _ in range(2)
        )
        for name, (_, options) in MATRICES.items():
            matrix = attention_matrix(query, key, **options)
            yield {
                "temperature": temperature,
                "attention": name,
                "log_variance": lognormality(matrix).variance.mean().item(),
                "entropy_bits": entropy(matrix).mean().item(),
                "spectral_gap": spectral_gap(matrix).mean().item(),
            }


def cost_rows(seed: int) -> Iterator[Row]:
    """Forward time and peak memory over the number of tokens, against torch's softmax attention.

    On one thread: on a machine that does other things too, two threads wait for each other, and times say little.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from compare_attention(
            LENGTHS, tuple(COSTS), heads=BENCH_HEADS, head_dim=HEAD_DIM, seconds=0.4, seed=seed
        )
    finally:
        torch.set_num_threads(threads)


def draw_concentration(rows: Sequence[Row], path: Path) -> None:
    labels = {"log_variance": "variance of ln P", "entropy_bits": "entropy [bits]", "spectral_gap": "spectral gap"}
    footer = f"Gaussian queries and keys, N = {TOKENS}, D = {HEAD_DIM}, mean of {DRAWS} draws  ·  lln demo"
    title = "Moment matching: LLN attention concentrates with temperature, as softmax attention does"
    with style():
        figure, axes = panels(footer, title, len(labels), size=(11.5, 4.2))
        for panel, (column, label) in zip(axes, labels.items(), strict=True):
            for name, (look, _) in MATRICES.items():
                chosen = [row for row in rows if row["attention"] == name]
                look.plot(panel, [row["temperature"] for row in chosen], [row[column] for row in chosen])
            panel.set(xlabel="temperature (eq. 5)", ylabel=label, xscale="log")
            panel.set_xticks([0.5, 1.0, 2.0, 4.0], ["0.5", "1", "2", "4"])
            panel.minorticks_off()
        axes[0].set_yscale("log")
        _save(figure, path)


def draw_costs(rows: Sequence[Row], path: Path) -> None:
    footer = f"B = 1, H = {BENCH_HEADS}, D = {HEAD_DIM}, float32, one thread, medians of interleaved runs  ·  lln demo"
    with style():
        figure, axes = panels(footer, "Time and memory from 256 to 16,384 tokens", 2, size=(9.0, 4.2))
        for name, look in COSTS.items():
            chosen = [row for row in rows if row["mechanism"] == name]
            tokens = [row["tokens"] for row in chosen]
            look.plot(axes[0], tokens, [row["milliseconds"] for row in chosen])
            look.plot(axes[1], tokens, [row["peak_bytes"] / 2**20 for row in chosen])
        axes[0].set(xlabel="tokens", ylabel="forward time [ms]", xscale="log", yscale="log")
        axes[1].set(xlabel="tokens", ylabel="peak memory beyond the inputs [MiB]", xscale="log", yscale="log")
        for panel in axes:
            panel.set_xticks([256, 1024, 4096, 16384], ["256", "1k", "4k", "16k"])
            panel.minorticks_off()
        _save(figure, path)


def _save(figure: "Figure", path: Path) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.savefig(path, dpi=DPI)


PARTS: dict[str, tuple[Callable[[int], Iterator[Row]], Callable[[Sequence[Row], Path], None], int]] = {
    "concentration": (concentration_rows, draw_concentration, len(TEMPERATURES) * len(MATRICES)),
    "cost": (cost_rows, draw_costs, len(LENGTHS) * len(COSTS)),
}


def run_part(part: str, out: Path, *, seed: int, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Measure one part and write `part.json` and `part.png`, also when interrupted in the middle."""
    measure, draw, _ = PARTS[part]
    if out.exists() and not out.is_dir():
        raise ValueError(f"the results need a folder, and {out} is a file")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        for row in measure(seed):
            rows.append(row)
            on_row(row)
    finally:
        if rows:
            record = provenance(seed=seed, command="lln demo") | {"rows": rows}
            write_whole(out / f"{part}.json", json.dumps(record, indent=1) + "\n")
            draw(rows, out / f"{part}.png")
    return rows
