"""Arguments and options that several commands share, and how a command is made of a function."""

import dataclasses
import functools
import inspect
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import Config, preset_names
from ..fields import VALID_TEXT, option, words
from ..presets import build, overridden
from ..system.compat import check_transformers
from ..system.terminal import console

PARENT = "A run folder, a checkpoint, a Hugging Face folder or hub id, or gguf:FILE."
ANY_MODEL = f"A ticket; {PARENT[0].lower()}{PARENT[1:]}"
MODEL = option(ANY_MODEL, argument=True)
SHARED = {  # options of several commands, by the parameter's name
    "preset": option(
        f"A preset ({words(preset_names())}), a TOML file, or a run folder for its own config.",
        metavar="PRESET_TOML_OR_RUN",
        argument=True,
    ),
    "overrides": option(
        "Changes to the config (docs/config.md).", None, metavar="SECTION.KEY=VALUE", argument=True
    ),
    "source": option(PARENT, argument=True),
    "data": option(VALID_TEXT, None),
    "device": option("auto, cpu, cuda or cuda:N.", "auto"),
    "json_out": option("Write the numbers here too.", None, "--json"),
    "max_new_tokens": option(
        "Tokens to write; default: 100, or what the model's positions leave.", None, least=1
    ),
}
PANELS = {  # what a user wants -> the commands that do it, as `--help` shows them
    "Train": ("shrink", "demo", "prepare", "train", "eval", "plan"),
    "Choose": ("extract", "heal", "play"),
    "Ship": ("generate", "verify", "export", "push"),
    "Machines": ("doctor", "node"),
    "Measure": ("lab",),
}


def writable(value: Path | None) -> Path | None:
    """A place that cannot be written is told at once."""
    if value is not None:
        place = next(p for p in (value, *value.absolute().parents) if p.exists())
        if place != value and not place.is_dir():
            raise ValueError(f"{value} cannot be written: {place} is no folder")
        if not os.access(place, os.W_OK):
            raise ValueError(f"{value} cannot be written: no permission to write in {place}")
    return value


def writable_file(value: Path | None) -> Path | None:
    """So is a folder, where numbers are to be written."""
    if value is not None and value.is_dir():
        raise ValueError(f"{value} is a folder: --json takes the name of a file")
    return writable(value)


def command(group: typer.Typer, *examples: str) -> Callable[..., Any]:
    """A command of a function, with examples below its help.

    A parameter is an option where `fields.option` is its default, or where it has none and is one
    of `SHARED`. Of a request every field with a help text is an option, and the function gets the
    object. A wrong key or type in `overrides` is told before torch is imported.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(function)
        options: list[inspect.Parameter] = []  # as typer sees them
        requests: dict[str, tuple[Any, list[str]]] = {}  # parameter -> its class, and its options
        for name, parameter in inspect.signature(function).parameters.items():
            if dataclasses.is_dataclass(hints[name]):
                kinds = typing.get_type_hints(hints[name])
                fields = [field for field in dataclasses.fields(hints[name]) if field.metadata]
                requests[name] = hints[name], [field.name for field in fields]
                options += [_parameter(field.name, kinds[field.name], field) for field in fields]
            else:
                is_shared = parameter.default is parameter.empty
                field = SHARED[name] if is_shared else parameter.default
                options.append(_parameter(name, hints[name], field))

        @functools.wraps(function)
        def run(**values: Any) -> Any:
            if "overrides" in values:
                values["overrides"] = values["overrides"] or []
                build(Config, overridden({}, values["overrides"], Config))
            for name, (request, keys) in requests.items():
                values[name] = request(**{key: values.pop(key) for key in keys})
            return function(**values)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        name = function.__name__.rstrip("_")  # `eval_`, for Python has an eval
        shown: dict[str, Any] = {"epilog": "\n\n".join(["Examples:", *examples])}
        if group is app:
            shown["rich_help_panel"] = next(p for p, names in PANELS.items() if name in names)
        group.command(name=name, **shown)(run)
        return function

    return register


def split_sources(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Models and changes to the config that were typed in one row."""
    overrides = [each for each in given if "=" in each and not Path(each).exists()]
    build(Config, overridden({}, overrides, Config))  # a wrong key is told before torch is imported
    if not (sources := [each for each in given if each not in overrides]):
        raise ValueError("give at least one parent or ticket")
    return sources, overrides


def _parameter(name: str, hint: Any, field: dataclasses.Field) -> inspect.Parameter:
    """What typer is told of a field."""
    about, default = field.metadata, typing.cast(Any, field.default)
    if typing.get_origin(hint) is tuple:
        hint, default = list[typing.get_args(hint)[0]], list(default)  # type: ignore[misc]
    make = typer.Argument if about["argument"] else typer.Option
    names = about["names"] or ((f"--{name.replace('_', '-')}",) if hint is bool else ())
    names = ("--out", "-o") if name == "out" else names
    said: dict[str, Any] = {"help": about["help"], "metavar": about["metavar"]}
    said |= {"min": about["range"].least, "max": about["range"].most}
    if "--out" in names or "--json" in names:
        said["callback"] = writable if "--out" in names else writable_file
    said["show_default"] = not (default is False or default in (None, [], ""))
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    made: Any = Annotated[hint, make(*names, **said)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=made, default=default)


def show(record: dict[str, Any], json_out: Path | None, *lines: Any) -> None:
    """Write the numbers where `--json` was given, and print tables and sentences about them."""
    if json_out is not None:
        from ..system import files, manifest

        files.whole_file(json_out, manifest.written(record))
    for line in lines:
        console.print(line)


app = typer.Typer(
    name="twistlm",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
lab = typer.Typer(
    help="Measure a model of yours: compare, prune, time, lose nodes, draft.", no_args_is_help=True
)
app.add_typer(lab, name="lab", rich_help_panel="Measure")


def _say_version(asked: bool) -> None:
    if asked:
        import twistlm

        typer.echo(f"twistlm {twistlm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Train a language model once, deploy it at any size (TwIST)."""
    if context.invoked_subcommand != "doctor" and "--help" not in sys.argv:
        check_transformers()
