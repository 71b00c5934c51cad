"""What a person sees while twistlm works: one console, one kind of progress bar."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

# a pipe or a log file has no width of its own: give tables room
console = Console(markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def progress(quiet: bool = False) -> Progress:
    """A bar whose tasks have a free `note` field; silent ranks and tests pass `quiet`."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=quiet,
    )
