"""What a page is made of: sections of tables, figures, readings and claims. Data, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """Cells are text; the first column names the row. `best` marks cells by (row, column)."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    note: str = ""
    small: frozenset[int] = frozenset()  # rows that stand beside, such as the paper's numbers
    names: int = 1  # first columns that are words


@dataclass(frozen=True)
class Figure:
    """`draw(axes)` paints it; `data` is what it shows, as JSON."""

    id: str
    title: str
    reading: str
    data: Any
    draw: Callable[[Any], None]
    height: float = 3.0  # inches; every figure is 5 wide


@dataclass(frozen=True)
class Claim:
    """A sentence that the numbers decide: True, False, or None where they say nothing."""

    says: str
    holds: bool | None
    because: str
    whose: str = "paper"


@dataclass(frozen=True)
class Section:
    """One table or figure of the paper, with our numbers."""

    id: str
    title: str
    what: str  # what is measured and how, in a sentence or two
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    headlines: tuple[str, ...] = ()  # sentences for the first screen
    lead: bool = field(default=False)  # its first figure stands on the first screen


def number(value: float | None, digits: int = 2) -> str:
    """A perplexity or a like number, as long as it is readable."""
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"


def count(n: float) -> str:
    """A number of tokens or parameters: `23,040`, `30.0M`, `1.2B`."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:,.1f}{unit}"
    return f"{n:,.0f}"


def spread(result: dict[str, Any]) -> str:
    """`mean ± sd`."""
    sd = result.get("sd")
    return number(result["mean"]) + ("" if sd is None else f" ± {number(sd)}")


def lowest(rows: list[list[float | None]]) -> frozenset[tuple[int, int]]:
    """The smallest number of every column, as (row, column)."""
    found = set()
    for column in range(len(rows[0]) if rows else 0):
        there = [(row[column], i) for i, row in enumerate(rows) if row[column] is not None]
        if len(there) > 1:
            found.add((min(there)[1], column))
    return frozenset(found)
