"""A fine-tuned model that begins with what made the one linear that it comes from: `lln linearize --like`."""

import copy

import pytest
import torch

import lln.hf
from lln.linearize import linearize
from lln.linearize.command import run as run_command
from lln.linearize.data import TextSource
from lln.linearize.transfer import read_versions


def run(model, tokenizer, texts, config, **options):
    return linearize(model, tokenizer, texts, config=config, **{"quiet": True} | options)


def changed(model):
    """A model whose weights are a little different, as after fine-tuning."""
    tuned = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    return tuned


def untrained(quick, **changes):
    return quick(align_steps=2, join_steps=1, distil_steps=0, **changes)


@pytest.mark.parametrize("attention", ["lln", "lln_diag", "hedgehog"])
def test_a_model_that_was_not_changed_becomes_the_linear_one(make, tokenizer, texts, quick, attention):
    model, ids = make("bert"), torch.arange(1, 41)[None]
    linear = run(model, tokenizer, texts, quick(attention=attention)).model
    found = run(model, tokenizer, texts, untrained(quick, attention=attention), like=(linear, model))
    with torch.no_grad():
        wanted = linear(ids).last_hidden_state
        torch.testing.assert_close(found.model(ids).last_hidden_state, wanted, atol=1e-5, rtol=1e-5)
    assert list(found.report["kept"]) == ["transfer"]


def test_both_changes_are_added_to_the_weights(make, tokenizer, texts, quick):
    base = make("bert")
    tuned, linear = changed(base), run(base, tokenizer, texts, quick()).model
    found = run(tuned, tokenizer, texts, untrained(quick), like=(linear, base)).model.state_dict()
    begin, end = base.state_dict(), linear.state_dict()
    for name, x in tuned.state_dict().items():
        torch.testing.assert_close(found[name], x + end[name] - begin[name])
    mechanisms = [name for name in found if name not in begin]
    assert mechanisms
    assert all(torch.equal(found[name], end[name]) for name in mechanisms)


def test_it_keeps_more_than_calibration(make, tokenizer, texts, quick):
    base = make("bert")
    tuned = changed(base)
    linear = run(base, tokenizer, texts, quick(attention="lln", align_steps=30, distil_steps=60)).model
    start = run(tuned, tokenizer, texts, untrained(quick, attention="lln"), like=(linear, base)).report["kept"]
    alone = run(tuned, tokenizer, texts, quick(attention="lln", steps=0)).report["kept"]
    assert 1 - start["transfer"][-1]["cosine"] < 0.7 * (1 - alone["calibrate"][-1]["cosine"])


def test_only_distillation_follows_and_a_stopped_run_ends_with_the_same_bits(
    make, tokenizer, texts, quick, tmp_path, monkeypatch
):
    base = make("bert")
    tuned, linear = changed(base), run(base, tokenizer, texts, quick()).model
    options = {"config": quick(save_seconds=0.0), "like": (linear, base)}
    whole = run(tuned, tokenizer, texts, **options, out=tmp_path / "whole")
    assert list(whole.report["kept"]) == ["transfer", "distil"]
    assert whole.report["settings"]["align_steps"] == whole.report["settings"]["join_steps"] == 0
    original, calls = TextSource.batch, []

    def stopping(self, stage, step):
        calls.append(stage)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, stage, step)

    monkeypatch.setattr(TextSource, "batch", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(tuned, tokenizer, texts, **options, out=tmp_path / "stopped")
    monkeypatch.undo()
    other = run(base, tokenizer, texts, quick(seed=1)).model
    with pytest.raises(ValueError, match="linear_digest"):
        run(tuned, tokenizer, texts, options["config"], like=(other, base), out=tmp_path / "stopped")
    again = run(tuned, tokenizer, texts, **options, out=tmp_path / "stopped").model.state_dict()
    assert all(torch.equal(x, again[name]) for name, x in whole.model.state_dict().items())
    assert set(calls) == {"distil"}


def test_what_does_not_fit_is_refused(make, tokenizer, texts, quick, tmp_path):
    base = make("bert")
    linear = run(base, tokenizer, texts, quick(steps=0)).model
    other = make("bert", hidden_size=48)
    folded = lln.hf.convert(copy.deepcopy(base), "lln", statistics="learned")
    for model, versions, changes, message in (
        (base, (base, base), {}, "like must be a linear model"),
        (base, (linear, base), {"attention": "lln"}, "has lln_diag with the options .*; choose the same, not lln"),
        (base, (linear, base), {"options": {"block_size": 8}}, "choose the same, not lln_diag"),
        (other, (linear, base), {}, "is no fine-tuned version of the BertModel"),
        (base, (folded, base), {"attention": "lln"}, "are part of its weights"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, tokenizer, texts, quick(**changes), like=versions, out=tmp_path / "linear")
    assert not (tmp_path / "linear").exists()


def test_the_command(make, tokenizer, texts, quick, tmp_path):
    base, text = make("bert"), tmp_path / "text"
    for name, model in (("base", base), ("tuned", changed(base))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    text.mkdir()
    for number, document in enumerate(texts):
        (text / f"{number}.txt").write_text(document)
    run_command(str(tmp_path / "base"), tmp_path / "linear", untrained(quick), text=text, quiet=True)
    like = {"text": text, "like": tmp_path / "linear", "quiet": True}
    report = run_command(str(tmp_path / "tuned"), tmp_path / "other", untrained(quick), **like).report
    assert report["origin"]["like"] == str(tmp_path / "linear")
    assert (tmp_path / "other" / "report.html").exists()
    with pytest.raises(ValueError, match=r"must name a folder that `lln linearize` wrote"):
        read_versions(tmp_path / "base")
