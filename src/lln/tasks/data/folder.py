"""Where data is, and where what was made from it is kept.

Data is only ever read. Everything derived from it (a trained tokenizer, packed tokens, decoded images) is a single file
in the cache, named by the contents it was made from, written under another name first and moved into place, with its
SHA-256 beside it. A file that does not match its sum is made again, with a warning.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from lln.cache import cache_folder


def data_dir(given: Path | None = None) -> Path | None:
    """The folder of the data: `given`, else the environment variable LLN_DATA, else None."""
    name = given or os.environ.get("LLN_DATA")
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        origin = "--data-dir" if given else "the environment variable LLN_DATA"
        raise ValueError(f"{origin} must name a folder with data, and {folder} is none")
    return folder


def cache_dir() -> Path:
    """The folder of the cache, made if it is new."""
    folder = cache_folder()
    try:
        # Kernels are kept there too, which are not loaded from a folder that others can write to.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(_no_cache(folder, error)) from error
    return folder


def require(path: Path, what: str) -> Path:
    """`path` if it exists; otherwise an error with what should be there."""
    if not path.exists():
        raise ValueError(f"{path} is missing: expected {what}")
    return path


def digest(parts: Iterable[str | bytes]) -> str:
    """The SHA-256 of a list of strings, different for every different list: ["ab"] is not ["a", "b"]."""
    total = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        total.update(len(raw).to_bytes(8, "little"))
        total.update(raw)
    return total.hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashed_share(key: str) -> float:
    """A number in [0, 1) that depends on `key` alone: what is held out for validation must not depend on the rest."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") / 2**64


def cached_file(name: str, make: Callable[[Path], None]) -> Path:
    """The file `name` of the cache, whole: as it is there, or written by `make(path)` to the path that it is given.

    `make` must write the same bytes each time, so that two processes which make a file at the same time do no harm.
    """
    path = cache_dir() / name
    sums = path.with_name(name + ".sha256")
    if path.exists():
        if sums.exists() and sums.read_bytes() == _sum_line(path):
            return path
        warnings.warn(f"{path} is damaged or was not finished: making it again", stacklevel=2)
    # Each process has drafts of its own; a move into place is atomic, and the sum is there before its file is.
    drafts = [final.with_name(f".{os.getpid()}-{final.name}") for final in (sums, path)]
    try:
        make(drafts[1])
        drafts[0].write_bytes(_sum_line(drafts[1], name))
        for draft, final in zip(drafts, (sums, path), strict=True):
            _sync(draft)
            os.replace(draft, final)
    except OSError as error:
        raise ValueError(_no_cache(path, error)) from error
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return path


def _sum_line(path: Path, name: str | None = None) -> bytes:
    """As `sha256sum` writes it, so that a user can check the cache with it."""
    return f"{file_digest(path)}  {name or path.name}\n".encode()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _no_cache(path: Path, error: OSError) -> str:
    return (
        f"cannot write {path} in the cache ({error}): set LLN_CACHE to a folder with enough space that you may write to"
    )
