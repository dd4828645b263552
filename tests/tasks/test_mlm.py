"""Pre-training: the model that computes logits of labelled positions alone, and `lln train`."""

import dataclasses
import json

import pytest
import torch
import transformers
from typer.testing import CliRunner

import lln.hf
from lln.cli.train import app
from lln.tasks.config import parse_options
from lln.tasks.mlm import MlmConfig, RobertaForMaskedLM, roberta_config, start_local, train
from lln.tasks.presets import GlueConfig, VisionConfig

SMALL = ("--layers", "1", "--width", "16", "--heads", "2", "--feedforward", "16", "--length", "16", "--steps", "2")


@pytest.fixture
def config():
    return transformers.RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )


def test_same_loss_as_the_model_it_stands_for(config):
    torch.manual_seed(0)
    ours = RobertaForMaskedLM(config).eval()
    theirs = transformers.RobertaForMaskedLM(config).eval()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(5, 50, (3, 11))
    labels = torch.where(torch.rand(3, 11) < 0.3, tokens, -100)
    found, expected = ours(tokens, labels=labels), theirs(tokens, labels=labels)
    torch.testing.assert_close(found["loss"], expected.loss)
    torch.testing.assert_close(found["logits"], expected.logits[labels != -100])
    torch.testing.assert_close(ours(tokens).logits, expected.logits)
    number = int((labels != -100).sum())
    torch.testing.assert_close(ours(tokens, labels=labels, num_items_in_batch=2 * number)["loss"], expected.loss / 2)


@pytest.mark.parametrize("attention", ["softmax", "lln_diag", "performer"])
def test_documents_of_a_row_are_computed_as_alone(config, attention):
    torch.manual_seed(0)
    model = lln.hf.convert(RobertaForMaskedLM(config).eval(), attention)
    tokens = torch.randint(5, 50, (2, 12))
    numbers = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1, 2, 2]])
    positions = torch.tensor([[*range(2, 7), *range(2, 9)], [*range(2, 11), 2, 2, 3]])
    labels = torch.where(torch.rand(2, 12) < 0.5, tokens, -100)
    inputs = {"seq_idx": numbers, "position_ids": positions}
    found = model(tokens, **inputs).logits
    for row, lengths in enumerate(([5, 7], [9, 1, 2])):
        alone = torch.cat([model(part[None]).logits[0] for part in tokens[row].split(lengths)])
        torch.testing.assert_close(found[row], alone, rtol=1e-4, atol=1e-5)
    scored = model(tokens, labels=labels, **inputs)
    torch.testing.assert_close(scored["logits"], found[labels != -100])


@pytest.mark.parametrize(("scale", "least", "most"), [(0.0, 0.9, 1.1), (2.0, 2.0, 20.0)], ids=["random", "local"])
def test_local_start_attends_to_neighbours(config, scale, least, most):
    torch.manual_seed(0)
    config.hidden_size, config.intermediate_size, config.initializer_range = 64, 64, 0.05
    model = RobertaForMaskedLM(config)
    if scale:
        start_local(model, scale)
    model.set_attn_implementation("eager")
    tokens = torch.randint(5, 50, (8, 48))
    weights = model.eval().roberta(tokens, output_attentions=True).attentions[0]
    near = weights.diagonal(1, dim1=2, dim2=3).mean() * 48  # against uniform attention
    assert least < near < most


def test_saved_under_the_name_of_the_model_it_stands_for(config, tmp_path):
    ours = RobertaForMaskedLM(config)
    ours.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["RobertaForMaskedLM"]
    theirs = transformers.RobertaForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


def test_paper_preset_is_roberta_base():
    from transformers import RobertaTokenizerFast

    tokenizer = RobertaTokenizerFast(vocab={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}, merges=[])
    config = roberta_config(MlmConfig.preset("paper"), tokenizer)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (12, 768, 12)
    assert (config.intermediate_size, config.max_position_embeddings) == (3072, 514)


@pytest.mark.parametrize(("name", "kind"), [("mlm", MlmConfig), ("glue", GlueConfig), ("vision", VisionConfig)])
def test_every_setting_is_a_flag(name, kind):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    renamed = {"options": "--option", "start": "--from", "rates": "--rate"}
    for field in dataclasses.fields(kind):
        assert renamed.get(field.name, "--" + field.name.replace("_", "-")) + " " in shown
    assert ", ".join(kind.PRESETS) in shown


def test_flags_reach_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"word{i} " * 60}) + "\n" for i in range(150)))
    out = tmp_path / "run"
    arguments = ["mlm", *SMALL, "--source", str(source), "--vocab-size", "270", "--attention", "lln", "--out", str(out)]
    arguments += ["--option", "alpha=2.5", "--option", "matching=entropy", "--betas", "0.8", "0.9", "--quiet"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert not result.output
    settings = json.loads((out / "config.json").read_text())
    assert "pack" not in settings  # as in runs from before there was this setting
    with pytest.raises(ValueError, match="pack was None, is True"):
        CliRunner().invoke(app, [*arguments, "--pack"], catch_exceptions=False)
    assert settings["options"] == {"alpha": 2.5, "matching": "entropy"}
    assert settings["betas"] == [0.8, 0.9]
    assert settings["steps"] == 2
    with pytest.raises(ValueError, match="steps was 2, is 3"):
        CliRunner().invoke(app, [*arguments, "--steps", "3"], catch_exceptions=False)


def test_epochs_replace_steps(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("lln.tasks.mlm.train", lambda config, **rest: given.append(config))
    CliRunner().invoke(app, ["mlm", "--epochs", "1.5"], catch_exceptions=False)
    assert (given[0].steps, given[0].epochs) == (None, 1.5)


def test_options():
    assert parse_options(["a=1", "b=2.5", "c=True", "d=word", "e=None"]) == {
        "a": 1,
        "b": 2.5,
        "c": True,
        "d": "word",
        "e": None,
    }
    with pytest.raises(ValueError, match="--option takes name=value, as block_size=64; got 'block_size'"):
        parse_options(["block_size"])
    with pytest.raises(ValueError, match="given twice"):
        parse_options(["a=1", "a=2"])


def test_text_without_data(monkeypatch, tmp_path):
    monkeypatch.delenv("LLN_DATA", raising=False)
    sources = []

    def stop(task, config, out, quiet):
        sources.append(config.source)
        raise KeyboardInterrupt

    monkeypatch.setattr("lln.tasks.mlm.open_run", stop)
    for data_dir in (None, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            train(MlmConfig.preset("laptop"), data_dir=data_dir)
    assert sources == ["stdlib", "wikitext-2+wikipedia"]
