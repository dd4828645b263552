"""Options that several verbs have, and how their values are read."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from lln.tasks.config import Settings, parse_options

Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")]
Results = Annotated[Path, typer.Option(help="Folder with result files.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with data; left out, the environment variable LLN_DATA.")]
Json = Annotated[bool, typer.Option("--json", help="Print tables as lines of JSON.")]
Options = Annotated[
    list[str], typer.Option("--option", help="Option of the mechanism, as block_size=64; may be given several times.")
]


def numbers(option: str, text: str | None, default: Sequence[int]) -> list[int]:
    """Positive numbers separated by commas, in ascending order."""
    if text is None:
        return list(default)
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{option} takes positive numbers separated by commas, got {text!r}")
    return found


def names(option: str, text: str | None, default: Sequence[str]) -> list[str]:
    """Names separated by commas."""
    if text is None:
        return list(default)
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{option} takes names separated by commas, got {text!r}")
    return parts


def bench_command(context: typer.Context, *without: str) -> str:
    """The command of a measurement as one types it: all options that are not as by default, `without` some."""
    parts = ["lln", "bench", context.info_name or ""]
    for option in context.command.params:
        value = context.params[option.name or ""]
        if option.name in without or value == option.default or value in ([], ()):
            continue
        if option.param_type_name == "argument":
            parts.append(str(value))
        elif isinstance(value, (list, tuple)):
            parts += [x for one in value for x in (option.opts[0], str(one))]
        else:
            parts += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return " ".join(parts)


def parameter(name: str, kind: Any, default: Any, extra: Any) -> inspect.Parameter:
    annotation = Annotated[kind, extra]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def settings_parameters(settings: type[Settings]) -> list[inspect.Parameter]:
    """The flags of a command for settings: --preset, one for each field, --out, --data-dir, --quiet."""

    def flag(name: str, kind: Any, default: Any, help: str, *flags: str) -> inspect.Parameter:
        return parameter(name, kind, default, typer.Option(*flags, help=help, show_default=default is not None))

    kinds = get_type_hints(settings)
    found = [flag("preset", str, "laptop", f"Settings to start from: {', '.join(settings.PRESETS)}.")]
    for field in dataclasses.fields(settings):
        help = f"{field.metadata['help']} {_in_presets(settings, field)}".rstrip()
        if field.name == "options":
            found.append(flag("options", list[str], [], help, "--option"))
        elif kinds[field.name] == tuple[float, ...]:  # given again and again
            found.append(flag(field.name, list[float], [], help, field.metadata["flag"]))
        else:
            flags = [field.metadata["flag"]] if field.metadata.get("flag") else []
            found.append(flag(field.name, kinds[field.name] | None, None, help, *flags))
    return [
        *found,
        flag("out", Path | None, None, "The run folder; left out, one in runs/."),
        flag("data_dir", Path | None, None, "Folder with data; left out, the environment variable LLN_DATA."),
        flag("quiet", bool, False, "Print nothing.", "--quiet"),
    ]


def changed(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of settings that were given as flags."""
    changes = {field: value for field, value in flags.items() if value is not None and value != []}
    if "options" in changes:
        changes["options"] = parse_options(changes["options"])
    return {field: tuple(x) if isinstance(x, list) else x for field, x in changes.items()}


def set_parameters(command: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function that takes keywords the parameters that typer makes flags of."""
    command.__signature__ = inspect.Signature(list(parameters))
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _in_presets(settings: type[Settings], field: "dataclasses.Field[Any]") -> str:
    """The values that a field has in the presets, once if they are the same."""
    values: dict[str, Any] = {name: preset.get(field.name, field.default) for name, preset in settings.PRESETS.items()}
    if field.name == "options":
        for preset in values:
            usual = settings.PRESET_OPTIONS.get(preset, {})
            texts = [f"{name}: {', '.join(f'{x}={y}' for x, y in given.items())}" for name, given in usual.items()]
            values[preset] = "; ".join(texts) or None
    for preset, tasks in settings.TASK_PRESETS.items():
        found = [task.get(field.name, dataclasses.MISSING) for task in tasks.values()]
        if any(value is not dataclasses.MISSING for value in found):
            values[preset] = found[0] if len(set(map(str, found))) == 1 else "depends on the task"
    shown = {name: value for name, value in values.items() if value not in (None, dataclasses.MISSING)}
    shown = {
        name: " ".join(map(str, x)) if isinstance(x, tuple) else x for name, x in shown.items() if x not in ((), "")
    }
    if len(shown) == len(values) and len(set(map(str, shown.values()))) == 1:
        return f"({next(iter(shown.values()))})"
    return f"({', '.join(f'{name} {value}' for name, value in shown.items())})" if shown else ""
