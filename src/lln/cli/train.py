"""`lln train`: one command for each experiment, whose flags are the fields of its settings."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from lln.cli.options import changed, parameter, set_parameters, settings_parameters
from lln.tasks.config import TrainConfig
from lln.tasks.lra.config import LraConfig
from lln.tasks.presets import GlueConfig, MlmConfig, VisionConfig
from lln.terminal import console

app = typer.Typer(
    help="Train: pre-training, GLUE, images, Long Range Arena. The same command continues a run.", no_args_is_help=True
)

# Settings, the module with `train`, and the help of each experiment.
EXPERIMENTS: dict[str, tuple[type[TrainConfig], str, str]] = {
    "mlm": (MlmConfig, "lln.tasks.mlm", "Pre-train RoBERTa on text by masked language modelling."),
    "glue": (GlueConfig, "lln.tasks.glue", "Fine-tune a pre-trained model on a GLUE task."),
    "vision": (VisionConfig, "lln.tasks.vision", "Train a ViT to classify pictures of dogs and cats."),
    "lra": (LraConfig, "lln.tasks.lra.train", "Train and test a small encoder on a task of the Long Range Arena."),
}


def add_command(name: str, config: type[TrainConfig], module: str, help: str) -> None:
    """A command that trains with a preset of `config`, changed by the flags that are given."""

    def command(
        preset: str, out: Path | None, data_dir: Path | None, quiet: bool, record: Path | None, **flags: Any
    ) -> None:
        settings = config.preset(preset, **changed(flags))
        train = import_module(module).train  # only now: it imports transformers, accelerate and datasets
        if record is None:
            train(settings, out=out, data_dir=data_dir, quiet=quiet)
            return
        from lln.results import add_result, check_writable
        from lln.tasks.run import run_folder, run_result

        check_writable(record)
        folder = out or run_folder(name, settings)
        train(settings, out=folder, data_dir=data_dir, quiet=quiet)
        add_result(record, run_result(folder, data_dir=data_dir))
        if not quiet:
            console.print(f"Recorded in {record}")

    to_record = typer.Option(help="Add what the finished run found to this result file, as results/table5.jsonl.")
    set_parameters(command, [*settings_parameters(config), parameter("record", Path | None, None, to_record)])
    app.command(name, help=inspect.cleandoc(help))(command)


for _name, (_config, _module, _help) in EXPERIMENTS.items():
    add_command(_name, _config, _module, _help)
