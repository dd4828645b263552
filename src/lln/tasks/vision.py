"""Images: a ViT trained from a random start on pictures of dogs and cats (the paper's table 3 and figures 9 and 10)."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from lln.hf import convert
from lln.tasks.config import check_attention
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.images import ImageData, augment, generated_images, read_dogs_vs_cats
from lln.tasks.data.order import draws
from lln.tasks.evaluation import Batch
from lln.tasks.presets import VisionConfig
from lln.tasks.run import open_run, processes
from lln.tasks.trainer import Summary, fit

__all__ = ["VisionConfig", "build_model", "read_images", "train"]


class Pictures:
    """Images as {"pixel_values", "labels"}, between -1 and 1; with a seed, mirrored and moved again in each epoch."""

    def __init__(self, data: ImageData, *, seed: int | None = None) -> None:
        self._data, self._seed = data, seed

    def __len__(self) -> int:
        return len(self._data)

    def example(self, index: int, epoch: int) -> dict[str, Tensor]:
        image = self._data.images[index]
        if self._seed is not None:
            image = augment(image, draws(self._seed, epoch, index))
        pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return {"pixel_values": pixels / 127.5 - 1, "labels": torch.tensor(self._data.labels[index])}


def read_images(config: VisionConfig, data: Path | None) -> tuple[ImageData, ImageData]:
    """Training and validation."""
    if config.source == "dogs-vs-cats":
        return (
            read_dogs_vs_cats(data, size=config.image_size, split="train"),
            read_dogs_vs_cats(data, size=config.image_size, split="validation"),
        )
    size, count, seed = config.image_size, config.generated_examples, config.seed
    return (
        generated_images(size=size, count=count, seed=seed, split="train"),
        generated_images(size=size, count=max(1, count // 8), seed=seed, split="validation"),
    )


def build_model(config: VisionConfig) -> ViTForImageClassification:
    settings = ViTConfig(
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feedforward,
        hidden_dropout_prob=config.dropout,
        image_size=config.image_size,
        patch_size=config.patch_size,
    )
    settings.num_labels = 2
    torch.manual_seed(config.seed)
    return convert(ViTForImageClassification(settings), config.attention, **config.options)


def train(
    config: VisionConfig, *, out: Path | None = None, data_dir: Path | None = None, quiet: bool = False
) -> Summary:
    """Train, or continue to, or do nothing if the run is finished; returns its summary."""
    data = find_data(data_dir)
    if config.source == "auto":
        config = dataclasses.replace(config, source="generated" if data is None else "dogs-vs-cats")
    tokens_an_image = (config.image_size // config.patch_size) ** 2 + 1
    sizes = {"heads": config.heads, "width": config.width, "tokens": tokens_an_image + 1}
    check_attention(config.attention, config.options, **sizes)

    def count_tokens(batch: Batch) -> int:
        return len(batch["labels"]) * tokens_an_image

    with open_run("vision", config, out, quiet=quiet) as run:
        if run.summary is not None:
            return run.summary
        with processes().main_process_first():  # the others find the cache filled
            pictures, held_out = read_images(config, data)
        return fit(
            build_model(config),
            run=run,
            config=config,
            train_data=Pictures(pictures, seed=config.seed),
            eval_data=Pictures(held_out),
            tokens=count_tokens,
            label=f"vision {config.attention}",
            quiet=quiet,
        )
