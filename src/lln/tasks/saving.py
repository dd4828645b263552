"""Models and optimisers as bytes, so that the writer gets every error of the disk."""

import io
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging


def save_model(model: nn.Module, folder: Path, processing: Any) -> None:
    if isinstance(model, PreTrainedModel):
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    else:
        (folder / "model.safetensors").write_bytes(weights(model))
    if processing is not None:
        processing.save_pretrained(folder)


def weights(model: nn.Module) -> bytes:
    """The state of a model in safetensors' format, parameters that are tied once."""
    kept: dict[int, str] = {}
    state = model.state_dict()
    tensors = {}
    for name in sorted(state):
        tensor = state[name]
        if tensor.numel() and kept.setdefault(tensor.data_ptr(), name) != name:
            continue
        tensors[name] = tensor.contiguous()
    return safetensors.torch.save(tensors, metadata={"format": "pt"})


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
