"""`lln demo`: what moment matching does, what linear attention costs, and a model that learns with it.

The first two parts return their rows as they are measured, and write them also when the demo is interrupted. In the
third a small encoder is pre-trained with softmax and with LLN+Diag attention, from the same weights on the same
batches. Its text is the source of Python's standard library, which every machine has; the runs are those of `lln train
mlm`.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lln.bench.attention import compare_attention
from lln.bench.candidates import Setting
from lln.functional import attention_matrix
from lln.instruments import entropy, lognormality, spectral_gap
from lln.provenance import provenance
from lln.report.plot import BLACK, BLUE, DPI, GREEN, ORANGE, PURPLE, SKY, CurveStyle, panels, style
from lln.report.speed import short
from lln.report.speed_pictures import draw_curves
from lln.report.table import Table
from lln.results import Result, Row, add_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPERATURES = (4.0, 2.8, 2.0, 1.4, 1.0, 0.85, 0.7, 0.6, 0.5)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS, HEAD_DIM, DRAWS = 256, 64, 2
BENCH_HEADS = 2

MATRICES: dict[str, tuple[CurveStyle, dict[str, Any]]] = {
    "softmax": (CurveStyle("softmax", BLACK, "-"), {"kind": "softmax"}),
    "unmatched": (CurveStyle("LLN unmatched", ORANGE, ":"), {"kind": "lln", "alpha": 1.0, "beta": 1.0}),
    "variance": (CurveStyle("LLN, variance matched", BLUE, "--"), {"kind": "lln", "matching": "variance"}),
    "entropy": (CurveStyle("LLN, entropy matched", GREEN, "-."), {"kind": "lln", "matching": "entropy"}),
}
COSTS = {
    "softmax": CurveStyle("softmax", BLACK, "-", "o"),
    "lln": CurveStyle("LLN", SKY, "--", "s"),
    "lln_diag": CurveStyle("LLN+Diag", PURPLE, "-.", "^"),
}

TRAINED = {"softmax": CurveStyle("softmax", BLACK, "-"), "lln_diag": CurveStyle("LLN+Diag", PURPLE, "--")}
SETTINGS: dict[str, Any] = {
    "source": "stdlib",
    "vocab_size": 2048,
    "steps": 1500,
    "batch_size": 8,
    "eval_every": 250,
    "eval_examples": 200,
    "record_every": 100,
    "save_every": 1500,
}
RESULTS = "demo.jsonl"


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

    On one thread: on a machine that does other things too, two threads wait for each other, and times mean little.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from compare_attention(LENGTHS, tuple(COSTS), Setting(BENCH_HEADS, HEAD_DIM), seconds=0.4, seed=seed)
    finally:
        torch.set_num_threads(threads)


def draw_concentration(rows: Sequence[Row], path: Path) -> None:
    labels = {"log_variance": "variance of ln P", "entropy_bits": "entropy [bits]", "spectral_gap": "spectral gap"}
    footer = f"Gaussian queries and keys, N = {TOKENS}, D = {HEAD_DIM}, mean of {DRAWS} draws  ·  lln demo"
    title = "Moment matching: LLN attention concentrates with temperature, as softmax attention does"
    with style():
        figure, axes = panels(footer, title, len(labels), size=(11.5, 4.2))
        for panel, (column, label) in zip(axes, labels.items(), strict=True):
            for name, (curve, _) in MATRICES.items():
                chosen = [row for row in rows if row["attention"] == name]
                curve.plot(panel, [row["temperature"] for row in chosen], [row[column] for row in chosen])
            panel.set(xlabel="temperature (eq. 5)", ylabel=label, xscale="log")
            panel.set_xticks([0.5, 1.0, 2.0, 4.0], ["0.5", "1", "2", "4"])
            panel.minorticks_off()
        axes[0].set_yscale("log")
        _save(figure, path)


def draw_costs(rows: Sequence[Row], path: Path) -> None:
    footer = f"B = 1, H = {BENCH_HEADS}, D = {HEAD_DIM}, float32, one thread, medians of interleaved runs  ·  lln demo"
    with style():
        figure, axes = panels(footer, "Time and memory from 256 to 16,384 tokens", 2, size=(9.0, 4.2))
        draw_curves(axes[0], rows, COSTS, "milliseconds", ylabel="forward time [ms]")
        draw_curves(axes[1], rows, COSTS, "peak_bytes", ylabel="peak memory beyond the inputs [MiB]", unit=2**20)
        _save(figure, path)


def _save(figure: "Figure", path: Path) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.savefig(path, dpi=DPI)


MEASURED: dict[str, tuple[Callable[[int], Iterator[Row]], Callable[[Sequence[Row], Path], None], int]] = {
    "concentration": (concentration_rows, draw_concentration, len(TEMPERATURES) * len(MATRICES)),
    "cost": (cost_rows, draw_costs, len(LENGTHS) * len(COSTS)),
}


def measure(part: str, out: Path, *, seed: int, on_row: Callable[[], object] = lambda: None) -> list[Row]:
    """Measure one part, draw `part.png` and record the rows in `demo.jsonl`, also when interrupted in the middle."""
    measured, draw, _ = MEASURED[part]
    if out.exists() and not out.is_dir():
        raise ValueError(f"the results need a folder, and {out} is a file")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        for row in measured(seed):
            rows.append(row)
            on_row()
    finally:
        if rows:
            add_result(out / RESULTS, Result(part, provenance(seed=seed, command="lln demo"), tables={"rows": rows}))
            draw(rows, out / f"{part}.png")
    return rows


def concentration_table(rows: Sequence[Row]) -> Table:
    cells = [
        [
            f"{row['temperature']:g}, {MATRICES[row['attention']][0].label}",
            f"{row['log_variance']:.3f}",
            f"{row['entropy_bits']:.2f}",
            f"{row['spectral_gap']:.3f}",
        ]
        for row in rows
        if row["temperature"] in (2.0, 1.0, 0.7, 0.5)
    ]
    title = "1. Moment matching: does LLN attention concentrate as softmax attention does?"
    return Table(title, ["temperature, attention", "variance of ln P", "entropy (bits)", "spectral gap"], cells)


def cost_table(rows: Sequence[Row]) -> Table:
    cells = [
        [
            f"{row['tokens']:,}, {COSTS[row['mechanism']].label}",
            short(row["milliseconds"]),
            " - ".join(map(short, row["quartiles"])),
            f"{row['ratio']:.2f}",
            f"{row['peak_bytes'] / 2**20:.1f}",
        ]
        for row in rows
    ]
    title = "2. Cost: forward time (one thread) and peak memory against torch's softmax attention"
    note = (
        "torch's softmax attention keeps no N x N matrix either, so memory grows in proportion to N for all three; "
        "its time grows with the square of N."
    )
    columns = ["tokens, attention", "time (ms)", "quartiles", "speed-up", "peak memory (MiB)"]
    return Table(title, columns, cells, [note])


def train_both(out: Path, *, seed: int) -> list[Result]:
    """Pre-train with both attentions."""
    try:
        from lln.tasks.mlm import MlmConfig, train
        from lln.tasks.run import run_result
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'training needs {error.name}: pip install "lln-attention[tasks]"') from error
    runs = []
    for attention in TRAINED:
        folder = out / "training" / attention
        shutil.rmtree(folder, ignore_errors=True)  # a demo shows what happens now
        train(MlmConfig.preset("laptop", attention=attention, seed=seed, **SETTINGS), out=folder)
        runs.append(run_result(folder))
        add_result(out / RESULTS, runs[-1])
    return runs


def training_table(runs: Sequence[Result]) -> Table:
    """Validation loss, speed, and entropy at the beginning and at the end, the mean over layers."""
    rows = []
    for run in runs:
        losses, entropies = run.curve("eval_loss")[1], _entropy(run)[1]
        label, speed = TRAINED[run.settings["attention"]].label, run.summary["tokens_per_second"]
        rows.append([label, f"{losses[-1]:.3f}", f"{speed:,.0f}", f"{entropies[0]:.2f} → {entropies[-1]:.2f}"])
    title = "3. Training: the same small RoBERTa with both attentions, on Python's standard library"
    return Table(title, ["attention", "validation loss", "tokens/s", "entropy (bits)"], rows)


def draw_training(runs: Sequence[Result], path: Path) -> None:
    config = runs[0].settings
    footer = (
        f"RoBERTa of {config['layers']} layers, {config['width']} wide, {config['heads']} heads, "
        f"{config['steps']} steps of {config['batch_size']} x {config['length']} tokens, "
        f"seed {config['seed']}  ·  lln demo"
    )
    with style():
        figure, (left, right) = panels(footer, "The same model, trained with two attentions", 2, size=(10.5, 4.2))
        for run in runs:
            curve = TRAINED[run.settings["attention"]]
            left.plot(*run.curve("loss"), color=curve.color, alpha=0.25)
            curve.plot(left, *run.curve("eval_loss"))
            curve.plot(right, *_entropy(run))
        left.set(xlabel="step", ylabel="loss [nats] (pale: training, strong: validation)")
        right.set(xlabel="step", ylabel="entropy of attention [bits], mean over heads")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
        figure.savefig(path, dpi=DPI)


def _entropy(run: Result) -> tuple[list[int], list[float]]:
    layers = list(run.layers("entropy").values())
    return layers[0][0], [sum(values) / len(values) for values in zip(*(values for _, values in layers), strict=True)]
