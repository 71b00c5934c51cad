"""`twistlm report`: points and run folders in, one page out, with its figures and a part of a markdown file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from twistlm.lab.compare import table
from twistlm.lab.compare.cells import mean_share
from twistlm.system.files import whole_file

from .. import NAMES
from ..page import draw
from ..page.html import Chapter, page
from ..page.markdown import FIGURES, markdown, replace_part, shown_figures
from ..page.section import Figure, Section, Table, count, number
from ..run import module_of
from ..scales import SCALES
from . import training
from .load import Source, load

# what a reader wants first; the rest follows in the order of the table of experiments
ORDER = (
    "recipe",
    "table1",
    "stability",
    "robustness",
    "nodeloss",
    "shift",
    "table2",
    "latency",
    "memory",
    "parents",
)


def report(sources: Sequence[Path], out: Path, markdown_file: Path | None = None) -> list[Path]:
    """Write the page, STEM/ with PNG, SVG and JSON of every figure, and the markdown; returns all paths.

    The PNGs that the markdown shows lie in figures/ beside it: a repository keeps these two.
    """
    draw.need_matplotlib()
    chapters = [chapter(source) for source in load(sources)]
    files = out.with_suffix("")
    if files == out:
        raise ValueError(f"--out {out}: give a file such as report.html")
    files.mkdir(parents=True, exist_ok=True)
    drawings, written = {}, [out]
    for each in chapters:
        for figure in (f for s in each.sections for f in s.figures):
            name = f"{each.id}-{figure.id}"
            canvas, svg = draw.render(figure)
            drawings[name] = draw.inline(svg, figure.title)
            draw.save(canvas, files / name)
            (files / f"{name}.json").write_text(json.dumps(figure.data, indent=1) + "\n")
            written += [files / f"{name}{suffix}" for suffix in (".png", ".svg", ".json")]
    whole_file(out, page(chapters, drawings))
    if markdown_file is not None:
        pictures = markdown_file.parent / FIGURES
        pictures.mkdir(parents=True, exist_ok=True)
        for name in shown_figures(chapters):
            shutil.copyfile(files / f"{name}.png", pictures / f"{name}.png")
            written.append(pictures / f"{name}.png")
        old = markdown_file.read_text() if markdown_file.is_file() else ""
        whole_file(markdown_file, replace_part(old, markdown(chapters)))
        written.append(markdown_file)
    return written


def chapter(source: Source) -> Chapter:
    """The sections that a source has points for, and its training."""
    sections: list[Section] = []
    for name in sorted(NAMES, key=ORDER.index):
        wanted = {name, "latency"} if name == "table2" else {name}
        mine = [p for p in source.points if p["config"]["experiment"] in wanted]
        made = module_of(name).section(mine) if mine else None
        sections += [made] if made else []
    if source.comparison and (made := section(source.comparison)):
        sections.append(made)
    trained = training.section(source.trainings)
    sections += [trained] if trained else []
    if not sections:
        raise ValueError(f"{source.name} has no finished point and no finished round yet")
    plain = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-") or "runs"
    scales = dict.fromkeys(p["config"]["scale"] for p in source.points)
    title = "; ".join(SCALES[scale].title for scale in scales) or source.name
    if source.comparison and not scales:
        title = f"Comparison of {', '.join(source.comparison['parents'])}"
    facts = (*_facts(source), *_explained(sections))
    return Chapter(plain, title, facts, tuple(sections), _made_by(source))


def _facts(source: Source) -> tuple[str, ...]:
    facts = []
    scales = sorted({p["config"]["scale"] for p in source.points})
    runs = [t.run for t in source.trainings] + [p["run"] for p in source.points]
    if source.comparison:
        runs.append(source.comparison)
        names = ", ".join(source.comparison["parents"])
        facts.append(
            f"A comparison of the parents {names}, on {source.comparison['text']['n_tokens']:,} tokens."
        )
    if source.points:
        facts.append(
            f"{len(source.points)} points of scale {', '.join(scales)}, each a line of JSON."
        )
    if "smoke" in scales:
        facts.append(
            "Smoke is a tiny model for minutes on a CPU: it shows that every step works, not how good TwIST is."
        )
    begun = [t for t in source.trainings if t.rows]
    if begun:
        tokens = [sum(row["n_tokens"] for row in t.rows) for t in begun]
        low, high = count(min(tokens)), count(max(tokens))
        facts.append(
            f"{len(begun)} trained models, {f'{low} to {high}' if low != high else low} tokens each."
        )
        configs = [t.config for t in begun if t.config]
        if configs:
            facts.append(_model(configs[0]))
    unfinished = sum(t.n_rounds > t.rows[-1]["round"] for t in begun)
    if unfinished:
        facts.append(f"{unfinished} trainings are not finished yet.")
    devices = sorted({run["device"] for run in runs if "device" in run})
    commits = sorted({run["git"] for run in runs if "git" in run})
    facts.append(f"Device: {', '.join(devices)}. Commit: {', '.join(commits)}.")
    return tuple(facts)


def _model(cfg: dict[str, Any]) -> str:
    model, data = cfg["model"], cfg["data"]
    shape = ", ".join(
        f"{key} {value}"
        for key, value in model["config"].items()
        if isinstance(value, int) and "token" not in key
    )
    return (
        f"Model: {model['type']}{f' ({shape})' if shape else ''}; text: {'/'.join(Path(data['train']).parts[-2:])}, "
        f"sequences of {data['seq_len']} tokens; {cfg['train']['n_workers']} workers."
    )


def _made_by(source: Source) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Every training with its config, then every distinct way in which points were made."""
    found: list[tuple[str, dict[str, Any]]] = [
        (f"training {t.name}", t.run | {"config": t.config}) for t in source.trainings
    ]
    ways: dict[str, tuple[set[str], dict[str, Any]]] = {}
    for point in source.points:
        key = json.dumps(point["run"], sort_keys=True)
        ways.setdefault(key, (set(), point["run"]))[0].add(point["config"]["experiment"])
    if source.comparison:
        found.append(
            (
                "comparison",
                {k: source.comparison[k] for k in ("command", "git", "versions", "device")},
            )
        )
    found += [(f"points of {', '.join(sorted(names))}", run) for names, run in ways.values()]
    return tuple(found)


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
        mine = [row for row in made if row.setting == setting]
        drawn = [_figure(setting, mine), *_costs(setting, mine)]
        figures = drawn + figures if setting == first else figures + drawn
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
        said.append(f"{setting}, {table.size_name(ratio)} of the blocks: {'; '.join(line)}.")
    return tuple(said)


def _figure(setting: str, rows: list[table.ComparisonRow]) -> Figure:
    series: dict[str, dict[float, float]] = {}
    for row in rows:
        assert row.perplexity is not None
        series.setdefault(row.name, {})[float(mean_share(row.ratio))] = row.perplexity
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


def _costs(setting: str, rows: list[table.ComparisonRow]) -> list[Figure]:
    """The same perplexities over what a user pays: half of the blocks may still be most of a model."""
    zeros = [row.name for row in rows if not table.is_smaller(row.method)]
    figures = []
    for id_, title, x, cost in (
        ("parameters", "parameters", "million parameters", lambda row: (row.bytes or 0) / 4e6),
        ("time", "decoding time", "ms per token, as a share of the whole parent's", _time),
    ):
        series: dict[str, dict[float, float]] = {}
        for row in rows:
            if (at := cost(row)) and row.perplexity is not None:
                series.setdefault(row.name, {})[at] = row.perplexity
        if not series:  # nothing of the kind was measured
            continue
        least = min((at, name) for name, values in series.items() for at in values)
        style = draw.LineStyle(log=True, dashed=zeros)
        figures.append(
            Figure(
                f"compare-{setting}-{id_}",
                f"Perplexity over {title}, {setting}",
                f"The smallest here is {least[1]} at {number(least[0])} ({x}).",
                series,
                partial(draw.lines, series=series, x=x, y="perplexity", style=style),
                height=3.2 + 0.11 * len(series),
            )
        )
    return figures


def _time(row: table.ComparisonRow) -> float:
    return 1 / row.speedup if row.speedup else 0.0


WORDS = {  # as tables and legends have them -> what they mean
    "zeros": "“zeros”: single weights are set to 0 and the matrices keep their size, so that neither bytes nor time "
    "are saved without special kernels.",
    "start": "“start”: the model as it was when the compared trainings set out from it.",
}


def _explained(sections: list[Section]) -> tuple[str, ...]:
    """The words of our own that these sections use, explained before they first stand."""
    said = " ".join(
        str(part)
        for s in sections
        for part in (
            s.what,
            s.headlines,
            s.tables,
            [(f.title, f.reading, list(f.data)) for f in s.figures],
        )
    )
    return tuple(meaning for word, meaning in WORDS.items() if re.search(rf"\b{word}\b", said))
