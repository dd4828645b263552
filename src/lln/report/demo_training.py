"""The third part of `lln demo`: a small encoder is pre-trained with softmax and with LLN+Diag attention, side by side.

The text is the source of Python's standard library, which every machine has; the runs are those of `lln train mlm`.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lln.report.plot import BLACK, DPI, PURPLE, Look, panels, style
from lln.report.recorded import Run, load_run

LOOKS = {"softmax": Look("softmax", BLACK, "-"), "lln_diag": Look("LLN+Diag", PURPLE, "--")}
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


def train_both(out: Path, *, seed: int) -> list[Run]:
    """Pre-train with both attentions, from the same weights on the same batches."""
    try:
        from lln.tasks.mlm import MlmConfig, train
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'training needs {error.name}: pip install "lln-attention[tasks]"') from error
    runs = []
    for attention in LOOKS:
        folder = out / "training" / attention
        shutil.rmtree(folder, ignore_errors=True)  # a demo shows what happens now
        train(MlmConfig.preset("laptop", attention=attention, seed=seed, **SETTINGS), out=folder)
        runs.append(load_run(folder))
    return runs


def row(run: Run) -> tuple[str, str, str, str]:
    """Validation loss, speed, and entropy at the beginning and at the end, the mean over layers."""
    _, losses = run.curve("eval_loss")
    entropies = _entropy(run)[1]
    speed = run.summary["tokens_per_second"]
    return LOOKS[run.config["attention"]].label, f"{losses[-1]:.3f}", f"{speed:,.0f}", _from_to(entropies)


def draw(runs: Sequence[Run], path: Path) -> None:
    config = runs[0].config
    footer = (
        f"RoBERTa of {config['layers']} layers, {config['width']} wide, {config['heads']} heads, "
        f"{config['steps']} steps of {config['batch_size']} x {config['length']} tokens, "
        f"seed {config['seed']}  ·  lln demo"
    )
    with style():
        figure, (left, right) = panels(footer, "The same model, trained with two attentions", 2, size=(10.5, 4.2))
        for run in runs:
            look = LOOKS[run.config["attention"]]
            left.plot(*run.curve("loss"), color=look.color, alpha=0.25)
            look.plot(left, *run.curve("eval_loss"))
            look.plot(right, *_entropy(run))
        left.set(xlabel="step", ylabel="loss [nats] (pale: training, strong: validation)")
        right.set(xlabel="step", ylabel="entropy of attention [bits], mean over heads")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
        figure.savefig(path, dpi=DPI)


def _entropy(run: Run) -> tuple[list[int], list[float]]:
    layers = list(run.layers("entropy").values())
    return layers[0][0], [sum(values) / len(values) for values in zip(*(values for _, values in layers), strict=True)]


def _from_to(values: Sequence[float]) -> str:
    return f"{values[0]:.2f} → {values[-1]:.2f}"
