"""What a person sees while twistlm works: one console, one kind of progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
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


class _Bar(Progress):
    """A progress bar with something of the caller's below it."""

    below: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below


def progress(quiet: bool = False, below: RenderableType | None = None) -> Progress:
    """A bar whose tasks have a free `note` field; silent ranks and tests pass `quiet`."""
    bar = _Bar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=quiet,
    )
    bar.below = below
    return bar
