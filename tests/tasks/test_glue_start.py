"""Fine-tuning from Hugging Face models and linearised ones, learning rates chosen on held-out training data."""

import json
import shutil
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lln.linearize import LinearizeConfig, linearize
from lln.linearize.teacher import converted_modules
from lln.tasks import evaluation, glue
from lln.tasks.data.glue import read_glue
from lln.tasks.data.order import Unrolled
from lln.tasks.glue import GlueConfig, Sentences, pad, split_rows, train
from lln.tasks.start import find_start

WORDS = [f"w{i}" for i in range(40)]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {word: i + 4 for i, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


@pytest.fixture(scope="module")
def softmax(tokenizer, tmp_path_factory):
    """A folder with a tiny BERT."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=44, max_position_embeddings=32, **SIZES)
    transformers.utils.logging.disable_progress_bar()
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def linear(softmax, tokenizer, tmp_path_factory):
    """The same, made linear."""
    folder = tmp_path_factory.mktemp("linear")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 40)) for _ in range(8)]
    small = {"length": 24, "tokens": 400, "batch_tokens": 48, "calibration_tokens": 48, "eval_passages": 2, "rows": 8}
    steps = {"align_steps": 1, "join_steps": 1, "distil_steps": 1, "cost_tokens": 0}
    config = LinearizeConfig(options={"block_size": 8}, **small, **steps)
    model = transformers.BertModel.from_pretrained(softmax)
    linearize(model, tokenizer, texts, out=folder, config=config, quiet=True)
    return folder


@pytest.fixture
def data(tmp_path):
    """RTE where the last word decides, and STS-B where the share of equal words does."""
    rng = np.random.default_rng(1)
    rte, stsb = tmp_path / "glue" / "rte", tmp_path / "glue" / "stsb"
    for folder in (rte, stsb):
        folder.mkdir(parents=True)
    for split, count in (("train", 64), ("dev", 13)):
        rows = []
        for i in range(count):
            words = " ".join(rng.choice(WORDS[2:], rng.integers(1, 12)))
            label = ("entailment", "not_entailment")[i % 2]
            rows.append({"premise": words, "hypothesis": WORDS[i % 2], "label": label})
        (rte / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [
            {"sentence1": WORDS[i % 6], "sentence2": f"{WORDS[i % 5]} w9", "score": float(i % 6)} for i in range(count)
        ]
        (stsb / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def small(start, **changes):
    given = {"start": str(start), "task": "rte", "max_length": 24, "batch_size": 8, "steps": 3, "rates": ()}
    return GlueConfig.preset("laptop", **given | {"learning_rate": 1e-2} | changes)


def test_the_preset_follows_what_is_started_from(softmax, linear, tmp_path):
    for start in (softmax, linear):
        config = GlueConfig.preset("laptop", start=str(start), task="rte")
        assert config.rates == (1e-4, 2e-4)
        assert (config.train_examples, config.epochs) == (8000, 3.0)
    assert GlueConfig.preset("laptop", start=str(softmax), task="imdb").max_length == 512
    assert GlueConfig.preset("laptop", start=str(softmax), learning_rate=3e-5).rates == ()
    assert GlueConfig.preset("laptop", start=str(softmax), steps=7).epochs is None
    scratch = GlueConfig.preset("laptop", start=str(tmp_path))
    assert (scratch.learning_rate, scratch.rates, scratch.group_lengths) == (1e-3, (), False)


def test_learns_from_a_softmax_model_and_counts_pairs(softmax, data, tmp_path):
    config = small(softmax, steps=60, dropout=0.0)
    summary = train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    assert summary["eval_accuracy"] == 1.0
    assert summary["attention"] == "softmax"
    assert (summary["train_examples"], summary["eval_examples"], summary["learning_rate"]) == (64, 13, 1e-2)


def test_starts_from_the_weights_of_the_folder(softmax, linear):
    for folder, attention in ((softmax, "softmax"), (linear, "lln_diag")):
        start = find_start(str(folder))
        assert start.attention == attention
        model = start.build(small(folder, attention=attention, options=start.options), 3)
        saved = transformers.AutoModel.from_pretrained(softmax) if folder is softmax else None
        if saved is not None:
            state = model.bert.state_dict()
            assert all(torch.equal(x, state[name]) for name, x in saved.state_dict().items())
        else:
            from safetensors.torch import load_file

            state, weights = model.bert.state_dict(), load_file(folder / "model.safetensors")
            assert weights.keys() <= state.keys()
            assert all(torch.equal(x, state[name]) for name, x in weights.items())
            assert {type(x.mechanism).description.name for x in converted_modules(model).values()} == {"lln_diag"}
        assert model.classifier.out_features == 3


@pytest.mark.parametrize("kind", ["softmax", "linear", "converted"])
def test_scores_are_learned_as_numbers(kind, softmax, linear, data, tmp_path):
    start, options = (linear, {}) if kind == "linear" else (softmax, {})
    if kind == "converted":
        options = {"attention": "lln_diag", "options": {"block_size": 4}}
    config = small(start, task="stsb", steps=2, **options)
    summary = train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    assert -1 <= summary["eval_spearman"] <= 1
    assert -1 <= summary["eval_pearson"] <= 1
    assert summary["eval_loss"] > 1  # the square of an error from 0 to 5
    assert summary["attention"] == ("softmax" if kind == "softmax" else "lln_diag")


@pytest.fixture
def fits(monkeypatch):
    """Trainings that take no time and find what `found` gives for a rate; `seen` is what they were given."""

    class Fits:
        found: ClassVar[dict] = {}
        seen: ClassVar[list] = []
        stops_at = 0

    Fits.seen = []

    def fit(model, *, run, config, train_data, eval_data, notes, **rest):
        Fits.seen.append((run.path.name, config.learning_rate, len(train_data), len(eval_data), config.steps))
        if len(Fits.seen) == Fits.stops_at:
            raise KeyboardInterrupt
        accuracy, loss = Fits.found[config.learning_rate]
        run.finish(lambda folder: None, {"eval_accuracy": accuracy, "eval_loss": loss} | (notes or {}))
        return run.summary

    monkeypatch.setattr(glue, "fit", fit)
    return Fits


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ({1e-4: (0.5, 0.7), 1e-3: (0.6, 0.9)}, 1e-3),
        ({1e-4: (0.6, 0.7), 1e-3: (0.6, 0.9)}, 1e-4),
        ({1e-4: (0.5, 0.7), 1e-3: (0.6, None)}, 1e-4),
    ],
    ids=["by accuracy", "then by loss", "not one that diverges"],
)
def test_the_rate_is_chosen_on_held_out_training_data(fits, softmax, data, tmp_path, found, best):
    """And never on the data that is reported, which no trial uses."""
    fits.found = found
    config = small(softmax, steps=40, rates=tuple(found), trial_share=0.75)
    summary = train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    trials = [("0.0001", 1e-4, 58, 6, 30), ("0.001", 1e-3, 58, 6, 30)]
    assert fits.seen == [*trials, ("run", best, 64, 13, 40)]
    assert summary["learning_rate"] == best
    assert not list((tmp_path / "run" / "rates").glob("*/model"))


def test_an_interrupted_choice_goes_on_where_it_was(fits, softmax, data, tmp_path):
    fits.found, fits.stops_at = {1e-4: (0.5, 0.7), 1e-3: (0.6, 0.9)}, 2
    config = small(softmax, rates=(1e-4, 1e-3))
    with pytest.raises(KeyboardInterrupt):
        train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    summary = train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    assert [name for name, *_ in fits.seen] == ["0.0001", "0.001", "0.001", "run"]
    assert summary["learning_rate"] == 1e-3


def test_rates_are_tried_in_earnest(softmax, data, tmp_path):
    config = small(softmax, steps=2, rates=(1e-3, 1e-2), train_examples=16)
    summary = train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    assert set(summary["trials"]) == {"0.001", "0.01"}
    assert f"{summary['learning_rate']:g}" in summary["trials"]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["learning_rate"] <= summary["learning_rate"]
    assert sorted(x.name for x in (tmp_path / "run" / "rates" / "0.01").iterdir() if x.is_dir()) == ["tensorboard"]


def test_equal_texts_are_on_one_side(data):
    rows = read_glue("stsb", "train", data)
    kept, held_out = split_rows(rows)
    sides = [set(zip(x["text_a"], x["text_b"], strict=True)) for x in (kept, held_out)]
    assert not sides[0] & sides[1]
    assert len(kept) + len(held_out) == len(rows)
    assert len(held_out) >= 1
    with pytest.raises(ValueError, match="1 training example is too few to hold some out"):
        split_rows(rows.select([0]))


def test_token_types_mark_the_texts_of_a_pair(tokenizer):
    rows = {"text_a": ["w1 w2", "w1"], "text_b": ["w3", "w3 w4"], "label": [0, 1]}
    examples = Sentences(rows, tokenizer, 24, token_types=True)
    batch = pad([examples.example(i, 0) for i in range(2)], 0)
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]]
    assert batch["attention_mask"].sum(dim=1).tolist() == [6, 6]
    assert "token_type_ids" not in Sentences(rows, tokenizer, 24).example(0, 0)


def test_batches_of_similar_lengths_hold_every_example_once(tokenizer):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 20))) for _ in range(203)]
    rows = {"text_a": texts, "text_b": [None] * 203, "label": [0] * 203}
    examples = Sentences(rows, tokenizer, 24)
    orders = {alike: Unrolled(examples, epochs=2, seed=0, lengths_alike=alike) for alike in (0, 8)}
    widths = {}
    for alike, order in orders.items():
        taken = [order._order(epoch) for epoch in (0, 1)]
        assert all(sorted(x.tolist()) == list(range(203)) for x in taken)
        assert taken[0].tolist() != taken[1].tolist()
        batches = [[examples.lengths[i] for i in taken[0][s : s + 8]] for s in range(0, 200, 8)]
        widths[alike] = sum(map(max, batches))
    assert widths[8] < 0.7 * widths[0]
    in_order = Sentences(rows, tokenizer, 24, by_length=True)
    assert in_order.lengths == sorted(examples.lengths)
    assert [len(in_order.example(i, 0)["input_ids"]) for i in range(203)] == in_order.lengths


def test_metrics_get_the_examples_of_all_processes_once(monkeypatch):
    """Two processes, one after the other; the second one gathers what the first has read."""

    class Ten:
        def __len__(self):
            return 10

        def example(self, index, epoch):
            return {"x": torch.tensor([float(index)]), "labels": torch.tensor(float(index))}

    class Accelerator:
        device, num_processes = torch.device("cpu"), 2

        def __init__(self, index):
            self.process_index = index

        def reduce(self, tensor):
            return tensor

    gathered, calls = [], []

    def gather(seen):
        gathered.extend(seen)
        return list(gathered)

    monkeypatch.setattr(evaluation, "gather_object", gather)

    class Model(torch.nn.Module):
        def forward(self, x, labels):
            return {"loss": (x[:, 0] - labels).square().mean(), "logits": -x}

    def measure(logits, labels):
        calls.append(sorted(zip(logits[:, 0].tolist(), labels.tolist(), strict=True)))
        return {"count": float(len(labels))}

    options = {"batch_size": 3, "collate": transformers.default_data_collator, "autocast": nullcontext}
    for index in (0, 1):
        found = evaluation.evaluate(
            Model(),
            Ten(),
            Accelerator(index),
            score=evaluation.loss_scores,
            measure=measure,
            on_batch=lambda share: None,
            **options,
        )
    assert found == {"loss": 0.0, "count": 10.0}
    assert calls[-1] == sorted((-float(i), float(i)) for i in range(10))


def test_what_cannot_be_started_from(softmax, linear, data, tmp_path):
    def refused(message, start, **changes):
        with pytest.raises(ValueError, match=message):
            train(small(start, **changes), out=tmp_path / "run", data_dir=data, quiet=True)
        assert not (tmp_path / "run").exists()

    refused(r"was trained with lln_diag attention; leave --attention", linear, attention="elu")
    refused(r"max_length 128 is more than the 32 tokens", softmax, max_length=128)
    refused(r"block_size", softmax, attention="lln_diag", options={"block_size": 0})
    refused(r"glue.qnli is missing", softmax, task="qnli")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "nothing"}')
    refused(r"broken holds no Hugging Face model that can be read", broken)
    (broken / "config.json").write_text('{"model_type": "clip"}')
    refused(r"broken holds a clip model, which has no form that classifies texts", broken)
    shutil.copytree(softmax, broken, dirs_exist_ok=True)
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer_config.json").unlink()
    refused("broken has no tokenizer", broken)  # transformers would make an empty one
    shutil.copytree(softmax, broken, dirs_exist_ok=True)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    refused("lacks weights of its encoder: bert.encoder.layer.1", broken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": (1e-4, 0.0)}, "rates must be above 0"),
        ({"trial_share": 0.0}, "trial_share must be above 0 and at most 1"),
        ({"eval_examples": 0}, "eval_examples must be at least 1"),
    ],
)
def test_settings_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GlueConfig.preset("laptop", **changes)
