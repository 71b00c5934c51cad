"""What a person sees while twistlm works: one console, one kind of progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

ROOMY = 120  # characters: a pipe or a log file has no width of its own, and tables need room
console = Console(markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else ROOMY)


def table(title: str, *heads: str, words: int = 1) -> Table:
    """An empty table: the first columns are words, the others numbers; narrow, it folds and cuts nothing off."""
    gap = 0 if console.width < ROOMY else 1  # beside the one space between columns
    made = Table(
        title=f"\n{title}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, gap, 0, 0),
    )
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i < words else "right", overflow="fold")
    return made


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
