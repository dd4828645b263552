"""Hugging Face: any transformers model that goes through the attention interface, with any mechanism of the zoo.

    model = lln.hf.convert(model, "lln_diag", block_size=64)       # in place: fine-tune it, generate with it
    model.save_pretrained(folder)
    model = lln.hf.from_pretrained(folder)                         # the same model again

Importing this module also makes `attn_implementation="lln"` and `"lln_diag"` known to transformers.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError('lln.hf needs transformers 5: pip install "lln-attention[hf]"') from error

from lln.hf.attention import register
from lln.hf.convert import convert
from lln.hf.saving import from_pretrained

register()

__all__ = ["convert", "from_pretrained"]
