"""What a person sees while twistlm works: one console, one kind of progress bar."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console()
errors = Console(stderr=True)


def progress(title: str, quiet: bool = False) -> Progress:
    """A bar with a free `note` field; silent ranks and tests pass `quiet`."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=quiet,
        transient=not console.is_terminal,
    )
