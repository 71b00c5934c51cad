"""Arguments and options that several commands share, and lists of words for their help."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import Config, preset_names
from ..fields import WHOLE, words
from ..presets import build, overridden
from ..system.compat import check_transformers

PARENT = "A run folder, a checkpoint, a Hugging Face folder or hub id, or gguf:FILE."
ANY_MODEL = f"A ticket; {PARENT[0].lower()}{PARENT[1:]}"


def seed_of(what: str) -> Any:
    """The option `--seed` of a command that draws `what`."""
    return typer.Option(min=0, max=WHOLE, help=f"Seed of {what}.")


def draws_of(what: str, least: int = 1) -> Any:
    """The option `--n` of a command that draws `what`; over a million is a slip of the finger."""
    return typer.Option("--n", min=least, max=10**6, help=what)


def out_option(help: str) -> Any:
    """The option `--out`, `-o` of a command; a place that cannot be written is told at once."""
    return typer.Option("--out", "-o", help=help, callback=_writable)


def _writable(value: Path | None) -> Path | None:
    if value is not None:
        place = next(p for p in (value, *value.absolute().parents) if p.exists())
        if place != value and not place.is_dir():
            raise ValueError(f"{value} cannot be written: {place} is no folder")
        if not os.access(place, os.W_OK):
            raise ValueError(f"{value} cannot be written: no permission to write in {place}")
    return value


def with_requests(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer see an option for every field of a command's parameters that are dataclasses.

    A field is made by `fields.option`, or it is left to its default. The command gets the objects.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    plain: list[inspect.Parameter] = []
    requests: dict[str, Any] = {}
    for name, given in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            requests[name] = hints[name]
            plain += _options(hints[name])
        else:
            plain.append(given.replace(kind=given.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        made = {}
        for name, request in requests.items():
            mine = [f.name for f in dataclasses.fields(request) if f.metadata]
            values = {key: given.pop(key) for key in mine}
            several = {key: tuple(v) for key, v in values.items() if isinstance(v, list)}
            made[name] = request(**values | several)
        return command(**given, **made)

    run.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    run.__annotations__ = {given.name: given.annotation for given in plain}
    return run


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, or has its default."""
    return context.get_parameter_source(name).name == "COMMANDLINE"  # type: ignore[union-attr]


def _options(request: type) -> Iterator[inspect.Parameter]:
    """A parameter of a command for every field of a request that has a help text."""
    hints = typing.get_type_hints(request)
    for field in dataclasses.fields(request):
        if not (about := field.metadata):
            continue
        hint: Any = hints[field.name]
        default: Any = field.default
        if typing.get_origin(hint) is tuple:
            hint, default = list[typing.get_args(hint)[0]], list(default)  # type: ignore[misc]
        make = typer.Argument if about["argument"] else typer.Option
        names = about["names"] or ((f"--{field.name.replace('_', '-')}",) if hint is bool else ())
        said: dict[str, Any] = {"help": about["help"], "metavar": about["metavar"]}
        said |= {"min": about["range"].least, "max": about["range"].most}
        if "--out" in names:
            said["callback"] = _writable
        said["show_default"] = about["shown"] or not (default is False or default in (None, [], ""))
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(
            field.name,
            kind,
            annotation=Annotated[hint, make(*names, **said)],
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        )


Preset = Annotated[
    str,
    typer.Argument(
        metavar="PRESET_TOML_OR_RUN",
        help=f"A preset ({words(preset_names())}), a TOML file, or a run folder for its own "
        "config.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="Changes to the config (docs/config.md).",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest valid checkpoint.")]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help="Resume, or start where there is no checkpoint: for jobs that a scheduler restarts.",
    ),
]
Parent = Annotated[str, typer.Argument(help=PARENT)]
Data = Annotated[str | None, typer.Option(help="Token file; default: the run's data.valid.")]
Tokens = Annotated[int, typer.Option(min=0, help="Use this many tokens; 0 takes all.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens to write; default: 100, or what the model's positions leave."),
]
JsonOut = Annotated[
    Path | None, typer.Option("--json", help="Write the numbers here too.", callback=_writable)
]


def known(overrides: list[str] | None) -> list[str]:
    """The changes to a config; a wrong key or type is told before torch is imported."""
    build(Config, overridden({}, overrides or []))
    return overrides or []


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write the numbers where `--json` was given."""
    if path is not None:
        from ..system.files import whole_file

        whole_file(path, json.dumps(record, indent=1) + "\n")


app = typer.Typer(
    name="twistlm",
    help="Train a language model once, deploy it at any size (TwIST).",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

lab = typer.Typer(
    help="Measure a model of yours: compare, prune, time, lose nodes, draft.",
    no_args_is_help=True,
)

PANELS = {  # what a user wants -> the commands that do it, as `--help` shows them
    "Train": ("demo", "prepare", "train", "plan", "eval"),
    "Choose": ("extract", "heal", "play"),
    "Ship": ("export", "generate", "verify", "push"),
    "Measure": ("lab",),
    "Machines": ("node", "doctor"),
}


def sort_into_panels_(made: typer.Typer) -> None:
    """Sort the commands of `--help` into panels by what a user wants."""
    order = {name: (panel, i) for panel, names in PANELS.items() for i, name in enumerate(names)}

    def place(entry: Any) -> tuple[int, int]:
        entry.rich_help_panel, i = order[entry.name or entry.callback.__name__]
        return list(PANELS).index(entry.rich_help_panel), i

    made.registered_commands.sort(key=place)
    made.registered_groups.sort(key=place)


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
