"""A comparison as one table: for the terminal, as CSV, Markdown and JSON, from the points on disk."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.table import Table

from ...system import terminal
from ..points import Points
from .cells import NESTED, NESTED_HEALED, SCRATCH, Cell, mean_share

Lines = list[tuple[str, ...]]  # the header first
OWN = ("random", NESTED, NESTED_HEALED)  # tickets as a parent gives them: rows go by its name


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One cell with all that it cost; None: not measured yet."""

    setting: str
    ratio: str
    parent: str
    method: str
    repair: str
    perplexity: float | None
    sd: float | None  # of n random tickets
    n: int | None
    seconds: float | None  # after training, per ticket
    calibration_tokens: int | None
    bytes: int | None  # of the weights on disk, float32
    speedup: float | None  # decoding on the CPU, against the whole parent
    values: tuple[float, ...] = ()
    scale: str = ""  # of tickets: what was chosen on other text

    @property
    def name(self) -> str:
        """How tables call it: a ticket by its parent, a pruned model by its method."""
        what = f"{self.parent}, {self.method}" if self.method in OWN else self.method
        return what + (f" + {self.repair}" if self.repair else "")

    def shown(self) -> str:
        """Perplexity, with the spread of random tickets."""
        if self.perplexity is None:
            return ""
        return _number(self.perplexity) + (f" ± {_number(self.sd)}" if self.sd is not None else "")


def is_smaller(method: str) -> bool:
    """Whether whole blocks go, and with them bytes and time; else single weights become zeros."""
    return method in OWN or ":" in method or method.startswith(SCRATCH)


def rows(cells: list[Cell], points: Points) -> list[ComparisonRow]:
    """What is measured so far, in the order of the cells."""
    zeros = next((_found(c, points) for c in cells if c.what == "zeros"), {}).get("speedup")
    decode = {
        (c.setting, c.ratio): _found(c, points).get("speedup") for c in cells if c.what == "decode"
    }
    several = len({c.rival.label for c in cells if c.is_pruned and c.what not in OWN})
    made = []
    for cell in cells:
        if cell.what in ("decode", "zeros"):
            continue
        found = _found(cell, points)
        speedup = decode.get((cell.setting, cell.ratio)) if is_smaller(cell.what) else zeros
        method = cell.what
        if several > 1 and cell.is_pruned and cell.what not in OWN:
            method += f" ({cell.rival.label})"
        made.append(
            ComparisonRow(
                setting=cell.setting or "",
                ratio=cell.ratio or "",
                parent=cell.rival.label,
                method=method,
                repair=cell.repair or "",
                scale=found.get("treatment", {}).get("chosen", ""),
                perplexity=found.get("mean"),
                sd=found.get("sd"),
                n=found.get("n"),
                seconds=found.get("seconds"),
                calibration_tokens=found.get("calibration_tokens"),
                bytes=found.get("bytes"),
                speedup=1.0 if cell.what == "whole" else speedup,
                values=tuple(found.get("values", ())),
            )
        )
    return made


def _found(cell: Cell, points: Points) -> dict[str, Any]:
    return cell.find(points) or {}


def summary(made: list[ComparisonRow], setting: str) -> Lines:
    """One setting: a line per rival, perplexity at every ratio, and costs at its smallest one."""
    mine = [row for row in made if row.setting == setting]
    ratios = list(dict.fromkeys(row.ratio for row in mine))
    heads = (size_name(ratio) for ratio in ratios)
    lines: Lines = [("", "whole", *heads, "scale", "seconds", "tokens", "MB", "decode")]
    for row in (row for row in made if row.method == "whole"):
        blank = ("",) * len(ratios)
        lines.append((row.parent, row.shown(), *blank, "", *_costs(row)))
    for name in dict.fromkeys(row.name for row in mine):
        by_ratio = {row.ratio: row for row in mine if row.name == name}
        shown = (by_ratio[ratio].shown() if ratio in by_ratio else "" for ratio in ratios)
        chosen = by_size([by_ratio[ratio].scale for ratio in ratios if ratio in by_ratio])
        least = min(by_ratio, key=mean_share)  # of a stopped comparison not the smallest of all
        lines.append((name, "", *shown, chosen, *_costs(by_ratio[least])))
    return unless_blank(lines, "scale")


def size_name(ratio: str) -> str:
    """How tables call a size: `attn=2/3 ffn=6/12`, where a narrow column may break between the kinds."""
    return ratio.replace(",", " ")


def unless_blank(lines: Lines, column: str) -> Lines:
    """Without a column that says nothing: points of earlier versions have no scale."""
    at = lines[0].index(column)
    if any(line[at] for line in lines[1:]):
        return lines
    return [line[:at] + line[at + 1 :] for line in lines]


def by_size(scales: list[str]) -> str:
    """One scale for all sizes, or one after the other in their order."""
    return scales[0] if len(set(scales)) == 1 else "; ".join(scale or "?" for scale in scales)


def _costs(row: ComparisonRow) -> tuple[str, ...]:
    if row.perplexity is None:
        return ("",) * 4
    assert row.seconds is not None
    assert row.bytes is not None
    decode = "" if row.speedup is None else f"{row.speedup:.2f}x"
    spent = "" if row.method == "whole" else f"{row.seconds:.3g}"
    return spent, f"{row.calibration_tokens:,}", f"{row.bytes / 1e6:,.1f}", decode


def everything(made: list[ComparisonRow]) -> Lines:
    """Every row with every column, numbers as they are."""
    names = [field.name for field in fields(ComparisonRow) if field.name != "values"]
    cells = [tuple(getattr(row, name) for name in names) for row in made]
    lines: Lines = [tuple(names)]
    return lines + [tuple("" if v is None else str(v) for v in cell) for cell in cells]


def to_rich(lines: Lines, title: str) -> Table:
    """For the terminal: a narrow one folds names and spreads, no number loses a digit."""
    result = terminal.table(title, *lines[0])
    result.padding = 0  # ten columns in 80 characters
    for line in lines[1:]:
        result.add_row(*line)
    return result


def to_markdown(lines: Lines) -> str:
    ruled = [lines[0], ("---", *("---:",) * (len(lines[0]) - 1)), *lines[1:]]
    return "\n".join("| " + " | ".join(map(terminal.markdown_cell, line)) + " |" for line in ruled)


def to_csv(lines: Lines) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def to_dict(made: list[ComparisonRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in made]


def _number(value: float) -> str:
    if value < 1e3:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.2e}"
