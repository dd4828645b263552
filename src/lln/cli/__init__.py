"""The `lln` command: one file for each group of verbs, every verb a few lines around one function of the library."""

import os
import sys
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup

    from lln.terminal import console, errors, print_error
except ModuleNotFoundError as error:
    raise SystemExit(f'The lln command needs {error.name}: pip install "lln-attention[cli]"') from error

from lln.cli import bench, docs, general, linearize, lra, paper, train
from lln.tasks.schedule import stop_with_scheduler


class Verbs(TyperGroup):
    """Runs a verb. An interrupt or a mistake of the user ends it with a message instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            errors.print("\nInterrupted; what was finished is written.")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # typer ends quietly when nothing reads the output any more
        except (ValueError, ImportError, OSError) as error:
            print_error(error)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Verbs,
    help="Linear Log-Normal attention: run it, measure it, inspect models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
general.add_commands(app)
linearize.add_command(app)
app.add_typer(train.app, name="train")
paper.add_commands(app)
app.add_typer(bench.app, name="bench")
app.add_typer(lra.app, name="lra")
docs.add_commands(app)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        console.print(f"lln-attention {installed('lln-attention')}")
        raise typer.Exit


def main() -> None:
    """Run the command."""
    stop_with_scheduler()
    if not sys.stderr.isatty():  # before transformers and datasets are imported, whose bars are for terminals, too
        for library in ("HUB", "DATASETS"):
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    app()
