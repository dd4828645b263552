"""`lln train`: one command for each experiment, whose flags are the fields of its config."""

import dataclasses
import inspect
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from lln.tasks.config import TrainConfig, parse_options
from lln.tasks.presets import GlueConfig, MlmConfig, VisionConfig

app = typer.Typer(help="Train: pre-training, GLUE, images. The same command continues a run.", no_args_is_help=True)

TASKS: dict[str, tuple[type[TrainConfig], str]] = {
    "mlm": (MlmConfig, "Pre-train RoBERTa on text by masked language modelling."),
    "glue": (GlueConfig, "Fine-tune a pre-trained model on a GLUE task."),
    "vision": (VisionConfig, "Train a ViT to tell dogs from cats."),
}


def add_command(app: typer.Typer, name: str, config: type[TrainConfig], help: str) -> None:
    """A command that trains with a preset of `config`, changed by the flags that are given."""

    def command(preset: str, out: Path | None, data_dir: Path | None, quiet: bool, **flags: Any) -> None:
        changes = {field: value for field, value in flags.items() if value is not None and value != []}
        if "options" in changes:
            changes["options"] = parse_options(changes["options"])
        changes = {field: tuple(x) if isinstance(x, list) else x for field, x in changes.items()}
        train = import_module(f"lln.tasks.{name}").train  # only now: it brings transformers, accelerate and datasets
        train(config.preset(preset, **changes), out=out, data_dir=data_dir, quiet=quiet)

    command.__signature__ = inspect.Signature(config_parameters(config))  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in config_parameters(config)}
    app.command(name, help=help)(command)


def config_parameters(config: type[Any]) -> list[inspect.Parameter]:
    """The flags of a command for a config with `PRESETS`: --preset, one for each field, --out, --data-dir, --quiet."""

    def parameter(name: str, kind: Any, default: Any, help: str, *flags: str) -> inspect.Parameter:
        annotation = Annotated[kind, typer.Option(*flags, help=help, show_default=default is not None)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    kinds = get_type_hints(config)
    found = [parameter("preset", str, "laptop", f"Settings to start from: {', '.join(config.PRESETS)}.")]
    for field in dataclasses.fields(config):
        values = {name: values.get(field.name, field.default) for name, values in config.PRESETS.items()}
        help = f"{field.metadata['help']} {_presets(values)}".rstrip()
        if field.name == "options":
            found.append(parameter("options", list[str], [], help, "--option"))
        elif kinds[field.name] == tuple[float, ...]:  # given again and again
            found.append(parameter(field.name, list[float], [], help, field.metadata["flag"]))
        else:
            flags = [field.metadata["flag"]] if field.metadata.get("flag") else []
            found.append(parameter(field.name, kinds[field.name] | None, None, help, *flags))
    return [
        *found,
        parameter("out", Path | None, None, "The run folder; left out, one in runs/."),
        parameter("data_dir", Path | None, None, "Folder with data; left out, the environment variable LLN_DATA."),
        parameter("quiet", bool, False, "Say nothing.", "--quiet"),
    ]


def _presets(values: dict[str, Any]) -> str:
    """The values that the presets have, once if they are the same."""
    shown = {name: value for name, value in values.items() if value not in (None, dataclasses.MISSING)}
    if len(shown) == len(values) and len(set(map(str, shown.values()))) == 1:
        return f"({next(iter(shown.values()))})"
    return f"({', '.join(f'{name} {value}' for name, value in shown.items())})" if shown else ""


for _name, (_config, _help) in TASKS.items():
    add_command(app, _name, _config, _help)
