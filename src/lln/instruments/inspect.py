"""`lln inspect MODEL --text FILE`: what every head of a Hugging Face model does with a text."""

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.instruments.capture import Capture
from lln.instruments.details import HeadDetails, head_details, sample_queries
from lln.instruments.heads import measure_heads
from lln.instruments.lognormality import statistics
from lln.instruments.records import Record, clean, write_table
from lln.instruments.tap import Tap

# What is printed and drawn: column, title, unit.
PANELS = (
    ("temperature", "temperature", ""),
    ("entropy", "entropy", "bits"),
    ("gap", "spectral gap", ""),
    ("bias", "bias", "bits"),
)
# A model without weights is built small, so that inspecting it takes seconds.
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
BYTES = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")
# These count positions from 2 on: one less than the padding's id would have it.
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "longformer")


@dataclass(frozen=True)
class Inspection:
    """What every head of a model does with a text: all that `lln.report.heads_page` shows of it."""

    name: str
    records: list[Record]  # one for each layer and head
    pieces: list[str] = field(default_factory=list)  # the text, cut into the model's tokens; may be empty
    queries: list[int] = field(default_factory=list)  # positions of the queries whose attention is in `details`
    details: list[HeadDetails | None] = field(default_factory=list)  # of each record; empty if they were not requested


def inspect(model: str, text_file: str | Path, *, out: str | Path | None = None, tokens: int = 512) -> list[Record]:
    """As `inspect_model`, with the text of a file."""
    return inspect_model(model, read_text(text_file), out=out, tokens=tokens)


def read_text(text_file: str | Path, option: str = "--text") -> str:
    path = Path(text_file)
    if not path.is_file():
        raise ValueError(f"{option} must be a text file, there is none at {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text ({error})") from error


def inspect_model(model: str, text: str, *, out: str | Path | None = None, tokens: int = 512) -> list[Record]:
    """One record for each layer and head: the instruments of what it makes of the first `tokens` tokens of a text.

    `model` is a folder saved by `save_pretrained`, or the name of a Hugging Face model type ("roberta", "bert",
    "gpt2", "llama", ...), for which a small random one is made. Where weights or a tokenizer are missing, the note in
    each record states it: weights are drawn with seed 0, and the bytes of the text are taken for tokens. With `out` the
    folder gets `inspect.csv` and `inspect.png`.
    """
    inspection = inspect_details(model, text, tokens=tokens, with_details=False)
    if out is not None:
        write_inspection(inspection, out)
    return inspection.records


def inspect_details(model: str, text: str, *, tokens: int = 512, with_details: bool = True) -> Inspection:
    """As `inspect_model`, with the details that a page shows of each head."""
    if not text.strip():
        raise ValueError("the text is empty; a few hundred words show the most")
    if tokens < 2:
        raise ValueError(f"tokens must be at least 2, got {tokens}: a single token has nothing to attend to")
    network, tokenizer, notes = load_model(model)
    ids, *rest = encode(network, tokenizer, text, tokens)
    if rest and ids.shape[1] < tokens:
        notes.append(f"the model has positions for {ids.shape[1]} tokens, so it reads no more of the text")
    if ids.shape[1] < 2:
        raise ValueError(f"the text has only {ids.shape[1]} token; a few hundred words show the most")
    pieces = text_pieces(tokenizer, text, ids[0].tolist()) if with_details else []
    return inspect_network(
        network, {"input_ids": ids}, name=model, pieces=pieces, notes=notes, with_details=with_details
    )


def inspect_network(
    network: Any,
    inputs: Mapping[str, Tensor],
    *,
    name: str,
    pieces: Sequence[str] = (),
    notes: Sequence[str] = (),
    with_details: bool = True,
) -> Inspection:
    """What every head of a Hugging Face model in memory does with the first sample of its inputs.

    Args:
        network: the model. It is in evaluation mode only while it runs.
        inputs: keyword arguments of the model, as `{"input_ids": ids}` or `{"pixel_values": images}`.
        name: what tables and pages call the model.
        pieces: the text of each token, see `text_pieces`; without them a page shows positions.
        notes: remarks on the model in each record.
        with_details: keep the details that a page shows, too.

    Raises:
        ValueError: the model does not run on the inputs, or has attention that cannot be read.
    """
    notes = list(notes)
    main = network.get_encoder() if network.config.is_encoder_decoder else network
    was_training = network.training
    network.eval()
    with Tap(network, lambda batch, heads: (0, list(range(heads)))) as tap, torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is not recorded: ")  # it is refused below, by the same message
        try:
            main(**inputs)
        except Exception as error:
            raise ValueError(f"{name} cannot be run on a text: {_one_line(error)}") from error
        finally:
            network.train(was_training)
    for layer, reason in tap.refused.items():
        raise ValueError(f"{name} cannot be read, {layer}: {reason}")
    shared = max(tap.calls.values(), default=1)
    if shared > 1:
        notes.append(f"layers share their attention, which is called {shared} times: this is the first call")
    if not tap.captures:
        raise ValueError(f"{name} has no attention that can be read; its class is {type(network).__name__}")
    records = [
        {"layer": layer, "head": head, **values, "note": "; ".join(notes)}
        for layer, capture in tap.captures.items()
        for head, values in zip(capture.heads, _instruments(capture), strict=True)
    ]
    if not with_details:
        return Inspection(name, records)
    first = next(iter(tap.captures.values()))
    queries = sample_queries(first.query.shape[2], first.key.shape[2], len(records))
    details = [detail for capture in tap.captures.values() for detail in head_details(capture, queries)]
    return Inspection(name, records, list(pieces), queries, details)


def write_inspection(inspection: Inspection, folder: str | Path, stem: str = "inspect") -> None:
    """Write the table (CSV) and the heat maps (PNG)."""
    write_table(inspection.records, Path(folder) / f"{stem}.csv")
    title = f"{inspection.name}: {inspection.records[0]['tokens']} tokens"
    draw_inspection(inspection.records, Path(folder) / f"{stem}.png", title=title)


def inspection_tables(records: list[Record]) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
    """For each instrument a table of layers and heads: its title, columns, rows and notes."""
    tables: list[tuple[str, list[str], list[list[str]], list[str]]] = []
    for column, title, unit in PANELS:
        layers, values = grid(records, column)
        name = f"{title} ({unit})" if unit else title
        rows = [
            [layer, *("-" if math.isnan(value) else f"{value:.2f}" for value in row)]
            for layer, row in zip(layers, values, strict=True)
        ]
        tables.append((f"{name} of each layer and head", ["layer", *map(str, range(len(values[0])))], rows, []))
    first = records[0]
    notes = [f"{first['tokens']} tokens; entropy of uniform attention: {first['limit']:.2f} bits"]
    tables[-1][-1].extend(notes + ([f"Note: {first['note']}."] if first["note"] else []))
    return tables


def draw_inspection(records: list[Record], path: str | Path, *, title: str) -> Path:
    """A heat map of layers and heads for each instrument, in one picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'lln-attention[cli]'") from error
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    figure.suptitle(title)
    for axes, (column, name, unit) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        layers, values = grid(records, column)
        image = axes.imshow(values, aspect="auto", cmap="viridis", origin="lower")
        axes.set_title(f"{name} ({unit})" if unit else name)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        axes.set_xticks(range(0, len(values[0]), max(1, len(values[0]) // 6)))
        axes.set_yticks(range(0, len(layers), max(1, len(layers) // 6)))
        figure.colorbar(image, ax=axes)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    return path


def _instruments(capture: Capture) -> list[Record]:
    """What is recorded of a head, and how log-normal it is."""
    everything = capture.query.shape[2]
    values = measure_heads(capture, everything, random.Random(0))
    shape = torch.cat([statistics(rows) for rows in capture.rows()])
    names = ("log_mean", "log_variance", "skewness", "excess_kurtosis", "ks_distance", "zeros")
    return [
        value | clean(dict(zip(names, row, strict=True))) for value, row in zip(values, shape.tolist(), strict=True)
    ]


def check_model(model: str) -> None:
    """Refuse what is neither a folder with a saved model nor a model type of transformers."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ImportError("lln inspect needs transformers: pip install 'lln-attention[hf]'") from error
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json; give a folder saved by save_pretrained")
    elif model not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{model!r} is neither a folder saved by save_pretrained nor a model type such as 'roberta', 'bert', "
            "'gpt2' or 'llama'; save a model of the hub to a folder first"
        )


def load_model(model: str, auto_class: str = "AutoModel") -> tuple[Any, Any, list[str]]:
    """The network, its tokenizer or None, and remarks on them."""
    check_model(model)
    transformers: Any = import_module("transformers")
    factory = getattr(transformers, auto_class)
    folder = Path(model)
    notes: list[str] = []
    if folder.is_dir():
        config = transformers.AutoConfig.from_pretrained(folder)
        weights = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    else:
        weights = has_tokenizer = False
        try:
            config = transformers.AutoConfig.for_model(model, **SMALL)
        except Exception as error:
            raise ValueError(f"no small {model} can be made, give a saved one: {_one_line(error)}") from error
    if weights and hasattr(config, "lln_attention"):
        from lln.hf import from_pretrained

        network = from_pretrained(folder, factory)
    elif weights:
        network = factory.from_pretrained(folder)
    else:
        notes.append("no weights found, so they are random")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                network = factory.from_config(config)
            except Exception as error:
                raise ValueError(f"no {model} can be made of its configuration: {_one_line(error)}") from error
    if not has_tokenizer:
        notes.append("no tokenizer found, so the bytes of the text are its tokens")
    if network.main_input_name != "input_ids":
        raise ValueError(f"{model} reads {network.main_input_name}, not text; record it with lln.instruments.Recorder")
    return network, transformers.AutoTokenizer.from_pretrained(folder) if has_tokenizer else None, notes


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def most_tokens(config: Any, tokens: int) -> int:
    """So many tokens, or as many as a model has positions for, if that is less."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    return int(min(tokens, positions - (2 if config.model_type in OFFSET_POSITIONS else 0)))


def encode(network: Any, tokenizer: Any, text: str, tokens: int) -> list[Tensor]:
    """The text in parts (1, N) of so many tokens, or of as many as the model has positions for; the last is shorter."""
    length = most_tokens(network.config, tokens)
    if tokenizer is not None:
        parts = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    else:
        # Small ids are often special, such as padding, which would be masked.
        vocabulary = network.config.get_text_config().vocab_size
        first = max(0, min(10, vocabulary - BYTES))
        ids = [first + byte % (vocabulary - first) for byte in text.encode()]
        parts = [ids[start : start + length] for start in range(0, len(ids), length)]
    return [torch.tensor([part]) for part in parts]


def text_pieces(tokenizer: Any, text: str, ids: Sequence[int]) -> list[str]:
    """The text of each token: the words of the text with the spaces before them; a special token by its name."""
    if tokenizer is None:
        return [bytes([byte]).decode(errors="replace") for byte in text.encode()[: len(ids)]]
    if not tokenizer.is_fast:
        return [str(tokenizer.decode([token])) for token in ids]
    offsets = tokenizer(text, truncation=True, max_length=len(ids), return_offsets_mapping=True)["offset_mapping"]
    pieces, done = [], 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        if end > start:
            pieces.append(text[min(done, start) : end])
            done = end
        else:
            pieces.append(str(tokenizer.convert_ids_to_tokens(token)))
    return pieces


def grid(records: list[Record], column: str) -> tuple[list[str], list[list[float]]]:
    """The layers, and the values of a column by layer and head; NaN where there is none."""
    layers = list(dict.fromkeys(record["layer"] for record in records))
    width = 1 + max(record["head"] for record in records)
    values = [[math.nan] * width for _ in layers]
    for record in records:
        if record[column] is not None:
            values[layers.index(record["layer"])][record["head"]] = record[column]
    return _short_names(layers), values


def _short_names(layers: list[str]) -> list[str]:
    """Names without the parts that all layers share, if there are several."""
    parts = [name.split(".") for name in layers]
    if len(layers) < 2:
        return layers
    while len({tuple(name[:1]) for name in parts}) == 1:
        parts = [name[1:] for name in parts]
    while len({tuple(name[-1:]) for name in parts}) == 1:
        parts = [name[:-1] for name in parts]
    return [".".join(name) for name in parts]
