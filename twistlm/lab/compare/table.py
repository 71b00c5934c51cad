"""A comparison as one table: for the terminal, and as CSV, Markdown and JSON in files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from ...system import terminal
from ...system.files import whole_file
from ...system.provenance import describe_run
from .cells import (
    DECODE,
    NESTED,
    NESTED_HEALED,
    RANDOM,
    SCRATCH,
    WHOLE,
    ZEROS,
    Cell,
    Sweep,
    mean_share,
)

Lines = list[tuple[str, ...]]  # the header first
FILES = ("compare.csv", "compare.md", "compare.json")
OWN = (RANDOM, NESTED, NESTED_HEALED)  # tickets as a parent gives them: rows go by its name
LEGEND = """\
Scale: the activation scale of tickets, with `+ mean` where biases make up for absent blocks; the
best of some, chosen on other text (`chosen_on` in compare.json). Seconds: after training, for one
ticket. Tokens: those that were read to prune. MB: the weights on disk in float32. Decode: measured
speed on the CPU (the fastest token) against the whole parent, of tickets by their shapes, of single
zeros once, where there are most.
"""


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

    def costs(self) -> tuple[str, ...]:
        """Seconds, tokens, MB and speed."""
        if self.perplexity is None or self.bytes is None:
            return ("",) * 4
        decode = "" if self.speedup is None else f"{self.speedup:.2f}x"
        spent = "" if self.method == WHOLE else f"{self.seconds:.3g}"
        return spent, f"{self.calibration_tokens:,}", f"{self.bytes / 1e6:,.1f}", decode


def is_smaller(method: str) -> bool:
    """Whether whole blocks go, and with them bytes and time; else single weights become zeros."""
    return method in OWN or ":" in method or method.startswith(SCRATCH)


def rows(measured: list[tuple[Cell, dict[str, Any]]]) -> list[ComparisonRow]:
    """A row for every cell but the speeds, in order; the result of an unfinished one is empty."""
    speeds = {(c.what, c.setting, c.ratio): r.get("speedup") for c, r in measured}
    zeros = next((r.get("speedup") for c, r in measured if c.what == ZEROS), None)
    several = len({c.parent.label for c, _ in measured if c.is_pruned and c.what not in OWN}) > 1
    made = []
    for cell, result in measured:
        what = cell.what
        if what in (DECODE, ZEROS):
            continue
        speed = speeds.get((DECODE, cell.setting, cell.ratio)) if is_smaller(what) else zeros
        by_parent = several and cell.is_pruned and what not in OWN
        made.append(
            ComparisonRow(
                setting=cell.setting or "",
                ratio=cell.ratio,
                parent=cell.parent.label,
                method=f"{what} ({cell.parent.label})" if by_parent else what,
                repair=cell.repair or "",
                perplexity=result.get("mean"),
                sd=result.get("sd"),
                n=result.get("n"),
                seconds=result.get("seconds"),
                calibration_tokens=result.get("calibration_tokens"),
                bytes=result.get("bytes"),
                speedup=1.0 if what == WHOLE else speed,
                values=tuple(result.get("values", ())),
                scale=result.get("treatment", {}).get("chosen", ""),
            )
        )
    return made


def title(sweep: Sweep, setting: Any) -> str:
    """What stands above the table of one setting."""
    n_tokens = sweep.text.n_sequences * sweep.text.seq_len
    spread = f" (random: mean ± sd of {sweep.n})" if sweep.n > 1 else ""
    least = size_name(min(sweep.ratios_in(setting), key=mean_share))
    return f"{setting}: perplexity on {n_tokens:,} tokens{spread}; costs at {least}"


def summary(made: list[ComparisonRow], setting: str) -> Lines:
    """One setting: a line per row, perplexity at every ratio, and costs at its smallest one."""
    mine = [row for row in made if row.setting == setting]
    ratios = list(dict.fromkeys(row.ratio for row in mine))
    heads = (size_name(ratio) for ratio in ratios)
    lines: Lines = [("", "whole", *heads, "scale", "seconds", "tokens", "MB", "decode")]
    for row in (row for row in made if row.method == WHOLE):
        lines.append((row.parent, row.shown(), *("",) * len(ratios), "", *row.costs()))
    for name in dict.fromkeys(row.name for row in mine):
        by_ratio = {row.ratio: row for row in mine if row.name == name}
        shown = (by_ratio[ratio].shown() if ratio in by_ratio else "" for ratio in ratios)
        chosen = by_size([by_ratio[ratio].scale for ratio in ratios if ratio in by_ratio])
        least = min(by_ratio, key=mean_share)  # of a stopped comparison not the smallest of all
        lines.append((name, "", *shown, chosen, *by_ratio[least].costs()))
    return lines


def size_name(ratio: str) -> str:
    """A size as `attn=2/3 ffn=6/12`, where a narrow column may break between the kinds."""
    return ratio.replace(",", " ")


def by_size(scales: list[str]) -> str:
    """One scale for all sizes, or one after the other in their order."""
    return scales[0] if len(set(scales)) == 1 else "; ".join(scale or "?" for scale in scales)


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
    """A table in which names of parents are text."""
    ruled = [lines[0], ("---", *("---:",) * (len(lines[0]) - 1)), *lines[1:]]
    return "\n".join("| " + " | ".join(map(terminal.markdown_cell, line)) + " |" for line in ruled)


def write(
    folder: Path, made: list[ComparisonRow], summaries: dict[str, Lines], record: dict[str, Any]
) -> None:
    """The rows as CSV, the summaries and all rows as Markdown, everything as JSON."""
    run, lines = describe_run(), everything(made)
    as_csv = io.StringIO()
    csv.writer(as_csv, lineterminator="\n").writerows(lines)
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    parts = ["# Comparison"]
    parts += [f"## {title}\n\n{to_markdown(shown)}" for title, shown in summaries.items()]
    parts += [LEGEND, f"## All rows\n\n{to_markdown(lines)}"]
    command = terminal.markdown_code(run["command"])
    parts.append(f"{command}, twistlm {run['git']}, {run['device']}, {versions}\n")
    as_json = json.dumps({"rows": [asdict(row) for row in made], **record, **run}, indent=1)
    texts = (as_csv.getvalue(), "\n\n".join(parts), as_json + "\n")
    for name, content in zip(FILES, texts, strict=True):
        whole_file(folder / name, content)


def _number(value: float) -> str:
    if value < 1e3:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.2e}"
