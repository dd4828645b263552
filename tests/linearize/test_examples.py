"""Classifiers made linear on the examples of their task: `lln linearize --task`."""

import json

import datasets
import pytest
import torch

from lln.linearize import linearize
from lln.linearize.command import run as run_command
from lln.linearize.data import ExampleSource
from lln.linearize.losses import hidden_loss, logits_loss, output_loss, weights_loss
from lln.linearize.sources import make_source
from lln.linearize.teacher import Observation
from lln.zoo import build

FEW = {"align_steps": 2, "join_steps": 1, "distil_steps": 2}


@pytest.fixture
def rows(texts):
    """Pairs of short sentences of different lengths, with one of two labels."""
    words = " ".join(texts).split()
    pieces = [" ".join(words[40 * i : 40 * i + 3 + i % 9]) for i in range(100)]
    found = {"text_a": pieces[:50], "text_b": pieces[50:], "label": [i % 2 for i in range(50)]}
    features = datasets.Features(
        text_a=datasets.Value("string"), text_b=datasets.Value("string"), label=datasets.ClassLabel(2)
    )
    return datasets.Dataset.from_dict(found, features=features)


@pytest.fixture
def classifier(make):
    return make("bert", "ModelForSequenceClassification", num_labels=2)


def run(model, tokenizer, rows, config, **options):
    return linearize(model, tokenizer, rows, config=config, **{"quiet": True} | options)


def equal(one, other):
    state = other.state_dict()
    return all(torch.equal(x, state[name]) for name, x in one.state_dict().items())


def test_predictions_are_kept_and_both_models_measured_on_the_labels(classifier, tokenizer, rows, quick, tmp_path):
    found = run(classifier, tokenizer, rows, quick(distil_steps=30, attention="lln"), held_out=rows, out=tmp_path)
    kept = {stage: x[-1]["divergence"] for stage, x in found.report["kept"].items()}
    assert kept["distil"] < 0.5 * kept["calibrate"]
    labelled = found.report["labelled"]
    assert labelled["examples"] == len(rows)
    for name, model in (("softmax", classifier), ("linear", found.model)):
        right = 0
        for text_a, text_b, label in zip(rows["text_a"], rows["text_b"], rows["label"], strict=True):
            inputs = tokenizer(text_a, text_b, return_tensors="pt", return_token_type_ids=True)
            with torch.no_grad():
                right += int(model(**inputs).logits.argmax()) == label
        assert labelled[f"{name}_accuracy"] == pytest.approx(right / len(rows))
    assert {"softmax_f1", "linear_matthews"} <= labelled.keys()
    assert "Labelled examples" in (tmp_path / "report.md").read_text()


def test_nothing_is_learned_from_labels(classifier, tokenizer, rows, quick):
    turned = rows.map(lambda row: {"label": 1 - row["label"]})
    made = [run(classifier, tokenizer, x, quick(**FEW), held_out=x).model for x in (rows, turned)]
    assert equal(*made)


def test_a_regression_is_measured_by_correlation(make, tokenizer, rows, quick):
    model = make("bert", "ModelForSequenceClassification", num_labels=1)
    features = rows.features | {"label": datasets.Value("float32")}
    scored = rows.map(lambda row: {"label": float(len(row["text_a"]))}, features=datasets.Features(features))
    report = run(model, tokenizer, scored, quick(**FEW), held_out=scored).report
    assert {"softmax_spearman", "linear_pearson"} <= report["labelled"].keys()
    assert report["kept"]["distil"][-1]["divergence"] >= 0


def test_held_out_examples_are_never_learned_from(classifier, tokenizer, rows, quick):
    source = make_source(classifier, tokenizer, rows, None, quick(examples=30))
    assert isinstance(source, ExampleSource)
    learned = {
        tuple(ids[mask.bool()].tolist())
        for stage in ("align", "join", "distil")
        for step in range(40)
        for batch in [source.batch(stage, step)]
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    }
    assert len(learned) == 30
    measured = {tuple(x.tolist()) for batch in source.held_out(0) for x in batch["input_ids"]}
    assert learned.isdisjoint({tuple(x for x in ids if x) for ids in measured})
    assert all("labels" not in source.batch("distil", step) for step in range(3))


def test_a_continued_run_ends_with_the_same_bits(classifier, tokenizer, rows, quick, tmp_path, monkeypatch):
    config = quick(save_seconds=0.0)
    whole = run(classifier, tokenizer, rows, config, out=tmp_path / "whole").model
    original, calls = ExampleSource.batch, []

    def stopping(self, stage, step):
        calls.append(stage)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return original(self, stage, step)

    monkeypatch.setattr(ExampleSource, "batch", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(classifier, tokenizer, rows, config, out=tmp_path / "stopped")
    monkeypatch.undo()
    assert equal(whole, run(classifier, tokenizer, rows, config, out=tmp_path / "stopped").model)


def test_losses_leave_padding_out():
    """A batch with padding has the losses of its examples without padding."""
    torch.manual_seed(0)
    query, key, value, output = torch.randn(4, 2, 2, 6, 4)
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 4:] = False
    seen = Observation(query, key, value, keep, False, output)
    alone = []
    for i, count in enumerate((6, 4)):
        parts = [x[i : i + 1, :, :count] for x in (query, key, value, output)]
        alone.append(Observation(*parts[:3], None, False, parts[3]))
    counts = torch.tensor([6.0, 4.0])
    found = weights_loss((query, key), seen, torch.arange(6))
    wanted = torch.stack([weights_loss((x.query, x.key), x, torch.arange(x.query.shape[2])) for x in alone])
    torch.testing.assert_close(found, (wanted * counts[:, None]).sum(dim=0) / counts.sum())
    mechanism = build("elu", num_heads=2, head_dim=4)
    sizes = torch.tensor([x.output.square().sum() for x in alone])
    wanted = torch.stack([output_loss(mechanism, x) for x in alone])
    torch.testing.assert_close(output_loss(mechanism, seen), (wanted * sizes).sum() / sizes.sum())
    changed = output.masked_fill(~keep[:, None, :, None], 1e3).transpose(1, 2).flatten(2)
    states = (changed, changed), (output.transpose(1, 2).flatten(2),) * 2
    assert hidden_loss(*states, keep) == 0
    assert logits_loss(torch.tensor([[2.0]]), torch.tensor([[5.0]])) == 9


def test_what_does_not_fit_is_refused(make, classifier, tokenizer, rows, quick, tmp_path):
    out = tmp_path / "linear"
    for model, message in (
        (make("bert"), "for a model that was fine-tuned to classify, not BertModel"),
        (make("bert", "ModelForSequenceClassification", num_labels=3), "have 2 classes and the model predicts 3"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, tokenizer, rows, quick(), out=out)
    with pytest.raises(ValueError, match="examples must be at least 2"):
        quick(examples=1)
    assert not out.exists()


def test_the_command(classifier, tokenizer, tmp_path, quick):
    folder, data = tmp_path / "model", tmp_path / "data" / "glue" / "rte"
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    data.mkdir(parents=True)
    for part, count in (("train", 40), ("dev", 12)):
        examples = [
            {
                "premise": f"w{i} w{i + 1} w{i + 2}",
                "hypothesis": f"w{i + 3}",
                "label": ("entailment", "not_entailment")[i % 2],
            }
            for i in range(count)
        ]
        (data / f"{part}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in examples))
    options = {"data_dir": tmp_path / "data", "quiet": True}
    found = run_command(str(folder), tmp_path / "a", quick(**FEW), task="rte", **options)
    assert found.report["labelled"]["examples"] == 12
    assert found.report["origin"]["task"] == "rte"
    found = run_command(str(folder), tmp_path / "b", quick(**FEW), task="rte", hold_out=True, **options)
    assert found.report["labelled"]["examples"] == 4  # a tenth of the training examples
    for given, message in (
        ({"hold_out": True}, "are of the examples of a --task"),
        ({"task": "rte", "text": tmp_path}, "--text, or the examples of a task, --task, and not both"),
    ):
        with pytest.raises(ValueError, match=message):
            run_command(str(folder), tmp_path / "c", quick(), **options, **given)
    assert not (tmp_path / "c").exists()
