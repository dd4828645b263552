import json
from itertools import pairwise

import pytest
import torch
from scipy.stats import spearmanr

import lln.hf
from lln.linearize import LinearizeConfig, linearize
from lln.linearize.config import LEAST_FEATURES
from lln.linearize.data import TextSource, lengths_up_to, special_tokens
from lln.linearize.evaluate import Kept, ablated
from lln.linearize.linear import linearized_result
from lln.linearize.losses import attend
from lln.linearize.sources import split_documents
from lln.linearize.teacher import converted_modules, make_teacher, observing
from lln.paper import linearized
from lln.results import add_result, read_results

OPTIONS = {"quiet": True}


def run(model, tokenizer, texts, config, **options):
    return linearize(model, tokenizer, texts, config=config, **OPTIONS | options)


@pytest.mark.parametrize("attention", ["lln", "lln_diag", "hedgehog", "elu"])
def test_an_encoder_keeps_what_it_does(make, tokenizer, texts, quick, attention):
    model = make("bert")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    config = quick(attention=attention, distil_steps=30, distil_rate=3e-4)
    result = run(model, tokenizer, texts, config)
    kept = {stage: rows[-1]["cosine"] for stage, rows in result.report["kept"].items()}
    assert kept["distil"] > 0.97
    if attention in ("hedgehog", "elu"):  # not calibrated
        assert kept["distil"] > kept["calibrate"]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())  # is left as it was
    assert {type(x.mechanism).description.name for x in converted_modules(result.model).values()} == {attention}


@pytest.mark.parametrize(("attention", "causal"), [("lln", True), ("hedgehog", False)])
def test_alignment_brings_the_weights_of_the_far_branch_to_those_of_softmax(
    make, tokenizer, texts, quick, attention, causal
):
    """By the explicit matrices of both, on held-out text."""
    model = make("llama", "ModelForCausalLM", num_key_value_heads=1) if causal else make("bert")
    teacher = make_teacher(model)
    _, held_out = split_documents(texts)
    ids = torch.tensor([tokenizer(held_out[0])["input_ids"][:40]])
    with torch.no_grad(), observing(teacher) as found:
        teacher(ids)

    def divergence(student):
        total = 0.0
        for (name, module), [seen] in zip(converted_modules(student).items(), found.values(), strict=True):
            identity = torch.eye(40).expand(1, seen.key.shape[1], 40, 40)
            with torch.no_grad():
                P = attend(module.mechanism, seen._replace(value=identity)).clamp(min=1e-30)
                S = attend(converted_modules(teacher)[name].mechanism, seen._replace(value=identity))
            total += float((torch.special.xlogy(S, S) - S * P.log()).sum(dim=-1).mean())
        return total

    first = run(model, tokenizer, texts, quick(attention=attention, steps=0)).model
    last = run(
        model, tokenizer, texts, quick(attention=attention, align_steps=80, align_rate=2e-2, distil_steps=0)
    ).model
    assert divergence(last) < 0.9 * divergence(first)


def test_a_decoder_learns_to_predict_as_before(make, tokenizer, texts, quick):
    model = make("llama", "ModelForCausalLM", num_key_value_heads=1)
    config = quick(options={"block_size": 8}, align_steps=40, join_steps=10, distil_steps=40, distil_rate=1e-3)
    report = run(model, tokenizer, texts, config).report
    losses = [rows[-1]["loss"] for rows in report["kept"].values()]
    best = report["kept"]["distil"][-1]["softmax_loss"]
    assert losses[-1] - best < 0.5 * (losses[0] - best)
    assert [row["branches"] for row in report["ablation"]] == ["both", "far", "near", "none"]


def test_bfloat16_changes_training_and_nothing_before_it(make, tokenizer, texts, quick):
    kept = [
        run(make("bert"), tokenizer, texts, quick(distil_steps=5, precision=precision)).report["kept"]
        for precision in ("fp32", "bf16")
    ]
    assert kept[0]["calibrate"] == kept[1]["calibrate"]
    assert kept[0]["distil"] != kept[1]["distil"]
    assert kept[1]["distil"][-1]["cosine"] == pytest.approx(kept[0]["distil"][-1]["cosine"], abs=0.01)
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16"):
        quick(precision="fp64")


def test_before_distillation_short_texts_keep_softmax_attention_to_the_last_digits(make, tokenizer, texts, quick):
    """Where nothing is far, a gate leaves softmax attention alone, so nothing else may differ from the teacher."""
    model = make("bert")
    config = quick(options={"block_size": 16}, align_steps=6, join_steps=3, distil_steps=0)
    student = run(model, tokenizer, texts, config).model
    short, long = (torch.randint(5, 80, (2, tokens)) for tokens in (8, 40))
    with torch.no_grad():
        torch.testing.assert_close(student(short)[0], model(short)[0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(student(long)[0], model(long)[0], rtol=1e-2, atol=1e-2)


def test_lora_leaves_the_weights_beside_linear_layers_as_they_were(make, tokenizer, texts, quick, tmp_path):
    """Embeddings and norms are not trained; linear layers are merged, so that the result is an ordinary model."""
    pytest.importorskip("peft")
    model = make("bert")
    result = run(model, tokenizer, texts, quick(lora_rank=2), out=tmp_path / "linear")
    before, after = model.state_dict(), result.model.state_dict()
    assert not any("lora" in name for name in after)
    still = [name for name in before if "embeddings" in name or "LayerNorm" in name]
    assert len(still) > 5
    assert all(torch.equal(before[name], after[name]) for name in still)
    assert not torch.equal(before["encoder.layer.0.output.dense.weight"], after["encoder.layer.0.output.dense.weight"])
    again = lln.hf.from_pretrained(tmp_path / "linear")
    tokens = torch.randint(5, 80, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens)[0], result.model(tokens)[0])


def test_a_report_as_a_result(make, tokenizer, texts, quick, tmp_path):
    report = run(make("bert"), tokenizer, texts, quick(steps=0)).report
    report["command"] = f"lln linearize {tmp_path}/model --steps 0"
    add_result(tmp_path / "linearized.jsonl", linearized_result(report, "bert-lln_diag"))
    result = read_results(tmp_path / "linearized.jsonl", made_by="lln linearize")["bert-lln_diag"]
    assert result.origin["command"] == "lln linearize model --steps 0"
    assert {"commit", "machine", "seed"} <= result.origin.keys()
    stages = [row["stage"] for row in result.rows]
    assert stages.count("calibrate") == len(report["kept"]["calibrate"])
    table = linearized.make(tmp_path)
    names = ["calibrated, not trained", "both branches", "the far branch alone", "the near branch alone", "neither"]
    assert [row[0] for row in table.rows] == [f"bert-lln_diag: {name}" for name in names]
    assert table.rows[0][2] == f"{report['kept']['calibrate'][-1]['cosine']:.4f}"


def test_images(make, quick):
    model = make("vit", image_size=20, patch_size=5)
    images = torch.randn(40, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    result = run(model, None, images, quick(attention="lln", batch_tokens=512, distil_steps=20))
    assert result.report["kept"]["distil"][-1]["cosine"] > 0.9


def test_steps_0_stops_after_calibration(make, tokenizer, texts, quick):
    result = run(make("bert"), tokenizer, texts, quick(attention="lln", steps=0))
    assert list(result.report["kept"]) == ["calibrate"]


def test_no_text_is_longer_than_the_positions_of_a_model(make, tokenizer, texts, quick):
    """RoBERTa counts them from 2 on."""
    report = run(make("roberta"), tokenizer, texts, quick(steps=0, length=512)).report
    assert max(row["length"] for row in report["kept"]["calibrate"]) == 62


def test_calibration_keeps_more_than_conversion_does(make, tokenizer, texts, quick):
    model, config = make("bert"), quick(attention="lln", steps=0)
    calibrated = run(model, tokenizer, texts, config).report["kept"]["calibrate"][-1]["cosine"]
    train, held_out = split_documents(texts)
    sizes = {"length": 48, "tokens": 3000, "batch_tokens": 192, "calibration_tokens": 480, "passages": 6, "seed": 0}
    kept = Kept(make_teacher(model), TextSource(train, held_out, tokenizer, **sizes), is_language_model=False)
    converted = kept.measure(lln.hf.convert(make("bert"), "lln"))[-1]["cosine"]
    assert calibrated > converted


def test_the_result_is_an_ordinary_converted_model(make, tokenizer, texts, quick, tmp_path):
    result = run(make("bert"), tokenizer, texts, quick(), out=tmp_path / "linear")
    opened = lln.hf.from_pretrained(tmp_path / "linear")
    inputs = tokenizer(texts[:2], return_tensors="pt", truncation=True, max_length=40)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        torch.testing.assert_close(opened(**inputs).last_hidden_state, result.model(**inputs).last_hidden_state)
    report = json.loads((tmp_path / "linear" / "report.json").read_text())
    assert report["kept"] == result.report["kept"]
    assert report["settings"]["seed"] == 0
    assert {"commit", "command", "machine"} <= report.keys()
    page = (tmp_path / "linear" / "report.html").read_text()
    assert "http" not in page
    assert "<script" not in page
    assert f"{report['kept']['distil'][-1]['cosine']:.4f}" in page
    assert not (tmp_path / "linear" / "work" / "checkpoints").exists()  # as large as the model
    again = run(make("bert"), tokenizer, texts, quick(), out=tmp_path / "linear")
    assert again.report["kept"] == result.report["kept"]  # finished: nothing is done again


def test_projections_are_folded_into_the_model(make, tokenizer, texts, quick):
    """Of LLN alone in BERT: the parameters of the mechanism are gone, and the outputs are those of the report."""
    result = run(make("bert"), tokenizer, texts, quick(attention="lln", options={"feature_dim": 16}))
    assert result.report["folded"]
    assert not any("project" in name for name, _ in result.model.named_parameters())
    train, held_out = split_documents(texts)
    sizes = {"length": 48, "tokens": 3000, "batch_tokens": 192, "calibration_tokens": 480, "passages": 6, "seed": 0}
    kept = Kept(make_teacher(make("bert")), TextSource(train, held_out, tokenizer, **sizes), is_language_model=False)
    found, wanted = kept.measure(result.model)[-1]["cosine"], result.report["kept"]["distil"][-1]["cosine"]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_rotated_or_shared_keys_are_not_folded(make, tokenizer, texts, quick):
    model = make("llama", "ModelForCausalLM", num_key_value_heads=1)
    config = quick(attention="lln", options={"feature_dim": 16})
    assert not run(model, tokenizer, texts, config).report["folded"]


def test_small_heads_get_more_features_which_are_not_folded(make, tokenizer, texts, quick):
    result = run(make("bert"), tokenizer, texts, quick(attention="lln", steps=0))
    assert not result.report["folded"]
    assert {x.mechanism.features.feature_dim for x in converted_modules(result.model).values()} == {LEAST_FEATURES}


def test_a_killed_run_continues_bit_for_bit(make, tokenizer, texts, quick, tmp_path, monkeypatch):
    """Stopped in each stage, by an error in the middle of a step, as if killed there."""
    config = quick(save_seconds=0.0)
    whole = run(make("bert"), tokenizer, texts, config, out=tmp_path / "whole").model
    from lln.linearize import stages

    real, calls = stages.schedule, 0

    def fails_at(number):
        def schedule(step, steps):
            nonlocal calls
            calls += 1
            if calls == number:
                raise RuntimeError("killed")
            return real(step, steps)

        return schedule

    for stop in (3, 5, 4, 100):  # calls since the last start: in align, again in align or join, in distil, to the end
        calls = 0
        monkeypatch.setattr(stages, "schedule", fails_at(stop))
        try:
            parts = run(make("bert"), tokenizer, texts, config, out=tmp_path / "parts").model
        except RuntimeError:
            continue
    for name, x in whole.state_dict().items():
        assert torch.equal(x, parts.state_dict()[name]), name


def test_other_settings_or_other_text_are_refused_in_the_same_folder(make, tokenizer, texts, quick, tmp_path):
    run(make("bert"), tokenizer, texts, quick(steps=0), out=tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        run(make("bert"), tokenizer, texts, quick(steps=0, seed=1), out=tmp_path)
    with pytest.raises(ValueError, match="other data"):
        run(make("bert"), tokenizer, texts[::-1], quick(steps=0), out=tmp_path)


def test_bad_input_is_refused_and_leaves_nothing(make, tokenizer, texts, quick, tmp_path):
    out = tmp_path / "linear"
    linear = lln.hf.convert(make("bert"), "lln")
    with pytest.raises(ValueError, match="linear already"):
        run(linear, tokenizer, texts, quick(), out=out)
    with pytest.raises(ValueError, match="no text"):
        run(make("bert"), tokenizer, ["", "  "], quick(), out=out)
    with pytest.raises(ValueError, match="fewer than one passage"):
        run(make("bert"), tokenizer, ["w1 w2", "w3 w4"], quick(), out=out)
    with pytest.raises(ValueError, match="do not belong"):
        run(make("bert", vocab_size=20), tokenizer, texts, quick(), out=out)
    with pytest.raises(TypeError, match="list of documents"):
        run(make("bert"), tokenizer, texts[0], quick(), out=out)
    with pytest.raises(ValueError, match="encoder and a decoder"):
        run(make("t5"), tokenizer, texts, quick(), out=out)
    assert not out.exists()
    run(make("bert"), tokenizer, texts, quick(steps=0), out=out)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="steps must be 0"):
        LinearizeConfig(steps=5)
    with pytest.raises(ValueError, match="align_rate"):
        LinearizeConfig(align_rate=0.0)
    with pytest.raises(ValueError, match="nonsense"):
        LinearizeConfig(attention="nonsense")
    with pytest.raises(ValueError, match="blok"):
        LinearizeConfig(options={"blok": 3})
    with pytest.raises(ValueError, match="preset"):
        LinearizeConfig.preset("huge")


def test_held_out_text_is_never_trained_on(tokenizer, texts):
    train, held_out = split_documents([*texts, texts[0]])
    assert held_out
    assert not set(train) & set(held_out)
    sizes = {"length": 48, "tokens": 3000, "batch_tokens": 192, "calibration_tokens": 480, "passages": 6, "seed": 0}
    source = TextSource(train, held_out, tokenizer, **sizes)
    seen = {tuple(row[1:-1].tolist()) for step in range(20) for row in source.batch("distil", step)["input_ids"]}
    for length in source.lengths:
        for batch in source.held_out(length):
            assert batch["input_ids"].shape[1] == length
            assert not seen & {tuple(row[1:-1].tolist()) for row in batch["input_ids"]}
    again = TextSource(train, held_out, tokenizer, **sizes).batch("align", 7)
    assert torch.equal(again["input_ids"], source.batch("align", 7)["input_ids"])


def test_lengths_and_special_tokens(tokenizer):
    assert lengths_up_to(512) == (32, 64, 128, 256, 512)
    assert lengths_up_to(48) == (48,)
    assert special_tokens(tokenizer) == ([1], [2])


def test_a_teacher_gives_what_the_model_gives(make, tokenizer, texts):
    for family, head in (("bert", "Model"), ("llama", "ModelForCausalLM"), ("gpt2", "ModelForCausalLM")):
        model = make(family, head, **({"num_key_value_heads": 1} if family == "llama" else {}))
        ids = torch.tensor([tokenizer(texts[0])["input_ids"][:30]])
        teacher = make_teacher(model)
        with torch.no_grad(), observing(teacher) as found:
            torch.testing.assert_close(teacher(ids)[0], model(ids)[0], rtol=1e-4, atol=1e-4)
        assert len(found) == 2
        assert all(len(seen) == 1 and not seen[0].query.requires_grad for seen in found.values())


def test_ablation_leaves_the_model_as_it_was(make):
    model = lln.hf.convert(make("bert"), "lln_diag", combine="ratio", share=0.3)
    ids = torch.arange(5, 45)[None]
    outputs = {}
    with torch.no_grad():
        before = model(ids).last_hidden_state
        for branches in ("far", "near", "none"):
            with ablated(model, branches):
                outputs[branches] = model(ids).last_hidden_state
        assert torch.equal(model(ids).last_hidden_state, before)
        torch.testing.assert_close(outputs["far"], lln.hf.convert(make("bert"), "lln")(ids).last_hidden_state)
        blocks = lln.hf.convert(make("bert"), "block_diagonal")(ids).last_hidden_state
        torch.testing.assert_close(outputs["near"], blocks)


def test_a_linear_decoder_generates_with_a_state(make, tokenizer, texts, quick, tmp_path):
    model = make("llama", "ModelForCausalLM", num_key_value_heads=1)
    config = quick(options={"block_size": 6}, distil_steps=2)
    run(model, tokenizer, texts, config, out=tmp_path)
    linear = lln.hf.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer(texts[0])["input_ids"][:20]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with_state = linear.generate(ids, **options)
    assert torch.equal(with_state, linear.generate(ids, **options, use_cache=False))


def test_labelled_pairs_are_reported_for_both_models(make, tokenizer, texts, quick, tmp_path):
    pairs = [(a[:40], b[:60], float(i % 5)) for i, (a, b) in enumerate(pairwise(texts))]
    result = run(make("bert"), tokenizer, texts, quick(steps=0), pairs=pairs, out=tmp_path / "out")
    found = result.report["pairs"]
    assert found["pairs"] == len(pairs)

    def correlation(model):
        cosines = []
        for a, b, _ in pairs:
            means = [model(**tokenizer(x, return_tensors="pt")).last_hidden_state.mean(dim=1) for x in (a, b)]
            cosines.append(float(torch.cosine_similarity(*means)))
        return spearmanr(cosines, [score for *_, score in pairs]).statistic

    with torch.no_grad():
        assert found["softmax"] == pytest.approx(correlation(make("bert")), abs=1e-4)
        assert found["linear"] == pytest.approx(correlation(result.model), abs=1e-4)
    assert "Labelled pairs" in (tmp_path / "out" / "report.md").read_text()
    assert 'href="heads.html"' in (tmp_path / "out" / "report.html").read_text()
    page = (tmp_path / "out" / "heads.html").read_text()
    assert "<figcaption>softmax</figcaption>" in page
    assert "<figcaption>linear</figcaption>" in page
    with pytest.raises(ValueError, match="three pairs"):
        run(make("bert"), tokenizer, texts, quick(steps=0), pairs=pairs[:2])
