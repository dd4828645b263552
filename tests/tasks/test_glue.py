"""Fine-tuning on GLUE: from a pre-trained run, with padding that changes nothing."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lln.tasks.glue import GlueConfig, Sentences, pad, train
from lln.tasks.mlm import MlmConfig
from lln.tasks.mlm import train as pretrain
from lln.tasks.start import find_start, pretraining

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "in", "ok", "um")]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A pre-training run of two steps."""
    folder = tmp_path_factory.mktemp("glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLN_CACHE", str(folder / "cache"))
        patch.delenv("LLN_DATA", raising=False)
        rng = np.random.default_rng(0)
        text = folder / "text.jsonl"
        text.write_text("".join(json.dumps({"text": " ".join(rng.choice(WORDS, 40))}) + "\n" for _ in range(150)))
        config = MlmConfig.preset(
            "laptop",
            attention="lln_diag",
            options={"block_size": 8, "combine": "average"},
            layers=1,
            width=16,
            heads=2,
            feedforward=16,
            length=40,
            vocab_size=270,
            steps=2,
            source=str(text),
            record_every=0,
        )
        pretrain(config, out=folder / "mlm", quiet=True)
    return folder


@pytest.fixture
def data(tmp_path):
    """SST-2 where the word "good" decides, and QNLI."""
    rng = np.random.default_rng(1)
    for split, count in (("train", 60), ("dev", 11)):
        folder = tmp_path / "glue" / "sst2"
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["label\tsentence"]
        for i in range(count):
            words = list(rng.choice(WORDS, rng.integers(1, 9)))
            lines.append(f"{i % 2}\t{' '.join([*words, 'good' if i % 2 else 'bad'])}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
        folder = tmp_path / "glue" / "qnli"
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"question": "who?", "sentence": "a b", "label": ["entailment", "not_entailment"][i % 2]} for i in range(9)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def small(started, **changes):
    given = {"start": str(started / "mlm"), "max_length": 32, "batch_size": 8, "attention_dropout": 0.1} | changes
    return GlueConfig.preset("laptop", **given)


def test_learns_and_counts_every_example(started, data, tmp_path):
    config = small(started, task="sst2", epochs=12.0, learning_rate=1e-2, save_every=1000)
    summary = train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    assert summary["attention"] == "lln_diag"
    assert summary["options"] == {"block_size": 8, "combine": "average"}
    assert summary["steps"] == 90
    assert summary["eval_accuracy"] * 11 == pytest.approx(round(summary["eval_accuracy"] * 11))
    assert summary["eval_accuracy"] > 0.9
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (settings["experiment"], settings["task"]) == ("glue", "sst2")


def test_pairs_and_another_attention(started, data, tmp_path):
    config = small(started, task="qnli", epochs=1.0, attention="performer", train_examples=5, batch_size=2)
    summary = train(config, out=tmp_path / "run", data_dir=data, quiet=True)
    assert summary["attention"] == "performer"
    assert summary["options"] == {}
    assert summary["steps"] == 3


def test_starts_from_the_pretrained_encoder(started):
    config = small(started, attention="lln_diag")
    state = find_start(config.start).build(config, 2).state_dict()
    weights = load_file(started / "mlm" / "model" / "model.safetensors")
    encoder = {name for name in weights if name.startswith("roberta.")}
    assert encoder == {name for name in state if name.startswith("roberta.")}
    assert all(torch.equal(state[name], weights[name]) for name in encoder)


def tokens(started):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(started / "mlm" / "model")


@pytest.mark.parametrize("attention", ["lln_diag", "softmax"])
def test_padding_changes_nothing(started, attention):
    tokenizer = tokens(started)
    model = find_start(str(started / "mlm")).build(small(started, attention=attention), 2).eval()
    texts = ["ba", " ".join(WORDS[:7]), "good"]
    rows = {"text_a": texts, "text_b": [None] * 3, "label": [0, 1, 0]}
    examples = [Sentences(rows, tokenizer, 32).example(i, 0) for i in range(3)]
    together = pad(examples, tokenizer.pad_token_id)
    assert together["input_ids"].shape[1] % 8 == 0
    with torch.no_grad():
        logits = model(**together)["logits"]
        for row, example in zip(logits, examples, strict=True):
            alone = model(input_ids=example["input_ids"][None])["logits"][0]
            torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": ""}, "give what to start from: --from FOLDER"),
        ({"start": "nowhere"}, "nowhere is neither a run folder nor a Hugging Face model: it has no config.json"),
        ({"max_length": 64}, "max_length 64 is more than the 40 tokens"),
        ({"options": {"block_size": 4}}, "name it too"),
    ],
)
def test_refused(started, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(small(started, **changes), out=tmp_path / "run", quiet=True)


def test_unknown_task():
    with pytest.raises(ValueError, match=r"task must be one of mnli, qnli, qqp, sst2, .*, imdb; got 'wnli'"):
        GlueConfig.preset("laptop", task="wnli")


def test_pretraining_that_is_not_finished(tmp_path, started):
    (tmp_path / "config.json").write_text((started / "mlm" / "config.json").read_text())
    with pytest.raises(ValueError, match="is not finished; repeat its command first"):
        pretraining(str(tmp_path))
    (tmp_path / "config.json").write_text('{"experiment": "ml')
    with pytest.raises(ValueError, match=r"config\.json is damaged: .*; restore it, or begin the run again"):
        pretraining(str(tmp_path))
    (tmp_path / "summary.json").touch()
    (tmp_path / "config.json").write_text('{"experiment": "mlm", "steps": 2, "shape": 1}')
    with pytest.raises(ValueError, match=r"config\.json is not of this version of lln: .*'shape'"):
        pretraining(str(tmp_path))
    (tmp_path / "config.json").write_text('{"experiment": "vision"}')
    with pytest.raises(ValueError, match=r"is neither a pre-training run, .* nor a Hugging Face model"):
        pretraining(str(tmp_path))


def test_published_warm_up_of_qqp():
    assert GlueConfig.preset("paper", task="qqp").warmup_steps == 0.25
    assert GlueConfig.preset("paper", task="mnli").warmup_steps == 0.06
    assert GlueConfig.preset("paper", task="qqp", warmup_steps=0.1).warmup_steps == 0.1
