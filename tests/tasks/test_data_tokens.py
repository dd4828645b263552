"""Tokenizers, packed blocks, masking and order."""

import json
import random

import datasets
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from lln.tasks.data.masking import IGNORED, MaskedDataset
from lln.tasks.data.order import Unrolled, draws
from lln.tasks.data.tokenizer import SPECIAL, load_tokenizer, pack

WORDS = ["the", "a", "linear", "attention", "matrix", "rows", "that", "sum", "to", "one", "and", "columns", "not"]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def documents():
    pick = random.Random(0)
    return [" ".join(pick.choices(WORDS, k=pick.randint(1, 60))) for _ in range(300)]


@pytest.fixture(scope="module")
def tokenizer(documents):
    return load_tokenizer("trained", lambda: documents, vocab_size=300, data_dir=None)


def gpt2_files(folder):
    """A byte-level BPE in GPT-2's two files."""
    folder.mkdir(parents=True)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "<|endoftext|>"]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\nĠ t\nh e\nĠt he\n", encoding="utf-8")
    return tokens


def test_a_trained_tokenizer_is_learned_once(documents, tokenizer, monkeypatch):
    assert len(tokenizer) == 300
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL)
    assert tokenizer.pad_token_id == 1
    assert tokenizer.mask_token_id == 4
    assert tokenizer("a", "b")["input_ids"][:1] == [0]
    odd = " naïve\t漢字 \x00 <mask>"
    assert tokenizer.decode(tokenizer(odd)["input_ids"], skip_special_tokens=True) == odd.removesuffix(" <mask>")
    monkeypatch.setattr("tokenizers.Tokenizer.train_from_iterator", None)
    again = load_tokenizer("trained", lambda: iter(documents), vocab_size=300, data_dir=None)
    assert again.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(TypeError):  # other text or another size is learned again
        load_tokenizer("trained", lambda: documents[1:], vocab_size=300, data_dir=None)


def test_a_damaged_tokenizer_is_learned_again(documents, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    first = load_tokenizer("trained", lambda: documents, vocab_size=300, data_dir=None)
    assert first.get_vocab() == tokenizer.get_vocab()  # learned in another cache: the same
    (file,) = tmp_path.glob("bpe-*.json")
    file.write_text(file.read_text()[:-100])
    with pytest.warns(UserWarning, match="making it again"):
        second = load_tokenizer("trained", lambda: documents, vocab_size=300, data_dir=None)
    assert second.get_vocab() == tokenizer.get_vocab()


def test_much_text_is_learned_from_in_part(documents, monkeypatch):
    monkeypatch.setattr("lln.tasks.data.tokenizer.LEARN_CHARACTERS", sum(map(len, documents)) // 3 + 1)
    seen = []

    def learn(self, texts, trainer):
        seen.extend(texts)
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenizers.Tokenizer.train_from_iterator", learn)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer("trained", lambda: documents, vocab_size=299, data_dir=None)
    assert seen == documents[::3]


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    saved = load_tokenizer(str(tmp_path), None, vocab_size=0, data_dir=None)
    odd = "the <unk> matrix <mask> </s> x"
    assert saved(odd) == tokenizer(odd)


def test_gpt2_files_make_a_tokenizer(tmp_path):
    tokens = gpt2_files(tmp_path / "roberta-bpe")
    tokenizer = load_tokenizer("roberta-bpe", None, vocab_size=0, data_dir=tmp_path)
    assert len(tokenizer) == 5 + len(tokens)
    pieces = ["<s>", "t", "he", "Ġthe", "<mask>", "Ġ", "x", "</s>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("the the <mask> x")["input_ids"]) == pieces
    assert tokenizer.convert_tokens_to_ids("Ġthe") == 5 + tokens.index("Ġthe")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("encoder.json", "{", r"encoder\.json: not JSON"),
        ("encoder.json", '{"a": 0, "b": 2}', r"encoder\.json: expected one JSON object of tokens, numbered"),
        ("encoder.json", '{"\\u0120": 0, "t": 1, "\\u0120t": 2}', r"vocab\.bpe, line 3: 'h e'"),
        ("vocab.bpe", "#version: 0.2\nĠ t\nhe\n", r"vocab\.bpe, line 3: 'he'; expected two tokens"),
        ("vocab.bpe", "#version: 0.2\nx y\n", r"vocab\.bpe, line 2: 'x y'"),
        ("vocab.bpe", None, r"vocab\.bpe is missing: expected GPT-2's merges"),
    ],
)
def test_broken_gpt2_files_are_named(tmp_path, file, content, message):
    gpt2_files(tmp_path / "roberta-bpe")
    path = tmp_path / "roberta-bpe" / file
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_tokenizer("roberta-bpe", None, vocab_size=0, data_dir=tmp_path)


def test_a_vocabulary_without_all_bytes_is_refused(tmp_path):
    gpt2_files(tmp_path / "roberta-bpe")
    (tmp_path / "roberta-bpe" / "encoder.json").write_text('{"a": 0}')
    (tmp_path / "roberta-bpe" / "vocab.bpe").write_text("")
    with pytest.raises(ValueError, match="no token for 255 of the 256 bytes"):
        load_tokenizer("roberta-bpe", None, vocab_size=0, data_dir=tmp_path)


def test_tokenizers_that_cannot_be_are_refused(documents, tmp_path):
    for name, size, message in (
        ("trained", 260, "vocab_size must be at least 261"),
        ("trained", 5000, "fewer than vocab_size 5000"),
        ("roberta-bpe", 0, "needs data"),
        ("nothing", 0, "unknown tokenizer 'nothing'"),
        (str(tmp_path), 0, "holds no tokenizer that can be read"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(name, lambda: documents, vocab_size=size, data_dir=None)
    with pytest.raises(ValueError, match="needs documents"):
        load_tokenizer("trained", None, vocab_size=300, data_dir=None)


@pytest.mark.parametrize("length", [3, 17, 128])
@pytest.mark.parametrize("batch", [7, 1000])
def test_blocks_are_the_documents_end_to_end(documents, tokenizer, tmp_path, monkeypatch, length, batch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    monkeypatch.setattr("lln.tasks.data.tokenizer.BATCH", batch)
    stream = [i for text in documents for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]]
    inner = length - 2
    expected = [[0, *stream[i : i + inner], 2] for i in range(0, len(stream) - inner + 1, inner)]
    packed = pack(documents, tokenizer, length)
    assert packed["input_ids"][:] == expected


@pytest.mark.parametrize("length", [3, 4, 5, 17, 128])
@pytest.mark.parametrize("batch", [7, 1000])
def test_separate_documents_have_their_own_ends(documents, tokenizer, tmp_path, monkeypatch, length, batch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    monkeypatch.setattr("lln.tasks.data.tokenizer.BATCH", batch)
    expected, block = [], []
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        while ids:
            size = length - len(block) - 2
            block += [0, *ids[:size], 2]
            ids = ids[size:]
            if length - len(block) < 3:
                expected.append(block + [2] * (length - len(block)))
                block = []
    found = pack(documents, tokenizer, length, separate=True)["input_ids"][:]
    assert found == expected
    joined = pack(documents, tokenizer, length)["input_ids"][:]
    assert pack(documents, tokenizer, length)["input_ids"][:] == joined != found


def test_separate_documents_are_numbered_and_their_positions_start_again(documents, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    blocks = pack(documents, tokenizer, 48, separate=True)
    masked = MaskedDataset(blocks, tokenizer, seed=5, separate=True)
    several = 0
    for index, block in enumerate(blocks["input_ids"][:]):
        numbers, positions = [], []
        for token in block:
            numbers.append(len(numbers) and numbers[-1] + (token == 0))
            positions.append(2 if token == 0 else positions[-1] + 1)
        example = masked.example(index, 3)
        assert example["seq_idx"].tolist() == numbers
        assert example["position_ids"].tolist() == positions
        several += numbers[-1] > 0
    assert several
    plain = MaskedDataset(blocks, tokenizer, seed=5)[0]
    assert plain.keys() == {"input_ids", "labels"}
    assert all(torch.equal(plain[name], masked[0][name]) for name in plain)


def test_marks_in_text_stay_text_but_for_the_unknown_word(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)  # leaves nothing behind that matters
    packed = pack(["the </s> <mask> <pad>", "one <unk> row", "x" * 30], tokenizer, 8)
    tokens = [i for block in packed["input_ids"] for i in block[1:-1]]
    assert tokenizer.decode(tokens).startswith("the </s> <mask> <pad></s>one<unk> row</s>xxx")
    assert tokens.count(2) == 2
    assert tokens.count(3) == 1
    assert not {1, 4} & set(tokens)
    assert 4 in tokenizer("a <mask>")["input_ids"]
    (file,) = tmp_path.glob("packed-*.arrow")
    tokenizer(["a", "b"], padding=False)
    pack(["the </s> <mask> <pad>", "one <unk> row", "x" * 30], tokenizer, 8)
    assert list(tmp_path.glob("packed-*.arrow")) == [file]


def test_damaged_blocks_are_made_again(documents, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    blocks = pack(documents, tokenizer, 16)["input_ids"][:]
    (file,) = tmp_path.glob("packed-*.arrow")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.warns(UserWarning, match="making it again"):
        assert pack(documents, tokenizer, 16)["input_ids"][:] == blocks


def test_too_little_text_and_too_short_blocks_are_refused(tokenizer):
    with pytest.raises(ValueError, match="do not fill one block of 512"):
        pack(["the matrix"], tokenizer, 512)
    with pytest.raises(ValueError, match="at least 3"):
        pack(["the matrix"], tokenizer, 2)


@pytest.fixture(scope="module")
def packed(documents, tokenizer):
    return pack(documents * 4, tokenizer, 64)


def test_masking_hides_and_shows_as_it_should(packed, tokenizer):
    masked = MaskedDataset(packed, tokenizer, seed=5)
    assert len(masked) == len(packed)
    original = torch.tensor(packed["input_ids"][:])
    shown, labels = (
        torch.stack([masked.example(i, 2)[name] for i in range(len(masked))]) for name in ("input_ids", "labels")
    )
    assert shown.dtype == labels.dtype == torch.int64
    special = original < len(SPECIAL)
    hidden = labels != IGNORED
    assert torch.equal(labels[hidden], original[hidden])
    assert torch.equal(shown[~hidden], original[~hidden])
    assert not (hidden & special).any()
    expected = 0.15 * (~special).sum(dim=1)
    assert ((hidden.sum(dim=1) - expected).abs() < 1).all()
    assert hidden.sum().item() == pytest.approx(expected.sum().item(), rel=0.02)
    as_mask = shown[hidden] == tokenizer.mask_token_id
    as_self = shown[hidden] == labels[hidden]
    assert as_mask.double().mean().item() == pytest.approx(0.8, abs=0.02)
    assert as_self.double().mean().item() == pytest.approx(0.1, abs=0.02)
    others = shown[hidden][~as_mask & ~as_self]
    assert (others >= len(SPECIAL)).all()
    assert others.unique().numel() > 0.5 * len(tokenizer)
    places = hidden[:, 1:-1].double().mean(dim=0)  # every place is as likely
    assert places.std() < 4 * (0.15 * 0.85 / len(masked)) ** 0.5


def test_masking_depends_on_seed_epoch_and_index_alone(packed, tokenizer):
    masked = MaskedDataset(packed, tokenizer, seed=5)
    once = [masked.example(i, 1) for i in range(6)]
    torch.manual_seed(9)
    np.random.seed(9)
    again = MaskedDataset(packed, tokenizer, seed=5)
    for i in (4, 0, 2):
        assert all(torch.equal(once[i][name], again.example(i, 1)[name]) for name in once[i])
    assert torch.equal(masked[3]["labels"], masked.example(3, 0)["labels"])
    different = [masked.example(3, 0), masked.example(3, 1), MaskedDataset(packed, tokenizer, seed=6).example(3, 0)]
    patterns = {tuple((one["labels"] != IGNORED).tolist()) for one in different}
    assert len(patterns) == 3
    twice = MaskedDataset(datasets.concatenate_datasets([packed.select([3]), packed.select([3])]), tokenizer, seed=5)
    assert not torch.equal(twice[0]["labels"], twice[1]["labels"])


def test_masking_covers_a_chosen_part_and_several_chunks(packed, tokenizer):
    chosen = MaskedDataset(packed.select([7, 2]), tokenizer, seed=0)
    joined = MaskedDataset(datasets.concatenate_datasets([packed, packed.select([2, 7])]), tokenizer, seed=0)

    def whole(example):
        return torch.where(example["labels"] == IGNORED, example["input_ids"], example["labels"]).tolist()

    assert [whole(chosen[i]) for i in range(2)] == [packed[7]["input_ids"], packed[2]["input_ids"]]
    assert whole(joined[len(packed) + 1]) == packed[7]["input_ids"]
    for index in (-1, len(joined)):
        with pytest.raises(IndexError):
            joined[index]


def test_blocks_of_special_tokens_and_short_blocks(tokenizer):
    def masked(*blocks):
        rows = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=len(blocks[0]))})
        return MaskedDataset(datasets.Dataset.from_dict({"input_ids": blocks}, rows), tokenizer, seed=0)

    assert (masked([0, 2, 2])[0]["labels"] == IGNORED).all()
    one = masked(*[[0, 9, 2]] * 20)
    assert all(one[i]["labels"].tolist() == [IGNORED, 9, IGNORED] for i in range(20))  # never nothing to learn


def test_masking_refuses_what_it_cannot_do(packed, tokenizer):
    with pytest.raises(ValueError, match="between 0 and 1"):
        MaskedDataset(packed, tokenizer, seed=0, probability=15)


def test_epochs_end_to_end_show_every_example_once_each():
    class Pairs:
        def __len__(self):
            return 7

        def example(self, index, epoch):
            return epoch, index

    unrolled = Unrolled(Pairs(), epochs=3, seed=1)
    seen = [unrolled[i] for i in range(len(unrolled))]
    assert [epoch for epoch, _ in seen] == [0] * 7 + [1] * 7 + [2] * 7
    orders = [[index for _, index in seen[start : start + 7]] for start in (0, 7, 14)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert Unrolled(Pairs(), epochs=3, seed=1)[17] == seen[17]
    assert [Unrolled(Pairs(), epochs=1, seed=2)[i] for i in range(7)] != seen[:7]
    with pytest.raises(IndexError):
        unrolled[21]
    with pytest.raises(ValueError, match="at least 1"):
        Unrolled(Pairs(), epochs=0, seed=1)


def test_draws_of_different_examples_are_different_streams():
    streams = np.array([draws(s, e, i).random(500) for s in (0, 1) for e in (0, 1) for i in (0, 1, 2**40)])
    assert np.abs(np.corrcoef(streams) - np.eye(len(streams))).max() < 0.2
