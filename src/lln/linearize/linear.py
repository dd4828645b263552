"""`linearize`: the stages, in a folder that a later call continues, and the report of what was kept."""

import copy
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lln.hf import convert, from_pretrained
from lln.hf.convert import PLAIN
from lln.instruments.inspect import inspect_network
from lln.linearize.config import LinearizeConfig
from lln.linearize.cost import LENGTHS, layer_cost
from lln.linearize.data import ExampleSource, Source, first_of
from lln.linearize.evaluate import Kept, Pairs, ablation, head_table, label_scores, pair_correlation
from lln.linearize.fold import fold_projections
from lln.linearize.report import write_report
from lln.linearize.sources import make_source
from lln.linearize.stages import DivergedError, Linearizer, train
from lln.linearize.teacher import converted_modules, make_teacher
from lln.provenance import read_json
from lln.report.heads_page import write_heads_page
from lln.results import Result
from lln.tasks.data.folder import digest
from lln.tasks.display import Display
from lln.tasks.run import PROVENANCE, SUMMARY, RunFolder, write_json
from lln.tasks.saving import save_model

HEADS = "heads.html"
LONGEST_SHOWN = 256  # tokens of the passage on the page of heads: a page of a longer one would be many megabytes
LONGEST_MEASURED = 512  # tokens of the passage whose attention matrices are measured: they are quadratic in the length
WORK = "work"  # the folder inside `out` from which an interrupted run continues


@dataclass(frozen=True)
class Linearized:
    """The linear model, and what the report says of it."""

    model: PreTrainedModel
    report: dict[str, Any]


def linearize(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Sequence[str] | Tensor | Dataset,
    *,
    held_out: Sequence[str] | Tensor | Dataset | None = None,
    pairs: Pairs | None = None,
    out: str | Path | None = None,
    config: LinearizeConfig | None = None,
    origin: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Linearized:
    """Turn a pretrained model linear: calibrate, align, join, distil, measure.

    Args:
        model: a transformers encoder, decoder or ViT with softmax attention. It is left as it is.
        tokenizer: that of the model; for a ViT its image processor, or None. It is saved with the result.
        texts: documents to learn from; for a ViT images as the processor makes them, (images, channels, height, width);
            for a classifier of texts its examples, a `datasets.Dataset` with the columns text_a, text_b (None in all
            rows if there is one text) and label. Nothing is learned from labels.
        held_out: documents, images or examples that are only measured on; left out, a part of `texts` chosen by hash.
        pairs: labelled data of an encoder, (sentence, sentence, score): the report says how well the cosines of both
            models follow the scores. Nothing is learned from them.
        out: a folder for the model, its report (report.html, report.md, report.json) and, until it is finished, what
            a later call with the same arguments continues from. Left out, nothing is kept on disk.
        config: settings, see `LinearizeConfig`; left out, the preset "laptop".
        origin: more to say in the report about where model and text come from.
        quiet: no progress bars and no messages.

    Returns:
        The linear model in evaluation mode and float32, and the report.

    Raises:
        ValueError: the model is linear already or cannot be converted, the tokenizer is another model's, or the text is
            too short; nothing is left in `out` then that would block another call.

    Example:
        >>> result = linearize(model, tokenizer, documents, out="linear")  # doctest: +SKIP
        >>> model = lln.hf.from_pretrained("linear")  # doctest: +SKIP
    """
    config = config or LinearizeConfig.preset("laptop")
    check_model(model)
    if config.attention in PLAIN:
        raise ValueError(f"{config.attention} is the attention that the model has; choose another, --attention")
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return linearize(
                model,
                tokenizer,
                texts,
                held_out=held_out,
                pairs=pairs,
                out=folder,
                config=config,
                origin=origin,
                quiet=quiet,
            )
    place = Path(out)
    check_folder(place)
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()  # type: ignore[no-untyped-call]
    source = make_source(model, tokenizer, texts, held_out, config, quiet=quiet)
    if pairs is not None:
        check_pairs(pairs, tokenizer, takes_text=not isinstance(texts, Tensor))
    teacher = make_teacher(model)
    attentions = converted_modules(teacher).values()
    options = config.all_options(
        max(module.mechanism.head_dim for module in attentions),
        is_causal=any(module.attends_causally for module in attentions),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # some mechanisms draw their features, and LoRA its matrices
        student = convert(copy.deepcopy(model), config.attention, **options)
        trainable = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
        adapters = add_lora(student, config.lora_rank) if config.lora_rank else None
    student.train(False)
    began_with = source.fingerprint() | fingerprint(model, pairs)
    with RunFolder(place / WORK, {"experiment": "linearize"} | config.settings(), quiet=quiet) as run:
        run.check_data(began_with)
        if run.summary is not None:
            run.print(f"{place} is finished: nothing to do.")
            return Linearized(from_pretrained(place, type(model)), read_json(place / "report.json", "remove it"))
        work = Linearizer(student, teacher, source, config)
        try:
            report = _run(work, run, quiet=quiet)
        except DivergedError:
            shutil.rmtree(run.path)  # lest it stand in the way of a lower rate
            raise
        if pairs is not None:
            models = {"softmax": work.teacher, "linear": student}
            found = {name: pair_correlation(x, tokenizer, pairs, quiet=quiet) for name, x in models.items()}
            report["pairs"] = {"pairs": len(pairs)} | found
        if adapters is not None:
            adapters.merge_and_unload()
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(trainable[name])
        if isinstance(source, ExampleSource):
            report["labelled"] = {"examples": source.held_out_examples} | {
                f"{name}_{metric}": value
                for name, x in (("softmax", work.teacher), ("linear", student))
                for metric, value in label_scores(x, source, f"labelled examples, {name}", quiet=quiet).items()
            }
        report["folded"] = fold_projections(student)
        report |= {"origin": dict(origin or {}), "data": source.fingerprint(), "settings": config.settings()}
        report |= read_json(run.path / PROVENANCE, "begin anew in another folder")
        try:
            save_model(student, place, tokenizer)
        except SafetensorError as error:
            raise OSError(
                f"the model could not be written to {place}: {error}; the same command tries again"
            ) from error
        report["heads_page"] = write_heads(model, student, tokenizer, source, place / HEADS)
        write_report(report, place)
        write_json(run.path / SUMMARY, {"finished": True})
        shutil.rmtree(run.path / "checkpoints")  # as large as the model, and not needed any more
    return Linearized(student, report)


def check_model(model: PreTrainedModel) -> None:
    """Refuse what is not a model with softmax attention."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a transformers model is needed, got {type(model).__name__}")
    linear = getattr(model.config, "lln_attention", None)
    if linear is not None:
        raise ValueError(
            f"this model is linear already ({linear['attention']}); give the softmax model that it was made from"
        )
    if model.config.is_encoder_decoder:
        raise ValueError("models of an encoder and a decoder are not linearised; give one of the two")


def check_folder(place: Path) -> None:
    """Refuse a folder with other files, which might be the model itself."""
    if place.is_dir() and not (place / WORK).exists() and any(place.iterdir()):
        raise ValueError(
            f"{place} holds other files, and the linear model needs a folder of its own; choose another, --out"
        )


def check_pairs(pairs: Pairs, tokenizer: PreTrainedTokenizerBase | None, *, takes_text: bool) -> None:
    """Refuse pairs that cannot be measured in the end."""
    if not takes_text or tokenizer is None or len(pairs) < 3:
        raise ValueError("pairs are at least three pairs of sentences with scores, for a model that takes text")
    scores = {float(score) for *_, score in pairs}
    if len(scores) < 2 or not all(map(math.isfinite, scores)):
        raise ValueError("the scores of pairs must be finite, and not all of them the same")
    if tokenizer.pad_token_id is None:
        raise ValueError("pairs are measured in batches, and the tokenizer has no token for padding; give it one")


def fingerprint(model: PreTrainedModel, pairs: Pairs | None) -> dict[str, Any]:
    """What a run begins with beside its settings and its text."""
    tensors = model.state_dict().values()
    found = {"model_digest": digest(x.detach().cpu().contiguous().numpy().tobytes() for x in tensors)[:16]}
    return found | ({} if pairs is None else {"pairs_digest": digest(map(repr, pairs))[:16]})


def add_lora(student: PreTrainedModel, rank: int) -> Any:
    """LoRA matrices on all linear layers of a model, which alone are trained beside its attention mechanisms."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError('LoRA needs peft: pip install "lln-attention[lora]"') from error
    return get_peft_model(student, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def _run(work: Linearizer, run: RunFolder, *, quiet: bool) -> dict[str, Any]:
    """Train, and measure after each stage; what was measured before an interruption is not measured again."""
    path = run.path / "measured.json"
    found: dict[str, Any] = read_json(path, "remove it") if path.exists() else {"kept": {}}
    kept = Kept(work.teacher, work.source, is_language_model=work.is_language_model)

    def note(name: str, value: Any) -> None:
        found[name] = value
        write_json(path, found)

    def after_stage(stage: str) -> None:
        if stage not in found["kept"]:
            rows = kept.measure(work.student)
            note("kept", found["kept"] | {stage: rows})
            run.print(f"After {stage}: {describe(rows[-1])}")

    train(work, run, quiet=quiet, after_stage=after_stage)
    if "ablation" not in found:
        note("ablation", ablation(kept, work.student))
    if "heads" not in found:
        length = min(work.source.lengths[-1], LONGEST_MEASURED)
        note("heads", head_table(work.teacher, work.student, work.source.held_out(length)[0]))
    lengths = tuple(x for x in LENGTHS if x <= work.config.cost_tokens)
    if lengths and "cost" not in found:
        module = next(iter(converted_modules(work.student).values()))
        display = Display("time and memory", len(lengths), 0, quiet=quiet)
        done = iter(range(1, len(lengths) + 1))
        try:
            cost = layer_cost(
                work.config.attention,
                work.config.all_options(module.mechanism.head_dim, is_causal=module.attends_causally),
                heads=module.mechanism.num_heads,
                head_dim=module.mechanism.head_dim,
                is_causal=module.attends_causally,
                lengths=lengths,
                on_length=lambda: display.step(next(done)),
            )
        finally:
            display.close()
        note("cost", cost)
    return found


def write_heads(
    model: PreTrainedModel, student: PreTrainedModel, tokenizer: Any, source: Source, path: Path
) -> str | None:
    """Write the page of the heads of both models on the first held-out passage of up to 256 tokens.

    Returns:
        The name of the file, or None if the attention of the linear model cannot be read.
    """
    length = min(source.lengths[-1], LONGEST_SHOWN)
    inputs = first_of(source.held_out(length)[0])
    ids = inputs.get("input_ids")
    pieces = () if ids is None else [str(tokenizer.decode([token])) for token in ids[0].tolist()]
    try:
        shown = [
            inspect_network(network, inputs, name=name, pieces=pieces)
            for network, name in ((model, "softmax"), (student, "linear"))
        ]
    except ValueError:  # a mechanism without an attention matrix
        return None
    return write_heads_page(shown, path).name


def linearized_result(report: Mapping[str, Any], run: str) -> Result:
    """What is kept of a report in a result file: what was kept after each stage, and with which branches."""
    about = (
        "kept",
        "ablation",
        "heads",
        "cost",
        "pairs",
        "labelled",
        "heads_page",
        "settings",
        "data",
        "origin",
        "folded",
    )
    rows = [{"stage": stage} | row for stage, kept in report["kept"].items() for row in kept]
    rows += [{"stage": "ablation"} | row for row in report["ablation"]]
    rows += [{"stage": name} | report[name] for name in ("pairs", "labelled") if name in report]
    origin = {name: x for name, x in report.items() if name not in about}
    # Paths of this machine mean nothing elsewhere.
    words = (Path(word).name if Path(word).is_absolute() else word for word in report["command"].split())
    origin["command"] = " ".join(words)
    return Result(run, origin, report["settings"], {"data": report["data"]}, {"rows": rows})


def describe(row: Mapping[str, float]) -> str:
    """One row of what was kept, in a line."""
    if "loss" in row:
        return (
            f"loss {row['loss']:.3f} (softmax {row['softmax_loss']:.3f}), perplexity {row['perplexity_ratio']:.3f} of "
            f"softmax's, at {row['length']} tokens"
        )
    rank = f", rank correlation {row['rank_correlation']:.4f}" if "rank_correlation" in row else ""
    kept = f", divergence of predictions {row['divergence']:.4g}" if "divergence" in row else ""
    return f"cosine {row['cosine']:.4f}{rank}{kept}, at {row['length'] or 'all'} tokens"
