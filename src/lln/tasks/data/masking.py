"""Masked language modelling: which tokens of a block are hidden, and how.

As in BERT and RoBERTa, 15 % of the tokens are to be predicted: 80 % of these show <mask>, 10 % another token, 10 %
themselves. Special tokens are neither hidden nor drawn. The number hidden in a block is the 15 % itself, rounded up or
down by chance, as in fairseq; at least one, if there is one to hide.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from lln.tasks.data.order import draws

Array = np.ndarray[Any, np.dtype[Any]]
IGNORED = -100  # the label that cross entropy passes over
SHOW_MASK, KEEP = 0.8, 0.1  # the rest show another token


class MaskedDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Packed blocks with tokens hidden: {"input_ids", "labels"}, int64, each (length,).

    Blocks are full, so there is no attention mask. With `separate`, for blocks of `pack(..., separate=True)`, there are
    also "seq_idx", the number of each token's document, and "position_ids", which start again with each, from where
    RoBERTa's start. What is hidden depends on (seed, epoch, index) alone, never on a
    global generator. As it stands it is a validation set, hidden alike every time (epoch 0); for training,
    `Unrolled(masked, epochs=..., seed=...)` hides again in each epoch.
    """

    def __init__(
        self,
        packed: datasets.Dataset,
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int,
        probability: float = 0.15,
        separate: bool = False,
    ) -> None:
        if not 0 < probability < 1:
            raise ValueError(f"probability must lie between 0 and 1, got {probability}")
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token: choose one that was made for masked language modelling")
        self.seed = seed
        self.probability = probability
        self.separate = separate
        self._first, self._padding = tokenizer.cls_token_id, tokenizer.pad_token_id
        self._mask = tokenizer.mask_token_id
        self._is_special = np.zeros(len(tokenizer), dtype=bool)
        self._is_special[tokenizer.all_special_ids] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        # Views of the Arrow file as it is mapped into memory: a row of it costs microseconds, through the data set 200.
        chunks = packed.with_format("arrow")[:]["input_ids"].chunks
        self._chunks: list[Array] = [chunk.flatten().to_numpy().reshape(len(chunk), -1) for chunk in chunks]
        self._starts = [0, *accumulate(map(len, self._chunks))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.example(index, 0)

    def example(self, index: int, epoch: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        chunk = bisect_right(self._starts, index) - 1
        tokens = self._chunks[chunk][index - self._starts[chunk]].astype(np.int64)
        documents = self._documents(tokens) if self.separate else {}
        labels = self._hide(tokens, draws(self.seed, epoch, index))
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)} | documents

    def _documents(self, tokens: Array) -> dict[str, torch.Tensor]:
        is_first = tokens == self._first
        numbers = is_first.cumsum() - 1
        place = np.arange(len(tokens))
        positions = place - place[is_first][numbers] + self._padding + 1
        return {"seq_idx": torch.from_numpy(numbers), "position_ids": torch.from_numpy(positions)}

    def _hide(self, tokens: Array, rng: np.random.Generator) -> Array:
        """Hides in place, and returns the labels."""
        candidates = (~self._is_special[tokens]).nonzero()[0]
        size = len(candidates)
        chance = rng.random((3, size + 1))  # all at once: a call costs as much as many numbers
        count = max(int(self.probability * size + chance[0, size]), min(1, size))
        hidden = candidates[chance[0, :size].argsort()[:count]]
        kind = chance[1, :count]
        other = self._ordinary[(chance[2, :count] * len(self._ordinary)).astype(np.int64)]
        labels: Array = np.full(len(tokens), IGNORED)
        labels[hidden] = original = tokens[hidden]
        tokens[hidden] = np.where(kind < SHOW_MASK, self._mask, np.where(kind < 1 - KEEP, other, original))
        return labels
