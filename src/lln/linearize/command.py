"""What `lln linearize` does: finds the model and the text, and calls `linearize`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedModel

from lln.linearize.config import LinearizeConfig
from lln.linearize.linear import Linearized, check_model, linearize
from lln.tasks.data.folder import data_dir as find_data
from lln.tasks.data.folder import require
from lln.tasks.data.glue import read_glue
from lln.tasks.data.lines import read_jsonl
from lln.tasks.data.text import NoDocumentsError, Split, default_source, read_documents
from lln.tasks.start import TOKENIZER_FILES

PICTURES = (".jpg", ".jpeg", ".png", ".webp")


def run(
    model: str,
    out: Path,
    config: LinearizeConfig,
    *,
    text: Path | None = None,
    images: Path | None = None,
    pairs: Path | None = None,
    task: str | None = None,
    hold_out: bool = False,
    data_dir: Path | None = None,
    quiet: bool = False,
    warn: Callable[[str], None] = print,
) -> Linearized:
    """Load a model, read text or images, make the model linear and write it to `out`."""
    network = load_model(model)
    check_model(network)
    if task is None and (hold_out or config.examples is not None or config.eval_examples is not None):
        raise ValueError(
            "--hold-out, --examples and --eval-examples are of the examples of a --task; name it, or leave them out"
        )
    is_vision = getattr(network, "main_input_name", "") == "pixel_values"
    if is_vision:
        if pairs is not None or task is not None:
            raise ValueError(f"{model} takes images, and --pairs and --task are of sentences; leave them out")
        if images is None:
            raise ValueError(f"{model} takes images: give a folder of them, --images FOLDER")
        processor = AutoImageProcessor.from_pretrained(model)  # type: ignore[no-untyped-call]
        return linearize(
            network,
            processor,
            read_images(images, processor),
            out=out,
            config=config,
            origin={"model": model, "images": str(images)},
            quiet=quiet,
        )
    if images is not None:
        raise ValueError(f"{model} takes text, not images: use --text")
    tokenizer = load_tokenizer(model)
    if task is not None:
        if text is not None:
            raise ValueError("give text to learn from, --text, or the examples of a task, --task, and not both")
        rows = read_glue(task, "train", find_data(data_dir))
        return linearize(
            network,
            tokenizer,
            rows,
            held_out=None if hold_out else read_glue(task, "validation", find_data(data_dir)),
            pairs=None if pairs is None else read_pairs(pairs),
            out=out,
            config=config,
            origin={"model": model, "task": task},
            quiet=quiet,
        )
    source = str(text) if text is not None else default_source(find_data(data_dir))
    if source == "stdlib" and not quiet:
        warn(
            "Learning from the embedded text, the source of Python's standard library: text like that which the model "
            "is for is better, --text FILE."
        )
    documents, held_out = read_text(source, find_data(data_dir))
    return linearize(
        network,
        tokenizer,
        documents,
        held_out=held_out or None,
        pairs=None if pairs is None else read_pairs(pairs),
        out=out,
        config=config,
        origin={"model": model, "text": source},
        quiet=quiet,
    )


def read_text(source: str, data_dir: Path | None) -> tuple[list[str], list[str]]:
    """Documents to learn from, and others to measure on: none where too few can be held out. A folder may hold .txt."""
    folder = Path(source)
    files = sorted(folder.rglob("*.txt")) if folder.is_dir() else []
    names = [str(file) for file in files] or [source]
    train, held_out = ([x for name in names for x in _read_side(name, side, data_dir)] for side in get_args(Split))
    if not train and not held_out:
        raise ValueError(f"{source} holds no text")
    return (train, held_out) if train else (held_out, [])


def _read_side(source: str, split: Split, data_dir: Path | None) -> list[str]:
    try:
        return read_documents(source, split, data_dir)
    except NoDocumentsError:  # of few documents, all may be on one side
        return []


def read_pairs(path: Path) -> list[tuple[str, str, float]]:
    """Pairs of sentences with scores: JSON lines with sentence1, sentence2 and score."""
    wanted: dict[str, Any] = {"sentence1": str, "sentence2": str, "score": (int, float)}
    rows = read_jsonl(require(path, "pairs of sentences, JSON lines"), wanted)
    return [(row["sentence1"], row["sentence2"], float(row["score"])) for _, row in rows]


def read_images(folder: Path, processor: Any) -> Tensor:
    from PIL import Image

    files = sorted(x for x in folder.rglob("*") if x.suffix.lower() in PICTURES) if folder.is_dir() else []
    if len(files) < 2:
        raise ValueError(
            f"--images must name a folder with images ({', '.join(PICTURES)}), and {folder} has {len(files)}"
        )
    made = [processor(Image.open(file).convert("RGB"), return_tensors="pt")["pixel_values"] for file in files]
    return torch.cat(made)


def load_model(name: str) -> PreTrainedModel:
    """The model of a folder or of the hub, in the class that it was saved in."""
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} is neither a folder with a Hugging Face model nor a name on the hub: {error}"
        ) from error
    architecture = (config.architectures or [""])[0]
    kind = getattr(transformers, architecture, None) or transformers.AutoModel
    if getattr(config, "lln_attention", None) is not None:
        raise ValueError(f"{name} is linear already; give the softmax model that it was made from")
    model: PreTrainedModel = kind.from_pretrained(name, dtype=torch.float32)
    return model


def load_tokenizer(name: str) -> Any:
    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        # transformers would make an empty one
        raise ValueError(f"{name} has no tokenizer: it holds none of {', '.join(TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no tokenizer that can be read: {error}") from error
