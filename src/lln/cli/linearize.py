"""`lln linearize`: its flags are the fields of `LinearizeConfig`."""

import inspect
from pathlib import Path
from typing import Any

import typer

from lln.cli.options import changed, parameter, set_parameters, settings_parameters
from lln.linearize.config import LinearizeConfig
from lln.terminal import errors

HELP = """Turn a pretrained model linear, and report what was kept.

MODEL is a folder with a Hugging Face model, or a name on the hub where there is a network. The folder --out gets the
linear model, which lln.hf.from_pretrained opens, and report.html. The same command continues an interrupted run.
"""


def add_command(app: typer.Typer) -> None:
    def command(
        model: str,
        text: Path | None,
        images: Path | None,
        pairs: Path | None,
        task: str | None,
        hold_out: bool,
        preset: str,
        out: Path | None,
        data_dir: Path | None,
        quiet: bool,
        record: Path | None,
        **flags: Any,
    ) -> None:
        config = LinearizeConfig.preset(preset, **changed(flags))
        if out is None:
            raise ValueError("give the folder for the linear model: --out FOLDER")
        from lln.linearize.command import run  # only now: it imports transformers, accelerate and datasets
        from lln.linearize.linear import linearized_result
        from lln.results import add_result, check_writable

        if record is not None:
            check_writable(record)
        sources: dict[str, Any] = {"text": text, "images": images, "pairs": pairs, "task": task}
        sources |= {"hold_out": hold_out, "data_dir": data_dir}
        found = run(model, out, config, **sources, quiet=quiet, warn=errors.print)
        if record is not None:
            calibrated = "-calibrated" if config.steps == 0 else ""  # as `lln reproduce linearized` names its runs
            add_result(record, linearized_result(found.report, f"{Path(model).name}-{config.attention}{calibrated}"))

    learn = "Text to learn from: a file .txt, .jsonl or .jsonl.gz, or a folder."
    scored = "Labelled data of an encoder, to report on: JSON lines with sentence1, sentence2 and score, as STS-B."
    examples = (
        "Learn from the training examples of this GLUE task, or imdb, that MODEL was fine-tuned on; without labels."
    )
    part = "With --task: measure on a tenth of the training examples, held out, and not on the validation examples."
    folder = typer.Argument(help="Folder or hub name of the model.")
    parameters = [
        parameter("model", str, inspect.Parameter.empty, folder),
        parameter("text", Path | None, None, typer.Option(help=learn)),
        parameter("images", Path | None, None, typer.Option(help="Folder of images to learn from, for a ViT.")),
        parameter("pairs", Path | None, None, typer.Option(help=scored)),
        parameter("task", str | None, None, typer.Option(help=examples)),
        parameter("hold_out", bool, False, typer.Option("--hold-out", help=part)),
        *settings_parameters(LinearizeConfig),
        parameter("record", Path | None, None, typer.Option(help="Add what was kept to this result file (.jsonl).")),
    ]
    set_parameters(command, parameters)
    app.command("linearize", help=HELP)(command)
