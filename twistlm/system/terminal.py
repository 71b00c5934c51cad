"""What a person sees while twistlm works: one console, one kind of progress bar."""

import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from rich import progress as bars
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

# a name or a model's text may hold codes that move the cursor or hide what was printed
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def clean(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return text.translate(_HARMLESS)


def markdown_text(text: str) -> str:
    """The text for markdown, in which HTML is text: names of runs and models are anybody's."""
    return clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(lines: Sequence[Sequence[Any]]) -> str:
    """Lines, the header first, as a table of words and then numbers."""
    ruled = [lines[0], ("---", *("---:",) * (len(lines[0]) - 1)), *lines[1:]]
    cells = [[markdown_text(str(cell)).replace("|", "\\|") for cell in line] for line in ruled]
    return "\n".join(f"| {' | '.join(line)} |".replace("\n", " ") for line in cells)


def markdown_code(text: str) -> str:
    """The text as code in a line of markdown: between more backticks than it has in a row."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{clean(text)}{space}{fence}"


class _Console(Console):
    """A console on which text is text."""

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(clean(text), **style)


EVERY = 30.0  # seconds between the lines of work whose bar nobody sees
ROOMY = 120  # characters: a pipe or a log file has no width of its own, and tables need room
console = _Console(markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else ROOMY)
# bars are for a person who waits: what is printed can be piped without them
waiting = _Console(stderr=True, markup=False, soft_wrap=True)


def table(title: str, *heads: str, words: int = 1) -> Table:
    """An empty table: first columns of words, then of numbers; narrow, it folds, cuts nothing."""
    made = Table(title=f"\n{title}", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    made.padding = (0, 0 if console.width < ROOMY else 1, 0, 0)
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i < words else "right", overflow="fold")
    return made


class _Bar(bars.Progress):
    """A progress bar with something of the caller's below it; in a log, a line now and then."""

    below: RenderableType | None = None
    told: float | None = None  # when lines were last printed; None: the bar is seen, or silent

    def update(self, task_id: bars.TaskID, **what: Any) -> None:
        super().update(task_id, **what)
        if self.told is None or time.monotonic() < self.told + EVERY:
            return
        self.told = time.monotonic()
        for task in self.tasks:
            if task.id == task_id or not task.finished:
                line = f"{task.description} {task.completed:.0f}/{task.total or 0:.0f}"
                line += f", {timedelta(seconds=round(task.elapsed or 0))}"
                if task.time_remaining is not None:
                    line += f" so far, {timedelta(seconds=round(task.time_remaining))} left"
                line += f", {task.fields['note']}" if task.fields["note"] else ""
                self.console.print(line, highlight=False)

    def advance(self, task_id: bars.TaskID, advance: float = 1) -> None:
        self.update(task_id, advance=advance)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below


def progress(quiet: bool = False, below: RenderableType | None = None) -> bars.Progress:
    """A bar whose tasks have a `note`; lines without a terminal. Silent ranks pass `quiet`."""
    bar = _Bar(
        bars.SpinnerColumn(),
        "{task.description}",
        bars.BarColumn(bar_width=30),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        "{task.fields[note]}",
        console=waiting,
        redirect_stdout=sys.stdout.isatty(),  # else prints of a pipe would go where the bar is
        disable=quiet or not waiting.is_terminal,  # a log wants no half-drawn bars
    )
    bar.below = below
    bar.told = None if quiet or waiting.is_terminal else time.monotonic()
    return bar
