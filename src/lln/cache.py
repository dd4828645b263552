"""Where things that take long to make are kept for the next time: built kernels, tokenizers, prepared data."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The environment variable LLN_CACHE, else lln in the user's cache folder. It may not exist yet."""
    if chosen := os.environ.get("LLN_CACHE"):
        return Path(chosen).expanduser()
    users = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(users).expanduser() / "lln"
