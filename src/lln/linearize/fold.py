"""Projections and scales of LLN attention folded into the model's own query and key layers.

Where a layer's queries and keys are the outputs of two linear layers and nothing else uses them, the map
a = alpha (x W + c - m_q) W_q is a linear layer as well. A rotation between the two, softmax attention among neighbours,
several query heads for a key head, or more features than the head has stand in the way: then the maps stay where they
are.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.features import HeadFeatures
from lln.linearize.teacher import converted_modules
from lln.mechanism import JoinedBranches
from lln.nn import LLNAttention

# The names that models have for their query and key layers.
PAIRS = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k"))
ROTARY = "position_embeddings"


def fold_projections(model: PreTrainedModel) -> bool:
    """Fold the projections of all layers, or of none if something stands between in one; returns whether it did."""
    modules = list(converted_modules(model).values())
    layers = [_foldable(module) for module in modules]
    if not all(layers):
        return False
    for module, pair in zip(modules, layers, strict=True):
        assert pair is not None
        _fold(module.mechanism.features, pair)
    model.config.lln_attention["options"]["projection"] = False
    return True


def _foldable(module: Any) -> tuple[nn.Linear, nn.Linear] | None:
    """The query and key layers of an attention whose maps can be folded into them."""
    mechanism = module.mechanism
    if not isinstance(mechanism, LLNAttention) or isinstance(mechanism, JoinedBranches) or mechanism.features is None:
        return None
    features = mechanism.features
    arguments = inspect.signature(module.forward).parameters
    if not features.projection or features.num_key_heads != features.num_heads or ROTARY in arguments:
        return None
    if features.feature_dim != features.head_dim:
        return None
    if abs(getattr(module, "scaling", features.head_dim**-0.5) - features.head_dim**-0.5) > 1e-9:
        return None  # queries are multiplied on their way
    for names in PAIRS:
        pair: Any = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(x, nn.Linear) and x.bias is not None for x in pair):
            return pair if all(x.out_features == features.num_heads * features.head_dim for x in pair) else None
    return None


@torch.no_grad()
def _fold(features: HeadFeatures, layers: tuple[nn.Linear, nn.Linear]) -> None:
    for layer, side, log_scale in zip(layers, "qk", (features.log_alpha, features.log_beta), strict=True):
        matrix = getattr(features, f"project_{side}") * log_scale.exp()[:, None, None]
        center = torch.zeros_like(matrix[:, 0])
        if features.form == "decomposed":
            center = getattr(features, f"center_{side}").clone()
            getattr(features, f"center_{side}").zero_()
            if side == "k":
                # w = u . k with k = b M^-1 + m for the new keys b = (k - m) M; u . m is the same for all keys.
                features.column.copy_(torch.linalg.solve(matrix, features.column[..., None])[..., 0])
        _map_outputs(layer, matrix, center)
        log_scale.zero_()
        delattr(features, f"project_{side}")
    features.projection = False


def _map_outputs(layer: nn.Linear, matrix: Tensor, center: Tensor) -> None:
    """Make the outputs x of each head (x - center) @ matrix."""
    heads, dim, _ = matrix.shape
    weight, bias = (torch.unflatten(x, 0, (heads, dim)) for x in (layer.weight, layer.bias))
    layer.weight.copy_((matrix.mT @ weight).flatten(0, 1))
    layer.bias.copy_(((bias - center)[:, None] @ matrix)[:, 0].flatten())
