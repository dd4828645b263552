"""GLUE: a pre-trained model fine-tuned to classify or score sentences and pairs of sentences (the paper's table 1)."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.folder import hashed_share
from lln.tasks.data.glue import TASKS, read_glue
from lln.tasks.data.order import draws
from lln.tasks.evaluation import loss_scores
from lln.tasks.metrics import measure
from lln.tasks.presets import GlueConfig
from lln.tasks.run import RunFolder, open_run, processes
from lln.tasks.start import Start, find_start, resolved
from lln.tasks.trainer import Summary, fit, total_steps

__all__ = ["GlueConfig", "train"]

MULTIPLE = 8  # batches are padded to so many tokens, or a multiple: fewer shapes, and no odd ones
HELD_OUT = 0.1  # of the training examples, to choose a learning rate with


class Sentences:
    """Tokenised examples: {"input_ids", "labels"}, and "token_type_ids" if the model has them; in every epoch alike."""

    def __init__(
        self,
        rows: Any,
        tokenizer: PreTrainedTokenizerFast,
        max_length: int,
        *,
        token_types: bool = False,
        by_length: bool = False,
    ) -> None:
        second = None if rows["text_b"][0] is None else list(rows["text_b"])
        encoded = tokenizer(
            list(rows["text_a"]), second, truncation=True, max_length=max_length, return_token_type_ids=token_types
        )
        labels = torch.tensor(rows["label"])  # whole numbers of classes, or scores
        self.lengths = [len(ids) for ids in encoded["input_ids"]]
        order = sorted(range(len(labels)), key=self.lengths.__getitem__) if by_length else range(len(labels))
        names = ("input_ids", "token_type_ids") if token_types else ("input_ids",)
        self._examples = [
            {name: torch.tensor(encoded[name][index]) for name in names} | {"labels": labels[index]} for index in order
        ]
        self.lengths = [self.lengths[index] for index in order]

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, index: int, epoch: int) -> dict[str, torch.Tensor]:
        return self._examples[index]


def pad(examples: list[dict[str, torch.Tensor]], padding: int) -> dict[str, torch.Tensor]:
    """A batch, padded on the right, with the mask of what is no padding."""
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    width = -(-int(lengths.max()) // MULTIPLE) * MULTIPLE

    def padded(name: str, value: int) -> torch.Tensor:
        joined = pad_sequence([example[name] for example in examples], batch_first=True, padding_value=value)
        return torch.nn.functional.pad(joined, (0, width - joined.shape[1]), value=value)

    batch = {"input_ids": padded("input_ids", padding)}
    if "token_type_ids" in examples[0]:
        batch["token_type_ids"] = padded("token_type_ids", 0)
    return batch | {
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


def train(config: GlueConfig, *, out: Path | None = None, data_dir: Path | None = None, quiet: bool = False) -> Summary:
    """Fine-tune, or continue to, or do nothing if the run is finished; returns its summary.

    If there are rates to choose from, each is tried first on a tenth of the training data that is held out.
    """
    start = find_start(config.start)
    config = dataclasses.replace(config, **resolved(config, start))
    data = find_data(data_dir)
    with open_run("glue", config, out, quiet=quiet) as run:
        if run.summary is not None:
            return run.summary
        with processes().main_process_first():
            rows = read_glue(config.task, "train", data)
            validation = read_glue(config.task, "validation", data)
        rows = drawn(rows, config.train_examples, config.seed)
        validation = drawn(validation, config.eval_examples, 0)  # sorted by label in some tasks
        tune = partial(_fit, start=start, tokenizer=start.tokenizer(), quiet=quiet)
        notes: dict[str, Any] = {"train_examples": len(rows), "eval_examples": len(validation)}
        if len(config.rates) > 1:
            trials = try_rates(config, run, rows, tune)
            notes["trials"] = {f"{rate:g}": value for rate, (value, _) in trials.items()}
            config = dataclasses.replace(config, learning_rate=max(trials, key=trials.__getitem__))
        elif config.rates:
            config = dataclasses.replace(config, learning_rate=config.rates[0])
        notes["learning_rate"] = config.learning_rate
        return tune(config, run, rows, validation, notes=notes)


def try_rates(
    config: GlueConfig, run: RunFolder, rows: Any, tune: Callable[..., Summary]
) -> dict[float, tuple[float, float]]:
    """What each rate gets on held-out training examples: the task's metric, and the loss with its sign changed.

    The larger, the better. A rate whose training diverges gets -inf.
    """
    kept, held_out = split_rows(rows)
    steps = max(1, round(config.trial_share * total_steps(config, len(kept))))
    run.keep()
    found = {}
    for rate in config.rates:
        trial = dataclasses.replace(config, learning_rate=rate, rates=(), steps=steps, epochs=None)
        with open_run("glue-rate", trial, run.path / "rates" / f"{rate:g}", quiet=True) as attempt:
            summary = attempt.summary
            if summary is None:
                summary = tune(trial, attempt, kept, held_out, label=f"{config.task}, trying {rate:g}")
                if attempt.main:  # as large as the model, and not needed any more
                    for part in ("checkpoints", "model"):
                        shutil.rmtree(attempt.path / part)
        value, loss = summary[f"eval_{TASKS[config.task].metrics[0]}"], summary["eval_loss"]
        found[rate] = (-math.inf, -math.inf) if loss is None else (value, -loss)
        run.print(f"{config.task}: rate {rate:g} gets {value:.4f} on held-out training examples")
    return found


def split_rows(rows: Any) -> tuple[Any, Any]:
    """Training examples, and a tenth of them that is held out, by a hash of the texts: equal texts are on one side."""
    texts = [f"{a}\0{b}" for a, b in zip(rows["text_a"], rows["text_b"], strict=True)]
    ranked = sorted(set(texts), key=hashed_share)
    if len(ranked) < 2:
        raise ValueError(f"{len(ranked)} training example is too few to hold some out; give more examples")
    chosen = set(ranked[: max(1, round(HELD_OUT * len(ranked)))])
    sides = ([i for i, text in enumerate(texts) if (text in chosen) == side] for side in (False, True))
    kept, held_out = map(rows.select, sides)
    return kept, held_out


def _fit(
    config: GlueConfig,
    run: RunFolder,
    rows: Any,
    validation: Any,
    *,
    start: Start,
    tokenizer: PreTrainedTokenizerFast,
    quiet: bool,
    label: str = "",
    notes: dict[str, Any] | None = None,
) -> Summary:
    task = TASKS[config.task]
    model = start.build(config, len(task.labels) or 1)
    tokenised = partial(
        Sentences,
        tokenizer=tokenizer,
        max_length=config.max_length,
        token_types=getattr(model.config, "type_vocab_size", 1) > 1,
    )
    return fit(
        model,
        run=run,
        config=config,
        train_data=tokenised(rows),
        eval_data=tokenised(validation, by_length=config.group_lengths),
        collate=lambda examples: pad(examples, tokenizer.pad_token_id),
        score=loss_scores,
        measure=partial(measure, task.metrics),
        processing=tokenizer,
        notes=notes,
        lengths_alike=config.group_lengths,
        label=label or f"{config.task} {config.attention}",
        quiet=quiet,
    )


def drawn(rows: Any, count: int | None, seed: int) -> Any:
    """So many of the rows, chosen by the seed; all if there are no more, or if `count` is None."""
    if count is None or count >= len(rows):
        return rows
    return rows.select(draws(seed, 0, 0).permutation(len(rows))[:count])
