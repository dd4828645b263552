"""The model that is imitated: softmax attention whose queries, keys, values and outputs can be observed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from lln.hf.convert import attention_modules, convert
from lln.zoo.core import Softmax


class Observation(NamedTuple):
    """What an attention saw, query (B, H, N, D), key (B, H_k, N, D) and value (B, H_k, N, V), and its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    keep: Tensor | None  # (B, N) bool
    is_causal: bool
    output: Tensor  # (B, H, N, V)

    def first(self, samples: int) -> "Observation":
        """That of the first samples."""
        keep = None if self.keep is None else self.keep[:samples]
        query, key, value, output = (x[:samples] for x in (self.query, self.key, self.value, self.output))
        return Observation(query, key, value, keep, self.is_causal, output)


class ObservedSoftmax(Softmax):
    """Softmax attention that hands its inputs and output to whoever observes it."""

    takes_grouped_heads = True

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.observed: list[Observation] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **tokens: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        repeated = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
        output: Tensor = super().forward(query, *repeated, **tokens)
        if self.observed is not None:
            keep, causal = tokens.get("key_padding_mask"), tokens.get("is_causal", False)
            self.observed.append(Observation(query, key, value, keep, causal, output))
        return output


def make_teacher(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of a model, with softmax attention that can be observed."""
    teacher = convert(copy.deepcopy(model), "block_diagonal")  # which any model can be converted to
    for module in converted_modules(teacher).values():
        old = module.mechanism
        module.mechanism = ObservedSoftmax(num_heads=old.num_heads, head_dim=old.head_dim)
    teacher.train(False).requires_grad_(False)
    return teacher


def converted_modules(model: PreTrainedModel) -> dict[str, Any]:
    """The attention modules that have a mechanism, by name; cross attention has none."""
    return {name: module for name, module in attention_modules(model).items() if hasattr(module, "mechanism")}


def is_classifier(model: PreTrainedModel) -> bool:
    """Whether a model predicts a class or a score of a whole input."""
    return type(model).__name__.endswith(("ForSequenceClassification", "ForImageClassification"))


@contextmanager
def observing(teacher: PreTrainedModel) -> Iterator[dict[str, list[Observation]]]:
    """While it lasts, what the attentions of a teacher see is appended to the lists of this dict."""
    modules = converted_modules(teacher)
    found: dict[str, list[Observation]] = {name: [] for name in modules}
    try:
        for name, module in modules.items():
            module.mechanism.observed = found[name]
        yield found
    finally:
        for module in modules.values():
            module.mechanism.observed = None
