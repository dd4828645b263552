"""What made one model linear, given to a fine-tuned version of it.

Fine-tuning changes the weights of a model a little, and so does linearising. The sum of both changes, with the
mechanisms of the linear model, is where a linear version of the fine-tuned model begins: distillation on the examples
of its task then has little left to do.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lln.hf import from_pretrained
from lln.provenance import read_json

Versions = tuple[PreTrainedModel, PreTrainedModel]  # a linear model, and the one that it was made from


def read_versions(folder: Path) -> Versions:
    """The linear model that `lln linearize` wrote to a folder, and the model that it was made from."""
    from lln.linearize.command import load_model

    report = folder / "report.json"
    if not report.is_file():
        raise ValueError(f"--like must name a folder that `lln linearize` wrote, and {folder} has no {report.name}")
    base = load_model(read_json(report, "make the folder anew")["origin"]["model"])
    return from_pretrained(folder, type(base)), base


def check_versions(model: PreTrainedModel, versions: Versions, attention: str, options: Mapping[str, Any]) -> None:
    """Refuse models that are not versions of one, and a mechanism that is not that of the linear model."""
    linear, base = versions
    made = getattr(linear.config, "lln_attention", None)
    if made is None:
        raise ValueError("like must be a linear model, and the model that it was made from")
    if options.get("projection") and not made["options"].get("projection"):
        raise ValueError(
            "the projections of the model to be like are part of its weights, from which they cannot be told apart; "
            "make it with more features than its heads have, --option feature_dim=N"
        )
    if (made["attention"], made["options"]) != (attention, options):
        raise ValueError(
            f"the model to be like has {made['attention']} with the options {made['options']}; choose the same, not "
            f"{attention} with {dict(options)}"
        )
    wanted, found = ({name: y.shape for name, y in x.base_model.state_dict().items()} for x in (base, model))
    common = wanted.keys() & found.keys()  # one of the two may lack a pooling layer
    if len(common) < len(found) / 2 or any(wanted[name] != found[name] for name in common):
        raise ValueError(
            f"this {type(model).__name__} is no fine-tuned version of the {type(base).__name__} that the model to be "
            "like was made from: their weights have other names or shapes"
        )


@torch.no_grad()
def transfer(student: PreTrainedModel, versions: Versions) -> None:
    """Add to a student, converted from a fine-tuned model, what linearising has changed in another version of it."""
    linear, base = (x.base_model.state_dict() for x in versions)
    for name, tensor in student.base_model.state_dict().items():
        if name in base and name in linear:
            if tensor.is_floating_point():
                tensor.add_(linear[name] - base[name])
        elif name in linear:  # of a mechanism
            tensor.copy_(linear[name])
