"""Opening a converted model that `save_pretrained` has written.

The folder is an ordinary one. Its config.json also holds which mechanism with which options the model has
(`lln_attention`), and names an attention implementation that only `lln.hf` registers (`attn_implementation`), so
that transformers by itself refuses the folder instead of computing softmax attention with its weights.
"""

import os
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from lln.hf.convert import convert

# Options that locate a model.
WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token")


def from_pretrained(folder: str | os.PathLike[str], model_class: Any = None, **options: Any) -> Any:
    """Open the converted model that was saved in a folder, with its attention and the options of that.

    Args:
        folder: where `save_pretrained` of a converted model has written.
        model_class: a class of transformers, such as AutoModelForSequenceClassification to fine-tune what was trained
            as a language model; by default the class that was saved.
        options: those of transformers' `from_pretrained`, such as `num_labels` or `dtype`.

    Returns:
        The model in evaluation mode.

    Raises:
        ValueError: the folder holds no converted model or lacks parameters of its mechanism, or `attn_implementation`
            is given.

    Example:
        >>> convert(model, "lln_diag").save_pretrained("linear")  # doctest: +SKIP
        >>> model = from_pretrained("linear")  # doctest: +SKIP
    """
    if "attn_implementation" in options:
        raise ValueError(
            "a converted model has the attention it was saved with; convert it again, or open it with transformers' "
            "own from_pretrained and attn_implementation="
        )
    config = AutoConfig.from_pretrained(folder, **{name: options[name] for name in WHERE if name in options})
    saved = getattr(config, "lln_attention", None)
    if saved is None:
        raise ValueError(
            f"{folder} holds no converted model: open it with transformers' from_pretrained, and then lln.hf.convert it"
        )
    kind = _concrete_class(model_class, config, folder)

    def init(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        with torch.device("cpu"), warnings.catch_warnings():  # the rest is built on torch's "meta", without memory
            warnings.simplefilter("ignore")  # what is left as it was has been reported when the model was converted
            more = {name: saved[name] for name in ("max_rollback",) if name in saved}
            convert(self, saved["attention"], max_len=saved["max_len"], **more, **saved["options"])

    # A class for this one call, so that transformers finds the mechanisms' parameters when it loads the weights.
    opening: Any = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    model, report = opening.from_pretrained(folder, output_loading_info=True, **options)
    missing = sorted(key for key in report["missing_keys"] if ".mechanism." in key)
    if missing:
        raise ValueError(f"{folder} lacks parameters of its attention, {', '.join(missing)}; save the model again")
    model.__class__ = kind
    return model


def _concrete_class(model_class: Any, config: PreTrainedConfig, folder: object) -> Any:
    if model_class is None:
        name = config.architectures[0] if config.architectures else ""
        if not hasattr(transformers, name):
            raise ValueError(f"{folder} does not name the class that it holds; give model_class=")
        return getattr(transformers, name)
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return model_class
    if type(config) not in mapping:
        raise ValueError(f"there is no {model_class.__name__} for a {config.model_type} model; give another class")
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found
