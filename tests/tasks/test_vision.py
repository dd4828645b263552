"""Images: a small ViT, and examples that depend on seed, epoch and index alone."""

import numpy as np
import pytest
import torch

from lln.tasks.data.images import generated_images
from lln.tasks.vision import Pictures, VisionConfig, build_model, train

SMALL = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "feedforward": 16,
    "image_size": 16,
    "patch_size": 4,
    "batch_size": 8,
    "generated_examples": 64,
    "steps": 6,
    "eval_every": 0,
}


@pytest.mark.parametrize("attention", ["softmax", "lln_diag", "linformer"])
def test_runs_without_data(tmp_path, monkeypatch, attention):
    monkeypatch.delenv("LLN_DATA", raising=False)
    summary = train(VisionConfig.preset("laptop", attention=attention, **SMALL), out=tmp_path / "run", quiet=True)
    assert summary["tokens"] == 6 * 8 * 17  # sixteen patches and the class token
    assert 0 <= summary["eval_accuracy"] <= 1
    assert summary["eval_accuracy"] * 8 == pytest.approx(round(summary["eval_accuracy"] * 8))


def test_fixed_alpha_and_beta_reach_the_mechanism():
    config = VisionConfig.preset("laptop", attention="lln", options={"alpha": 2.0, "beta": 3.0}, **SMALL)
    model = build_model(config)
    mechanisms = [module for module in model.modules() if hasattr(module, "alpha")]
    assert [(m.alpha, m.beta) for m in mechanisms] == [(2.0, 3.0)]
    with pytest.raises((TypeError, ValueError), match="gamma"):
        build_model(VisionConfig.preset("laptop", attention="lln", options={"gamma": 1}, **SMALL))


def all_of(pictures, epoch):
    return torch.stack([pictures.example(index, epoch)["pixel_values"] for index in range(len(pictures))])


def test_augmentation_is_a_function_of_seed_epoch_and_index():
    data = generated_images(size=16, count=8, seed=0)
    looks = {(seed, epoch): all_of(Pictures(data, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert torch.equal(looks[0, 1], all_of(Pictures(data, seed=0), 1))
    assert not torch.equal(looks[0, 0], looks[0, 1])
    assert not torch.equal(looks[0, 0], looks[1, 0])
    plain = Pictures(data)
    assert torch.equal(plain.example(2, 0)["pixel_values"], plain.example(2, 5)["pixel_values"])
    pixels = plain.example(2, 0)["pixel_values"]
    assert pixels.shape == (3, 16, 16)
    np.testing.assert_allclose((pixels + 1) * 127.5, data.images[2].transpose(2, 0, 1), atol=1e-4)


def test_refused():
    with pytest.raises(ValueError, match="patches of 5 pixels do not fill an image of 16"):
        VisionConfig.preset("laptop", **SMALL | {"patch_size": 5})
    with pytest.raises(ValueError, match="source must be one of auto, dogs-vs-cats, generated"):
        VisionConfig.preset("laptop", source="cifar")
