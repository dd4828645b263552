"""What a model learns from while it is made linear, and what it is measured on: batches as functions of the step.

A batch depends on the seed, the stage and the step alone, so a continued run sees what an uninterrupted one would.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lln.tasks.data.folder import digest
from lln.tasks.data.order import Unrolled, draws
from lln.tasks.glue import Sentences
from lln.tasks.glue import pad as pad_examples
from lln.terminal import Progress

Batch = dict[str, Tensor]
STAGES = ("align", "join", "distil")
TOKENISED = 64  # documents tokenised at a time
MOST_UNKNOWN = 0.5  # share of unknown tokens in a text that a model can learn from
SHORTEST = 32  # tokens of the shortest passages that are learned from and measured


class Source(Protocol):
    """Where batches come from."""

    lengths: tuple[int, ...]  # of the held-out passages, longest last

    def batch(self, stage: str, step: int) -> Batch: ...

    def calibration(self) -> list[Batch]: ...

    def mixed(self) -> Batch:
        """About as much as `calibration`, of all lengths, in one batch with padding."""

    def held_out(self, length: int) -> list[Batch]: ...

    def fingerprint(self) -> dict[str, Any]: ...


class TextSource:
    """Passages of text in several lengths: the longest, and halves of it down to 32 tokens.

    Passages to learn from begin anywhere in the training text; held-out ones follow each other in text that is only
    measured on. Special tokens stand where the tokenizer puts them around a text.
    """

    def __init__(
        self,
        texts: Sequence[str],
        held_out: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int,
        tokens: int,
        batch_tokens: int,
        calibration_tokens: int,
        passages: int,
        seed: int,
        quiet: bool = False,
    ) -> None:
        self._before, self._after = special_tokens(tokenizer)
        inner = length - len(self._before) - len(self._after)
        if inner < 1:
            raise ValueError(f"a length of {length} leaves nothing between the special tokens of the tokenizer")
        self._train = tokenise(texts, tokenizer, tokens, "training text", quiet=quiet)
        self._held_out = tokenise(held_out, tokenizer, passages * length, "held-out text", quiet=quiet)
        for name, found in (("training", self._train), ("held-out", self._held_out)):
            if len(found) < inner:
                raise ValueError(
                    f"the {name} text has {len(found)} tokens, fewer than one passage of {length}; give more text "
                    "(--text), or a smaller --length"
                )
            unknown = float((found == tokenizer.unk_token_id).mean()) if tokenizer.unk_token_id is not None else 0.0
            if unknown > MOST_UNKNOWN:
                raise ValueError(
                    f"{unknown:.0%} of the {name} text are tokens that the tokenizer does not know: it does not fit "
                    "the text, or is not the model's"
                )
        self._batch_tokens, self._calibration_tokens = batch_tokens, calibration_tokens
        self._passages, self._seed = passages, seed
        self.lengths = lengths_up_to(length)

    def batch(self, stage: str, step: int) -> Batch:
        chance = draws(self._seed, 1 + STAGES.index(stage), step)
        return self._drawn(chance, self.lengths[int(chance.integers(len(self.lengths)))], self._batch_tokens)

    def calibration(self) -> list[Batch]:
        chance = draws(self._seed, 0, 0)
        longest = self.lengths[-1]
        return [self._drawn(chance, longest, longest) for _ in range(max(1, self._calibration_tokens // longest))]

    def mixed(self) -> Batch:
        chance, longest = draws(self._seed, 0, 1), self.lengths[-1]
        rows = max(1, self._calibration_tokens // longest // len(self.lengths))
        batches = [self._drawn(chance, length, rows * length)["input_ids"] for length in self.lengths]
        real = [torch.ones_like(ids) for ids in batches]
        padded = ([pad(x, (0, longest - x.shape[1])) for x in tensors] for tensors in (batches, real))
        ids, mask = map(torch.cat, padded)
        return {"input_ids": ids, "attention_mask": mask}

    def held_out(self, length: int) -> list[Batch]:
        inner = length - len(self._before) - len(self._after)
        starts = range(0, len(self._held_out) - inner + 1, inner)[: self._passages]
        size = max(1, self._batch_tokens // length)
        passages = [self._passage(self._held_out, start, inner) for start in starts]
        return [_batch(passages[i : i + size]) for i in range(0, len(passages), size)]

    def fingerprint(self) -> dict[str, Any]:
        parts = {"training_tokens": self._train, "held_out_tokens": self._held_out}
        return {name: len(x) for name, x in parts.items()} | {
            name.replace("tokens", "digest"): digest([x.tobytes()])[:16] for name, x in parts.items()
        }

    def _drawn(self, chance: np.random.Generator, length: int, tokens: int) -> Batch:
        inner = length - len(self._before) - len(self._after)
        starts = chance.integers(len(self._train) - inner + 1, size=max(1, tokens // length))
        return _batch([self._passage(self._train, int(start), inner) for start in starts])

    def _passage(self, tokens: Any, start: int, inner: int) -> list[int]:
        return [*self._before, *tokens[start : start + inner].tolist(), *self._after]


class ExampleSource:
    """Examples of a classifier's task, padded to batches of examples of similar lengths.

    Batches have no labels, because a model learns from what its teacher predicts; `labelled` gives them to measure.
    """

    def __init__(
        self,
        train: Sentences,
        held_out: Sentences,
        padding: int,
        *,
        batch_tokens: int,
        calibration_tokens: int,
        passages: int,
        seed: int,
    ) -> None:
        self._train, self._held_out, self._padding, self._seed = train, held_out, padding, seed
        self._batch_tokens, self._calibration_tokens, self._passages = batch_tokens, calibration_tokens, passages
        self.lengths: tuple[int, ...] = (max(train.lengths),)
        mean = sum(train.lengths) / len(train)
        self._size = max(1, min(len(train), round(batch_tokens / mean)))
        self.held_out_examples = len(held_out)
        # The order of a stage does not depend on how many steps it has.
        self._orders = {
            stage: Unrolled(train, epochs=1 << 30, seed=len(STAGES) * seed + place, lengths_alike=self._size)
            for place, stage in enumerate(STAGES)
        }

    def batch(self, stage: str, step: int) -> Batch:
        order = self._orders[stage]
        return self._padded([order[step * self._size + i] for i in range(self._size)])

    def calibration(self) -> list[Batch]:
        return [self.mixed()]

    def mixed(self) -> Batch:
        count = max(1, round(self._calibration_tokens / self._batch_tokens * self._size))
        chosen = draws(self._seed, 0, 0).permutation(len(self._train))[:count]
        return self._padded([self._train.example(int(i), 0) for i in chosen])

    def held_out(self, length: int) -> list[Batch]:
        chosen = draws(0, 0, 0).permutation(len(self._held_out))[: self._passages]  # they may be sorted by label
        examples = [self._held_out.example(int(i), 0) for i in chosen]
        return [self._padded(examples[i : i + self._size]) for i in range(0, len(examples), self._size)]

    def labelled(self) -> Iterator[Batch]:
        """All held-out examples with their labels, shortest first."""
        order = sorted(range(len(self._held_out)), key=self._held_out.lengths.__getitem__)
        for start in range(0, len(order), self._size):
            yield pad_examples([self._held_out.example(i, 0) for i in order[start : start + self._size]], self._padding)

    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, part in (("training", self._train), ("held_out", self._held_out)):
            ids = (part.example(i, 0)["input_ids"].numpy().tobytes() for i in range(len(part)))
            found |= {f"{name}_examples": len(part), f"{name}_digest": digest(ids)[:16]}
        return found

    def _padded(self, examples: list[dict[str, Tensor]]) -> Batch:
        batch = pad_examples(examples, self._padding)
        del batch["labels"]
        return batch


def first_of(batch: Batch) -> Batch:
    """The first sample of a batch without its padding."""
    sample = {name: x[:1] for name, x in batch.items()}
    if "attention_mask" not in sample:
        return sample
    return {name: x[:, : int(sample["attention_mask"].sum())] for name, x in sample.items()}


class ImageSource:
    """Images as the processor of a model makes them: (images, channels, height, width)."""

    def __init__(self, images: Tensor, held_out: Tensor, *, batch: int, calibration: int, seed: int) -> None:
        if not len(images) or not len(held_out):
            raise ValueError("there must be images to learn from and others to measure on")
        self._images, self._held_out, self._size, self._calibration = images, held_out, batch, calibration
        self._seed = seed
        self.lengths: tuple[int, ...] = (0,)  # all images have as many tokens as the model takes

    def batch(self, stage: str, step: int) -> Batch:
        chance = draws(self._seed, 1 + STAGES.index(stage), step)
        return {"pixel_values": self._images[chance.integers(len(self._images), size=self._size)]}

    def calibration(self) -> list[Batch]:
        return [{"pixel_values": x} for x in torch.split(self._images[: self._calibration], self._size)]

    def mixed(self) -> Batch:
        return {"pixel_values": self._images[: self._calibration]}

    def held_out(self, length: int) -> list[Batch]:
        return [{"pixel_values": x} for x in torch.split(self._held_out, self._size)]

    def fingerprint(self) -> dict[str, Any]:
        parts = {"training": self._images, "held_out": self._held_out}
        return {f"{name}_images": len(x) for name, x in parts.items()} | {
            f"{name}_digest": digest(image.numpy().tobytes() for image in x)[:16] for name, x in parts.items()
        }


def lengths_up_to(length: int) -> tuple[int, ...]:
    """`length` and its halves, quarters, ... down to 32 tokens, shortest first."""
    found = [length]
    while found[-1] // 2 >= SHORTEST and len(found) < 5:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start]), list(full[start + len(plain) :])
    raise ValueError(f"{type(tokenizer).__name__} changes a text when it adds special tokens; give another tokenizer")


def tokenise(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int, what: str, *, quiet: bool
) -> Any:
    """The tokens of the documents one after the other, at most `limit`."""
    found: list[int] = []
    with Progress(f"tokenising {what}", limit, quiet=quiet) as bar:
        for start in range(0, len(documents), TOKENISED):
            batch = list(documents[start : start + TOKENISED])
            for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                found += ids
                bar.advance(len(ids))
            if len(found) >= limit:
                break
    return np.array(found[:limit], dtype=np.int32)


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose tokens a model has no embeddings for."""
    embeddings: Any = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeddings for {embeddings}: they do not belong "
            "together; give the tokenizer of the model"
        )


def _batch(passages: list[list[int]]) -> Batch:
    return {"input_ids": torch.tensor(passages)}
