"""`lln linearize`: its flags are the fields of `LinearizeConfig`."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.linearize.config import LinearizeConfig
from lln.report.console import errors
from lln.tasks.config import parse_options
from lln.train_cli import config_parameters

HELP = """Turn a pretrained model linear, and report what was kept.

MODEL is a folder with a Hugging Face model, or a name on the hub where there is a network. The folder --out gets the
linear model, which lln.hf.from_pretrained opens, and report.html. The same command continues an interrupted run.
"""


def add_command(app: typer.Typer) -> None:
    def command(
        model: str,
        text: Path | None,
        images: Path | None,
        preset: str,
        out: Path | None,
        data_dir: Path | None,
        quiet: bool,
        **flags: Any,
    ) -> None:
        changes = {field: value for field, value in flags.items() if value is not None and value != []}
        if "options" in changes:
            changes["options"] = parse_options(changes["options"])
        config = LinearizeConfig.preset(preset, **changes)
        if out is None:
            raise ValueError("say where the linear model is to be written: --out FOLDER")
        from lln.linearize.command import run  # only now: it brings transformers, accelerate and datasets

        run(model, out, config, text=text, images=images, data_dir=data_dir, quiet=quiet, warn=errors.print)

    def parameter(name: str, kind: Any, default: Any, extra: Any) -> inspect.Parameter:
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, extra])

    parameters = [
        parameter("model", str, inspect.Parameter.empty, typer.Argument(help="Folder or hub name of the model.")),
        parameter(
            "text",
            Path | None,
            None,
            typer.Option(help="Text to learn from: a file .txt, .jsonl or .jsonl.gz, or a folder."),
        ),
        parameter("images", Path | None, None, typer.Option(help="Folder of images to learn from, for a ViT.")),
        *config_parameters(LinearizeConfig),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {x.name: x.annotation for x in parameters}
    app.command("linearize", help=HELP)(command)
