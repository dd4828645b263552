"""Byte-level BPE tokenizers with RoBERTa's special tokens, and text packed into blocks of equal length.

Both are made once and kept in the cache. A literal "<mask>" in a text stays text; only "<unk>", which WikiText-2 writes
for words it left out, is read as the special token.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, RobertaTokenizerFast

from lln.tasks.data.folder import cached_file, digest, require
from lln.tasks.data.lines import read_lines
from lln.terminal import Progress

Array = np.ndarray[Any, np.dtype[np.int32]]
# In the order of RoBERTa's ids; there <mask> comes last, here it is 4 whatever the size of the vocabulary.
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SMALLEST = len(SPECIAL) + 256  # every byte is a token
# More text than this changes the merges of a small vocabulary little, and takes minutes.
LEARN_CHARACTERS = 100_000_000
BATCH = 1000  # documents tokenised at a time
FORMAT = "1"  # part of every key: raise it when the files made here change


def load_tokenizer(
    name: str, documents: Callable[[], Iterable[str]] | None, *, vocab_size: int, data_dir: Path | None
) -> PreTrainedTokenizerFast:
    """A tokenizer by name.

    "trained": learned from `documents()`, with `vocab_size` tokens, special tokens 0 to 4; kept in the cache. Of more
    than 100 million characters, evenly spaced documents are learned from. "roberta-bpe": GPT-2's merges from
    `data_dir`/roberta-bpe, special tokens 0 to 4 and GPT-2's token i at 5 + i (the ids of the published RoBERTa weights
    are in another order). Anything else: a folder with a saved tokenizer. `vocab_size` is for "trained" alone.
    """
    if name == "trained":
        if documents is None:
            raise ValueError("tokenizer 'trained' needs documents to learn from")
        return _trained(list(documents()), vocab_size)
    if name == "roberta-bpe":
        if data_dir is None:
            raise ValueError("tokenizer 'roberta-bpe' needs data: give --data-dir or set LLN_DATA")
        return _roberta_bpe(require(data_dir / name, "a folder with encoder.json and vocab.bpe"))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"unknown tokenizer {name!r}: expected 'trained', 'roberta-bpe' or a folder with a saved one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever its readers raise, the message names the folder
        raise ValueError(f"{folder} holds no tokenizer that can be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{folder} holds a {type(tokenizer).__name__}: expected a fast tokenizer (tokenizer.json)")
    return tokenizer


def pack(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int, *, separate: bool = False
) -> datasets.Dataset:
    """The documents as blocks of `length` tokens, in one column input_ids; kept in the cache.

    The documents are joined, each followed by </s>, and cut every `length` - 2 tokens; each block gets <s> in front and
    </s> behind (as "full sentences" in fairseq). With `separate`, every document in a block has its own <s> and </s>;
    one that does not end in its block goes on in the next as another, and where one or two tokens are left in a block,
    too few for a document, </s> is repeated. What is left over at the end, less than a block, is dropped.
    """
    if length < 3:
        raise ValueError(f"length must be at least 3, <s> and </s> counted, got {length}")
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    if first is None or last is None:
        raise ValueError("the tokenizer has no <s> and </s>, or their like (cls_token and sep_token)")
    kind = ["separate"] if separate else []
    key = digest([FORMAT, *kind, str(length), str((first, last)), _identity(tokenizer), *documents])
    cut = _separate_blocks if separate else _joined_blocks

    def write(path: Path) -> None:
        schema = pa.schema({"input_ids": pa.list_(pa.int32(), length)})
        total = 0
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for blocks in cut(_tokenised(documents, tokenizer, last), length, first, last):
                total += len(blocks)
                if len(blocks):
                    column = pa.FixedSizeListArray.from_arrays(pa.array(blocks.ravel()), length)
                    stream.write_batch(pa.record_batch([column], schema=schema))
        if not total:
            raise ValueError(
                f"{len(documents)} documents do not fill one block of {length}: give more text or a smaller length"
            )

    return datasets.Dataset.from_file(str(cached_file(f"packed-{key[:32]}.arrow", write)))


def _joined_blocks(batches: Iterable[Array], length: int, first: int, last: int) -> Iterator[Array]:
    rest: Array = np.empty(0, dtype=np.int32)
    for tokens in batches:
        rest = np.concatenate([rest, tokens])
        count = len(rest) // (length - 2)
        body, rest = np.split(rest, [count * (length - 2)])
        blocks = np.pad(body.reshape(count, length - 2), ((0, 0), (1, 1)))
        blocks[:, 0], blocks[:, -1] = first, last
        yield blocks


def _separate_blocks(batches: Iterable[Array], length: int, first: int, last: int) -> Iterator[Array]:
    block, used = np.full(length, last, dtype=np.int32), 0
    for tokens in batches:
        blocks = [np.empty((0, length), dtype=np.int32)]
        begin = 0
        for end in (tokens == last).nonzero()[0]:  # of documents: `last` is nowhere else
            while begin < end:
                size = min(end - begin, length - used - 2)
                block[used] = first
                block[used + 1 : used + 1 + size] = tokens[begin : begin + size]
                begin, used = begin + size, used + size + 2
                if length - used < 3:
                    blocks.append(block[None])
                    block, used = np.full(length, last, dtype=np.int32), 0
            begin = end + 1
        yield np.concatenate(blocks)


def _identity(tokenizer: PreTrainedTokenizerFast) -> str:
    """All that decides how text is tokenised: without the padding and truncation of the last call."""
    return json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None})


def _tokenised(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, last: int) -> Iterable[Any]:
    """The tokens of a batch of documents at a time, each document followed by `last`."""
    marks = set(tokenizer.all_special_tokens) - {tokenizer.unk_token}
    with Progress("tokenising", len(documents)) as bar:
        for start in range(0, len(documents), BATCH):
            batch = documents[start : start + BATCH]
            encoded = dict[int, list[int]]()
            for literal in (False, True):
                chosen = [i for i, text in enumerate(batch) if any(mark in text for mark in marks) == literal]
                if chosen:
                    texts = [batch[i] for i in chosen]
                    options = {"add_special_tokens": False, "split_special_tokens": literal}
                    ids = tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]
                    encoded.update(zip(chosen, ids, strict=True))
            yield np.concatenate([np.array([*encoded[i], last], dtype=np.int32) for i in range(len(batch))])
            bar.advance(len(batch))


def _trained(documents: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size must be at least {SMALLEST}, {len(SPECIAL)} special tokens and 256 bytes")
    key = digest([FORMAT, str(vocab_size), *documents])

    def write(path: Path) -> None:
        characters = sum(map(len, documents))
        step = -(-characters // LEARN_CHARACTERS)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,  # ours is shown
        )
        learned = Tokenizer(models.BPE())
        learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        chosen = documents[:: max(step, 1)]
        with Progress("learning a vocabulary", len(chosen)) as bar:

            def read() -> Iterator[str]:
                for document in chosen:
                    yield document
                    bar.advance()

            learned.train_from_iterator(read(), trainer)
        path.write_text(learned.to_str(), encoding="utf-8")

    path = cached_file(f"bpe-{vocab_size}-{key[:32]}.json", write)
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    if len(model["vocab"]) < vocab_size:
        raise ValueError(
            f"{len(documents)} documents give {len(model['vocab'])} tokens, fewer than vocab_size {vocab_size}: give "
            "more text or a smaller vocab_size"
        )
    return _roberta(model["vocab"], [tuple(merge) for merge in model["merges"]])


def _roberta_bpe(folder: Path) -> PreTrainedTokenizerFast:
    encoder = require(folder / "encoder.json", "GPT-2's tokens and their numbers, one JSON object")
    merges_file = require(folder / "vocab.bpe", "GPT-2's merges, one pair a line")
    try:
        tokens = json.loads(encoder.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{encoder}: not JSON ({error}); expected one object of tokens and their numbers") from error
    if not isinstance(tokens, dict) or sorted(tokens.values()) != list(range(len(tokens))):
        raise ValueError(f"{encoder}: expected one JSON object of tokens, numbered from 0 without a gap")
    merges = []
    for number, line in read_lines(merges_file):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or not {*pair, "".join(pair)} <= tokens.keys():
            raise ValueError(
                f"{merges_file}, line {number}: {line!r}; expected two tokens that, like what they join to, are in "
                f"{encoder.name}"
            )
        merges.append(pair)
    if missing := pre_tokenizers.ByteLevel.alphabet() - tokens.keys():
        raise ValueError(f"{encoder}: no token for {len(missing)} of the 256 bytes, such as {min(missing)!r}")
    vocab = {name: i for i, name in enumerate(SPECIAL)}
    return _roberta(vocab | {token: len(SPECIAL) + i for token, i in tokens.items()}, merges)


def _roberta(vocab: dict[str, int], merges: Any) -> PreTrainedTokenizerFast:
    """As RoBERTa's, but <unk>, like <mask>, takes the space in front of it: it stands for a word."""
    word: dict[str, Any] = {
        f"{name}_token": AddedToken(f"<{name}>", lstrip=True, special=True, normalized=False)
        for name in ("unk", "mask")
    }
    return RobertaTokenizerFast(vocab=vocab, merges=merges, clean_up_tokenization_spaces=False, **word)
