"""Retrieval: do two documents belong together? Reader of the published pairs, and a stand-in made from Wikipedia.

Published: papers of the ACL Anthology Network, of which one does or does not cite the other. They are not to be had
everywhere, so there is a task of ours, "wikipedia passages, ours": do two passages come from the same article? An
article is cut in two; both parts stay together (1), or the parts of two articles change places (0). Those two are
neighbours in the order of lengths and cut at the same share of their length, so lengths do not depend on the label;
every round cuts elsewhere. No article is in more than one split.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lln.tasks.data.folder import hashed_share, require
from lln.tasks.data.lines import read_jsonl, read_lines
from lln.tasks.lra.examples import Examples, Sequences, Splits
from lln.tasks.lra.task import Task

COLUMNS = ("label", "id1", "id2", "text1", "text2")
SHORTEST = 1000  # bytes of an article: less leaves little to compare
CUT = (0.35, 0.65)  # the share of an article before its cut
VALID_SHARE, TEST_SHARE = 0.05, 0.15
ROUNDS = {"train": 4, "valid": 2, "test": 1}
LENGTH = 4000
FILES = "aan/new_aan_pairs.{train,eval,test}.tsv (as published) or wikipedia/enwiki.jsonl.gz (our stand-in)"


def read(folder: Path) -> tuple[str, Splits]:
    if (folder / "aan").is_dir():
        files = {"train": "train", "valid": "eval", "test": "test"}
        return "ACL Anthology Network", {
            split: read_pairs(folder / "aan" / f"new_aan_pairs.{ending}.tsv") for split, ending in files.items()
        }
    path = require(folder / "wikipedia" / "enwiki.jsonl.gz", f"Wikipedia articles, or {FILES}")
    return "wikipedia passages, ours", {
        split: passages(articles, rounds=ROUNDS[split], seed=number)
        for number, (split, articles) in enumerate(read_articles(path).items())
    }


def read_pairs(path: Path) -> Examples:
    """The published format: label, id1, id2, text1, text2, separated by tabs, without a header or quoting."""
    labels, texts = [], []
    for number, line in read_lines(path):
        cells = line.split("\t")
        if len(cells) != len(COLUMNS):
            raise ValueError(
                f"{path}, line {number}: {len(cells)} cells; expected {len(COLUMNS)}: {', '.join(COLUMNS)}"
            )
        if cells[0] not in ("0", "1", "0.0", "1.0"):
            raise ValueError(f"{path}, line {number}: the label is {cells[0]!r}; expected 0 or 1")
        labels.append(int(float(cells[0])))
        texts.append((cells[3].encode(), cells[4].encode()))
    return _pairs(texts, labels)


@dataclass(frozen=True)
class Article:
    number: int
    text: bytes


def read_articles(path: Path) -> dict[str, list[Article]]:
    """The articles that are long enough, by split; an article's split depends on its number alone."""
    splits: dict[str, list[Article]] = {"train": [], "valid": [], "test": []}
    for _, row in read_jsonl(path, {"id": int, "text": str}):
        article = Article(row["id"], row["text"].encode())
        if len(article.text) >= SHORTEST:
            share = hashed_share(f"article {article.number}")
            held_out = "test" if share < TEST_SHARE else "valid" if share < TEST_SHARE + VALID_SHARE else "train"
            splits[held_out].append(article)
    return splits


def passages(articles: list[Article], *, rounds: int, seed: int) -> Examples:
    """In every round each article gives two passages: its own, or one of them its neighbour's. Half of all are 1."""
    if len(articles) < 4:
        raise ValueError(f"passages of the same and of other articles need at least 4 articles, got {len(articles)}")
    random = np.random.default_rng(seed)
    texts: list[tuple[bytes, bytes]] = []
    labels: list[int] = []
    for _ in range(rounds):
        # Lengths get a little noise, so that neighbours change from round to round.
        lengths = np.array([len(article.text) for article in articles]) * random.uniform(0.98, 1.02, len(articles))
        order = lengths.argsort()[: len(articles) // 4 * 4]
        together = random.permutation(np.arange(len(order) // 2) % 2)
        for (one, other), label in zip(order.reshape(-1, 2), together, strict=True):
            share = random.uniform(*CUT)
            (a, b), (c, d) = (_cut(articles[index].text, share) for index in (one, other))
            texts += [(a, b), (c, d)] if label else [(a, d), (c, b)]
            labels += [int(label)] * 2
    shuffled = random.permutation(len(labels))
    return _pairs([texts[i] for i in shuffled], [labels[i] for i in shuffled])


def _cut(text: bytes, share: float) -> tuple[bytes, bytes]:
    """Both parts, cut behind the first space or line end at or after this share of the text."""
    at = int(len(text) * share)
    ends = [found for found in (text.find(b" ", at), text.find(b"\n", at)) if found >= 0]
    at = min(ends, default=at) + 1
    return text[:at], text[at:]


def _pairs(texts: list[tuple[bytes, bytes]], labels: list[int]) -> Examples:
    towers = (Sequences.of((pair[tower] for pair in texts), length=LENGTH) for tower in (0, 1))
    return Examples(tuple(towers), np.array(labels, dtype=np.int64))


TASK = Task(
    name="retrieval",
    title="Retrieval (4k)",
    length=LENGTH,
    symbols=256,
    classes=2,
    about="Do two documents belong together? Byte by byte.",
    presets={
        "laptop": {"steps": 400, "batch_size": 16, "learning_rate": 1e-3, "standardise": True},
        "paper": {"batch_size": 16, "learning_rate": 2e-4, "warmup_steps": 800},
    },
    towers=2,
    read=read,
    files=FILES,
    answers=("not together", "together"),
)
