"""A run on a task of the Long Range Arena (the paper's table 5)."""

from pathlib import Path

import torch

from lln.tasks.config import check_attention
from lln.tasks.evaluation import Batch
from lln.tasks.lra.config import LraConfig
from lln.tasks.lra.data import load
from lln.tasks.lra.examples import PADDING, collate
from lln.tasks.lra.model import Classifier, Shape
from lln.tasks.lra.registry import task_named
from lln.tasks.run import open_run
from lln.tasks.trainer import Summary, fit

__all__ = ["LraConfig", "build", "train"]


def build(config: LraConfig) -> Classifier:
    """The model of a run. Whatever the mechanism draws, all else starts from the same weights for a seed."""
    shape, task = Shape(dropout=config.dropout, standardise=config.standardise), task_named(config.task)
    torch.manual_seed(config.seed)
    plain = Classifier(task, "softmax", shape=shape)
    torch.manual_seed(config.seed)
    model = Classifier(task, config.attention, options=config.options, shape=shape)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


def train(config: LraConfig, *, out: Path | None = None, data_dir: Path | None = None, quiet: bool = False) -> Summary:
    """Train and test, or continue to, or do nothing if the run is finished; returns its summary."""
    sizes = {"heads": Shape.heads, "width": Shape.width, "tokens": task_named(config.task).length}
    check_attention(config.attention, config.options, **sizes)
    with open_run("lra", config, out, quiet=quiet) as run:
        if run.summary is not None:
            return run.summary
        data = load(config.task, data_dir=data_dir, examples=config.examples, dashes=config.dashes)
        train_data, tested = data.splits["train"], data.splits[config.evaluate_on]
        return fit(
            build(config),
            run=run,
            config=config,
            train_data=train_data,
            eval_data=tested.by_length(),
            collate=collate,
            tokens=count_tokens,
            notes={"source": data.source, "train_examples": len(train_data), "eval_examples": len(tested)},
            label=f"{config.task} {config.attention}",
            quiet=quiet,
        )


def count_tokens(batch: Batch) -> int:
    return int((batch["tokens"] != PADDING).sum())
