"""`twistlm lab compare`: fill the cells that are missing, write the table.

FOLDER/
  points.jsonl   a line per cell: a stopped comparison goes on from here
  compare.csv    a row per parent, method, setting and ratio, all numbers
  compare.md     a table per setting
"""

import csv
import io
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ...system import terminal
from ...system.files import whole_file
from ...system.provenance import describe_run
from ..points import Points
from . import CompareRequest
from .cells import OWN, WHOLE, Cell
from .measure import Comparison

Lines = list[tuple[str, ...]]  # the header first
Row = dict[str, Any]  # a cell with all that it cost; None: not measured yet
FILES = ("compare.csv", "compare.md")
LEGEND = """\
Scale: the activation scale of tickets, with `+ mean` where biases make up for absent blocks; the
best of some, chosen on other text (`chosen_on` in points.jsonl). Seconds: to choose
blocks or to prune. Tokens: read for that. MB: the weights on disk in float32.
"""


def compare(
    request: CompareRequest, out: Path, device: str = "auto", overrides: Sequence[str] = ()
) -> list[Table]:
    """Measure what is missing and write the table to `out`; returns it for the terminal.

    `out` is a folder, or a file of points FILE.jsonl with the table in FILE/.
    """
    points = Points(out)
    folder, healing = points.folder, points.folder / "healing"
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not points.file.is_file() and not is_free:
        raise ValueError(f"--out {folder} exists and is no comparison: choose another folder")
    asked = Comparison(request, device, overrides, healing)
    cells = asked.cells()
    cut = [s for s in asked.settings if any(cell.setting == s for cell in cells)]
    if not cut:
        raise ValueError(
            f"nothing to compare in --settings {request.settings}: no method, and no parent that "
            f"was trained so shows random tickets (--n {request.n})"
        )
    try:
        with terminal.progress() as bar:
            task = bar.add_task("compare", total=len(cells), note="")
            for cell in cells:
                bar.update(task, note=str(cell))
                note = partial(bar.update, task)
                points.measure(asked.config(cell), partial(asked.measure, cell, note))
                bar.advance(task)
        with suppress(OSError):  # unfinished sizes lie there
            healing.rmdir()
    finally:  # what is there is shown, whatever stopped the rest
        rows = [row_of(cell, points.find(asked.config(cell))) for cell in cells]
        spread = f" (random: mean ± sd of {asked.n})" if asked.n > 1 else ""
        what = f"perplexity on {asked.text.n_tokens:,} tokens{spread}"
        what += f"; costs at {_head(asked.ratios[-1])}"
        summaries = {f"{setting}: {what}": summary(rows, setting) for setting in cut}
        write(folder, rows, summaries)
    shown = []
    for title, (heads, *lines) in summaries.items():
        shown.append(terminal.table(title, *heads))
        shown[-1].padding = 0  # nine columns in 80 characters: names fold, no number loses a digit
        for line in lines:
            shown[-1].add_row(*line)
    return shown


def row_of(cell: Cell, point: Row | None) -> Row:
    """A cell and its point, if it is finished."""
    result = point["result"] if point else {}
    row: Row = {"setting": cell.setting or "", "ratio": cell.ratio, "parent": cell.parent.label}
    row |= {"method": cell.what, "perplexity": result.get("mean")}
    row |= {key: result.get(key) for key in ("sd", "n", "seconds", "calibration_tokens", "bytes")}
    return row | {"scale": result.get("treatment", {}).get("chosen", "")}


def summary(rows: list[Row], setting: str) -> Lines:
    """One setting: a line per row, perplexity at every ratio, and costs at the last."""
    mine = [row for row in rows if row["setting"] == setting]
    ratios = list(dict.fromkeys(row["ratio"] for row in mine))
    lines: Lines = [("", "whole", *map(_head, ratios), "scale", "seconds", "tokens", "MB")]
    for row in (row for row in rows if row["method"] == WHOLE):
        lines.append((row["parent"], _shown(row), *("",) * len(ratios), "", *_costs(row)))
    for name in dict.fromkeys(map(_name, mine)):
        by_ratio = {row["ratio"]: row for row in mine if _name(row) == name}
        shown = map(_shown, by_ratio.values())  # every row has all ratios
        chosen = by_size([row["scale"] for row in by_ratio.values()])
        lines.append((name, "", *shown, chosen, *_costs(by_ratio[ratios[-1]])))
    return lines


def _head(ratio: str) -> str:
    """A size as `attn=2/3 ffn=6/12`, where a narrow column may break between the kinds."""
    return ratio.replace(",", " ")


def _name(row: Row) -> str:
    """How tables call it: a ticket by its parent, a pruned model by its method."""
    return f"{row['parent']}, {row['method']}" if row["method"] in OWN else row["method"]


def _shown(row: Row) -> str:
    """Perplexity, with the spread of random tickets."""
    return " ± ".join(number(row[key]) for key in ("perplexity", "sd") if row[key] is not None)


def _costs(row: Row) -> tuple[str, ...]:
    if row["perplexity"] is None:
        return ("",) * 3
    spent = "" if row["method"] == WHOLE else f"{row['seconds']:.3g}"
    return spent, f"{row['calibration_tokens']:,}", f"{row['bytes'] / 1e6:,.1f}"


def by_size(scales: list[str]) -> str:
    """One scale for all sizes, or one after the other in their order."""
    return scales[0] if len(set(scales)) == 1 else "; ".join(scale or "?" for scale in scales)


def number(value: float | None, digits: int = 2) -> str:
    """A perplexity or a like number; none of a thousand or more needs decimals."""
    if value is None or value < 1e3:
        return "" if value is None else f"{value:.{digits}f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.2e}"


def write(folder: Path, rows: list[Row], summaries: dict[str, Lines]) -> None:
    run, as_csv = describe_run(), io.StringIO()
    lines = csv.DictWriter(as_csv, list(rows[0]), lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    parts = ["# Comparison"]
    for title, shown in summaries.items():
        parts.append(f"## {title}\n\n{terminal.markdown_table(shown)}")
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    command = terminal.markdown_code(run["command"])
    parts += [LEGEND, f"{command}, twistlm {run['git']}, {run['device']}, {versions}\n"]
    for name, content in zip(FILES, (as_csv.getvalue(), "\n\n".join(parts)), strict=True):
        whole_file(folder / name, content)
