"""Pretrained models turned linear, with a report of what was kept.

    from lln.linearize import linearize

    result = linearize(model, tokenizer, texts, out="linear")     # texts: a list of documents
    result.model                                                  # an ordinary converted model
    result.report["kept"]                                         # on text that was held out

The command is `lln linearize MODEL --out DIR`. Stages and losses: `lln.linearize.stages`.
"""

from typing import Any

from lln.linearize.config import LinearizeConfig

__all__ = ["LinearizeConfig", "Linearized", "linearize"]


def __getattr__(name: str) -> Any:
    """`linearize` and `Linearized`, imported when they are first used: they bring transformers and accelerate."""
    if name not in ("Linearized", "linearize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lln.linearize import linear
    except ModuleNotFoundError as error:
        raise ImportError(f'lln.linearize needs {error.name}: pip install "lln-attention[tasks]"') from error
    return getattr(linear, name)
