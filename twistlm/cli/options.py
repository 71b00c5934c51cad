"""Arguments and options that several commands share, and lists of words for their help."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import preset_names

PARENT = "A run folder, a checkpoint, a Hugging Face folder or hub id, or gguf:FILE."
ANY_MODEL = f"A ticket; {PARENT[0].lower()}{PARENT[1:]}"


def words(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


Preset = Annotated[
    str,
    typer.Argument(
        metavar="PRESET_OR_TOML", help=f"A TOML file, or a preset: {words(preset_names())}."
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
Parent = Annotated[str, typer.Argument(help=PARENT)]
Data = Annotated[str | None, typer.Option(help="Token file; default: the run's data.valid.")]
Tokens = Annotated[int, typer.Option(min=0, help="Use this many tokens; 0 takes all.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the numbers here too.")]


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write the numbers where `--json` was given."""
    if path is not None:
        from ..system.files import whole_file

        whole_file(path, json.dumps(record, indent=1) + "\n")


app = typer.Typer(
    name="twistlm",
    help="Train a language model once, deploy it at any size (TwIST).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
