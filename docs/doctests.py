"""For mkdocstrings: the examples of docstrings as code, which their titles, `Example:`, do not mark for griffe."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
