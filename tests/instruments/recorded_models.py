"""Small models for the tests of the recorder, and one recorded step of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from lln.instruments import Recorder
from lln.multihead import MultiheadAttention

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES = ("roberta", "bert", "gpt2", "llama", "vit")


def hugging_face(family: str, implementation: str = "sdpa") -> nn.Module:
    settings: dict[str, Any] = dict(SIZES) | {"vocab_size": 90, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "scaled gpt2":
        family, settings["scale_attn_by_inverse_layer_idx"] = "gpt2", True
    if family == "llama":
        settings["num_key_value_heads"] = 2
    if family == "vit":
        settings = dict(SIZES) | {"image_size": 16, "patch_size": 4}
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
    with torch.no_grad():  # random weights attend almost uniformly; make something happen
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(8.0)
    return model


def inputs_of(family: str) -> dict[str, Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    keep = torch.ones(2, 12, dtype=torch.long)
    keep[0, :3] = 0  # on the left, as for generation
    return {"input_ids": torch.randint(3, 90, (2, 12)), "attention_mask": keep}


def record(model: nn.Module, run: Callable[[], Any], path: Path, **settings: Any) -> list[dict[str, Any]]:
    with Recorder(model, path, heads=None, max_overhead=None, **settings) as recorder:
        with torch.no_grad():
            run()
        return recorder.step()


def entropy_of(matrix: Tensor) -> float:
    return float(scipy.stats.entropy(matrix.numpy(), base=2, axis=-1).mean())


def torch_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def replace_attention(encoder: nn.TransformerEncoder) -> nn.TransformerEncoder:
    for layer in encoder.layers:
        layer.self_attn = MultiheadAttention(16, 4, dropout=0.1, batch_first=True, statistics="running")
    return encoder


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch": torch_encoder,
    "ours": lambda: replace_attention(torch_encoder()),
    **{family: lambda family=family: hugging_face(family) for family in FAMILIES},
}
