"""Input that cannot be linearised, folders that hold something else, and what must not depend on chance."""

import copy
from itertools import pairwise

import pytest
import torch
from safetensors import SafetensorError

from lln.linearize import linear, linearize
from lln.linearize.command import load_tokenizer, read_text
from lln.linearize.sources import make_source, split_documents, split_images

FEW = {"align_steps": 1, "join_steps": 1, "distil_steps": 1}


def run(model, tokenizer, texts, config, **options):
    return linearize(model, tokenizer, texts, config=config, **{"quiet": True} | options)


def equal(one, other):
    state = other.state_dict()
    return all(torch.equal(x, state[name]) for name, x in one.state_dict().items())


def test_dropout_of_the_model_changes_nothing(make, tokenizer, texts, quick):
    """A student that is fitted and distilled with dropout learns to make up for it."""
    kept = [
        run(make("bert", hidden_dropout_prob=share), tokenizer, texts, quick()).report["kept"] for share in (0.0, 0.3)
    ]
    assert kept[0] == kept[1]


def test_running_averages_are_measured_while_a_mechanism_learns(make, tokenizer, texts, quick):
    options = {"statistics": "running", "projection": False, "signed": False, "form": "paper"}
    model = run(make("bert"), tokenizer, texts, quick(attention="lln", options=options, **FEW)).model
    calls = [x for name, x in model.named_buffers() if "mechanism" in name]
    assert calls
    assert any(bool((x != 0).any()) for x in calls)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("changes", [{"attention": "performer"}, {"lora_rank": 2}])
def test_the_seed_decides_over_all_that_is_drawn(make, tokenizer, texts, quick, changes):
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    made = []
    for other in (1, 2):
        model = make("bert")
        torch.manual_seed(other)
        made.append(run(model, tokenizer, texts, quick(**FEW | changes)).model)
    assert equal(*made)


def test_a_run_that_diverges_does_not_block_one_with_a_lower_rate(make, tokenizer, texts, quick, tmp_path):
    with pytest.raises(ValueError, match="lower --align-rate"):
        run(make("bert"), tokenizer, texts, quick(align_rate=1e30), out=tmp_path / "linear")
    run(make("bert"), tokenizer, texts, quick(**FEW), out=tmp_path / "linear")


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_parameters_that_were_frozen_stay_so_and_others_do_not_become(make, tokenizer, texts, quick, lora_rank):
    if lora_rank:
        pytest.importorskip("peft")
    model = make("bert")
    model.embeddings.requires_grad_(False)
    for config in (quick(**FEW, lora_rank=lora_rank), quick(steps=0, lora_rank=lora_rank)):
        made = run(model, tokenizer, texts, config).model
        assert {x.requires_grad for x in made.embeddings.parameters()} == {False}
        assert {x.requires_grad for x in made.encoder.parameters()} == {True}


def test_a_folder_with_other_files_is_refused(make, tokenizer, texts, quick, tmp_path):
    """Above all the folder of the model itself, which would be overwritten."""
    make("bert").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds other files"):
        run(make("bert"), tokenizer, texts, quick(steps=0), out=tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "work").exists()


def test_another_model_or_other_pairs_are_refused_in_the_same_folder(make, tokenizer, texts, quick, tmp_path):
    run(make("bert"), tokenizer, texts, quick(steps=0), out=tmp_path)
    other = make("bert")
    with torch.no_grad():
        other.embeddings.word_embeddings.weight.mul_(0.9)
    with pytest.raises(ValueError, match=r"other data: model_digest"):
        run(other, tokenizer, texts, quick(steps=0), out=tmp_path)
    pairs = [(a, b, float(score)) for score, (a, b) in enumerate(pairwise(texts[:5]))]
    with pytest.raises(ValueError, match="pairs_digest"):
        run(make("bert"), tokenizer, texts, quick(steps=0), out=tmp_path, pairs=pairs)


def test_quiet_is_quiet(make, tokenizer, texts, quick, capfd):
    run(make("bert"), tokenizer, texts, quick(steps=0))
    assert capfd.readouterr() == ("", "")
    run(make("bert"), tokenizer, texts, quick(steps=0), quiet=False)
    found = capfd.readouterr()
    assert found.out == ""
    assert "After calibrate" in found.err


def test_positions_that_begin_after_that_of_padding(make, tokenizer, texts, quick):
    report = run(make("roberta", pad_token_id=1), tokenizer, texts, quick(length=64, steps=0)).report
    assert report["kept"]["calibrate"][-1]["length"] == 62


def test_pairs_are_cut_to_the_positions_and_checked_before_the_run(make, tokenizer, texts, quick, tmp_path):
    pairs = [(a, b, float(score)) for score, (a, b) in enumerate(pairwise(texts[:5]))]
    assert len(tokenizer(pairs[0][0])["input_ids"]) > 64
    found = run(make("bert"), tokenizer, texts, quick(steps=0), pairs=pairs).report["pairs"]
    assert abs(found["linear"]) <= 1
    without = copy.deepcopy(tokenizer)
    without.pad_token = None
    with pytest.raises(ValueError, match="no token for padding"):
        run(make("bert"), without, texts, quick(steps=0), pairs=pairs, out=tmp_path / "a")
    same = [(a, b, 1.0) for a, b, _ in pairs]
    with pytest.raises(ValueError, match="not all of them the same"):
        run(make("bert"), tokenizer, texts, quick(steps=0), pairs=same, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_models_and_mechanisms_that_cannot_be_linearised(make, tokenizer, texts, quick, tmp_path):
    with pytest.raises(ValueError, match=r"attends 2 times .* AlbertModel"):
        run(make("albert", embedding_size=16), tokenizer, texts, quick(), out=tmp_path / "a")
    with pytest.raises(ValueError, match="softmax is the attention that the model has"):
        run(make("bert"), tokenizer, texts, quick(attention="softmax"), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_text_that_the_tokenizer_does_not_know(make, tokenizer, quick):
    with pytest.raises(ValueError, match="100% of the training text are tokens that the tokenizer does not know"):
        run(make("bert"), tokenizer, ["other words " * 100] * 3, quick())


def test_a_folder_without_a_tokenizer(make, tmp_path):
    make("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: it holds none of tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_half_precision_models_are_linearised_in_float32(make, tokenizer, texts, quick):
    model = make("bert").to(torch.bfloat16)
    result = run(model, tokenizer, texts, quick(**FEW))
    assert result.model.dtype == torch.float32
    assert model.dtype == torch.bfloat16
    assert all(row["entropy_after"] > 0 for row in result.report["heads"])


def test_a_folder_of_short_texts(texts, tmp_path):
    """Some files have all their documents on one side, and one has none."""
    for number, text in enumerate(texts * 3):
        (tmp_path / f"{number}.txt").write_text(f"{text} {number}\n")
    (tmp_path / "empty.txt").write_text("\n")
    train, held_out = read_text(str(tmp_path), None)
    assert len(train) + len(held_out) == 120
    assert 0 < len(held_out) < 15
    for file in tmp_path.glob("?*.txt"):
        if file.read_text().strip() in held_out:
            assert read_text(str(file), None) == ([file.read_text().strip()], [])  # of one document, a part is held out
    with pytest.raises(ValueError, match="holds no text"):
        read_text(str(tmp_path / "empty.txt"), None)


def test_equal_documents_are_on_one_side(make, tokenizer, texts, quick):
    train, held_out = split_documents([texts[0]] * 3)
    assert [*train, *held_out] == [texts[0][: len(train[0])], texts[0][len(train[0]) :]]
    given = make_source(make("bert"), tokenizer, [*texts[:20], texts[30]], texts[30:], quick())
    without = make_source(make("bert"), tokenizer, texts[:20], texts[30:], quick())
    assert given.fingerprint() == without.fingerprint()


def test_equal_images_are_on_one_side():
    images = torch.randn(30, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    train, held_out = split_images(torch.cat((images, images)))
    assert len(train) + len(held_out) == 60
    assert len(held_out) == 4
    assert not {x.numpy().tobytes() for x in train} & {x.numpy().tobytes() for x in held_out}
    assert torch.equal(train, split_images(torch.cat((images, images)).flip(0))[0])  # whatever order they come in


def test_a_full_disk_at_the_end_leaves_a_run_that_can_be_finished(make, tokenizer, texts, quick, tmp_path, monkeypatch):
    def full(*args):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    whole = run(make("bert"), tokenizer, texts, quick(**FEW), out=tmp_path / "whole").model
    monkeypatch.setattr(linear, "save_model", full)
    with pytest.raises(OSError, match=r"could not be written .* No space left"):
        run(make("bert"), tokenizer, texts, quick(**FEW), out=tmp_path / "parts")
    monkeypatch.undo()
    assert equal(whole, run(make("bert"), tokenizer, texts, quick(**FEW), out=tmp_path / "parts").model)


def test_matrices_of_heads_are_measured_on_short_passages(make, tokenizer, texts, quick, monkeypatch):
    seen = []
    real = linear.head_table
    monkeypatch.setattr(linear, "LONGEST_MEASURED", 20)
    monkeypatch.setattr(linear, "head_table", lambda *args: seen.append(args[2]) or real(*args))
    run(make("bert"), tokenizer, texts, quick(steps=0))
    assert seen[0]["input_ids"].shape[1] == 20


def test_a_loss_beyond_the_largest_exponential(make, tokenizer, texts, quick, monkeypatch):
    from lln.linearize import evaluate

    monkeypatch.setattr(evaluate, "language_loss", lambda model, batches: 800.0)
    row = run(make("gpt2", "ModelForCausalLM"), tokenizer, texts, quick(steps=0)).report["kept"]["calibrate"][0]
    assert row["perplexity"] == float("inf")
    assert row["perplexity_ratio"] == 1.0


@pytest.mark.parametrize("attention", ["gla", "tnn"])
def test_mechanisms_without_an_attention_matrix(make, tokenizer, texts, quick, tmp_path, attention):
    """Weights with signs, and a mechanism with parameters for each feature of the values."""
    report = run(make("bert"), tokenizer, texts, quick(attention=attention, **FEW), out=tmp_path / "linear").report
    assert {"entropy_before", "bias_before"} <= report["heads"][0].keys()
    assert "entropy_after" not in report["heads"][0]
    for name in ("report.md", "report.html"):
        assert "has no attention matrix" in (tmp_path / "linear" / name).read_text()


def test_every_image_counts_in_the_fingerprint(make, quick):
    images = torch.randn(40, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    held_out = images[:4]
    model = make("vit", image_size=20, patch_size=5)
    before = make_source(model, None, images[4:], held_out, quick()).fingerprint()
    images[5] += 1
    assert make_source(model, None, images[4:], held_out, quick()).fingerprint() != before
