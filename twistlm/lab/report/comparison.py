"""A folder of `twistlm compare` as a section: its own tables, and perplexity over the size."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ..compare import table
from ..page import draw
from ..page.section import Figure, Section, Table, number


def section(record: dict[str, Any]) -> Section | None:
    """`record` is compare.json; None while no cell is measured."""
    made = [table.ComparisonRow(**row | {"values": tuple(row["values"])}) for row in record["rows"]]
    made = [row for row in made if row.perplexity is not None]
    settings = dict.fromkeys(row.setting for row in made if row.setting)
    if not settings:
        return None
    first = "both" if "both" in settings else next(iter(settings))  # on the first screen
    tables: list[Table] = []
    figures: list[Figure] = []
    for setting in settings:
        head, *rows = table.summary(made, setting)
        tables.append(Table((setting, *head[1:]), tuple(rows)))
        figure = _figure(setting, [row for row in made if row.setting == setting])
        figures.insert(0 if setting == first else len(figures), figure)
    what = (
        f"Measured on {record['text']['n_tokens']:,} tokens. Seconds, calibration tokens, MB and decode speed belong to "
        "the smallest size of a line."
    )
    return Section(
        "compare",
        "Every rival in one table",
        what,
        tuple(tables),
        tuple(figures),
        headlines=_headlines(made, first),
        lead=True,
    )


def _headlines(rows: list[table.ComparisonRow], setting: str) -> tuple[str, ...]:
    """Per size the best two that are really smaller, and the best zeros."""
    said = []
    for ratio in dict.fromkeys(row.ratio for row in rows if row.setting == setting):
        mine = sorted(
            (row for row in rows if (row.setting, row.ratio) == (setting, ratio)),
            key=lambda row: row.perplexity or 0.0,
        )
        small = [f"{r.name} {r.shown()}" for r in mine if table.is_smaller(r.method)][:2]
        zeros = [f"{r.name} {r.shown()}" for r in mine if not table.is_smaller(r.method)][:1]
        line = [", then ".join(small)] if small else []
        line += [f"zeros, no smaller and no faster: {zeros[0]}"] if zeros else []
        said.append(f"{setting}, {ratio} of the blocks: {'; '.join(line)}.")
    return tuple(said)


def _figure(setting: str, rows: list[table.ComparisonRow]) -> Figure:
    series: dict[str, dict[float, float]] = {}
    for row in rows:
        assert row.perplexity is not None
        series.setdefault(row.name, {})[float(Fraction(row.ratio))] = row.perplexity
    zeros = [row.name for row in rows if not table.is_smaller(row.method)]
    least = min(share for values in series.values() for share in values)
    there = {name: values[least] for name, values in series.items() if least in values}
    small = {name: value for name, value in there.items() if name not in zeros} or there
    best = min(small, key=small.__getitem__)
    reading = f"At the smallest size {best} is lowest with {number(small[best])}" + (
        " of all that are really smaller; dashed: zeros, no smaller and no faster."
        if zeros
        else "."
    )
    style = draw.LineStyle(log=True, dashed=zeros)
    return Figure(
        f"compare-{setting}",
        f"Perplexity over the share that is kept, {setting}",
        reading,
        series,
        lambda axes: draw.lines(axes, series, x="share kept", y="perplexity", style=style),
        height=3.2 + 0.11 * len(series),
    )
