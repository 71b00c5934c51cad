"""The page: one HTML file with everything in it, light and dark, for phones and desktops. No script."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .draw import GRID, INK, MUTED, SERIES
from .section import Claim, Figure, Section, Table

WHAT = (
    "TwIST trains a transformer as many small dense subnetworks: every round deals whole attention heads and "
    "FFN chunks to workers, which train them independently and are averaged back. In the end almost any random "
    "subnet should be a golden ticket: a smaller dense model that ships as it is, with no calibration and no "
    "fine-tuning. 6/12 means that six of twelve blocks stay in every layer that is cut: attn cuts attention heads, "
    "ffn cuts FFN chunks, both cuts both."
)
DARK = (
    "#a3adbb",
    "#f0a63a",
    "#6aa5ff",
    "#3ccfa4",
    "#b88bff",
    "#ff7a9c",
    "#4fc3d9",
    "#d3b04a",
    "#e58fd0",
)

STYLE = f"""
:root {{ color-scheme: light dark; --paper: #ffffff; --card: #f6f8fa; --ink: {INK}; --muted: {MUTED}; --grid: {GRID};
  --good: #12805c; --bad: #b3261e; --accent: {SERIES[2]}; --font: system-ui, -apple-system, "Segoe UI", sans-serif;
  {" ".join(f"--c{i}: {c};" for i, c in enumerate(SERIES))} }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #0f1318; --card: #171d25; --ink: #e8edf3; --muted: #9aa5b3;
  --grid: #303945; --good: #4fd1a1; --bad: #ff8a80; --accent: {DARK[2]};
  {" ".join(f"--c{i}: {c};" for i, c in enumerate(DARK))} }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 var(--font); }}
main, header {{ max-width: 1120px; margin: 0 auto; padding: 0 16px }}
header {{ padding-top: 28px }}
h1 {{ font-size: clamp(1.6rem, 5vw, 2.3rem); line-height: 1.15; margin: 0 0 10px }}
h2 {{ font-size: 1.45rem; margin: 52px 0 4px; padding-top: 14px; border-top: 3px solid var(--accent) }}
h3 {{ font-size: 1.15rem; margin: 34px 0 6px }}
p {{ max-width: 75ch; margin: 6px 0 12px }} a {{ color: var(--accent) }}
.muted, figcaption .reading, .note {{ color: var(--muted) }}
.first {{ display: grid; gap: 8px 24px; grid-template-columns: minmax(0, 1fr); align-items: start }}
.first h3 {{ margin-top: 12px }}
@media (min-width: 860px) {{ .first {{ grid-template-columns: minmax(0, 6fr) minmax(0, 5fr); grid-template-rows: auto 1fr }}
  .first figure {{ grid-column: 2; grid-row: 1 / 3 }} .facts {{ grid-column: 1 }} }}
.first ul {{ margin: 6px 0; padding-left: 20px }} .first li {{ margin: 5px 0 }}
.figures {{ display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); margin: 14px 0 }}
figure {{ margin: 0; padding: 12px; background: var(--card); border-radius: 10px; min-width: 0; max-width: 640px }}
figure svg {{ display: block; width: 100%; height: auto; overflow: visible }}
figure svg * {{ stroke-linejoin: round; stroke-linecap: butt }}
figcaption {{ font-size: .92rem; margin-bottom: 8px }} figcaption b {{ display: block }}
figcaption a {{ font-size: .8rem; white-space: nowrap }}
.scroll {{ overflow-x: auto; margin: 12px 0 }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }}
.note {{ font-size: .82rem; margin: -6px 0 12px; max-width: 110ch }}
th, td {{ padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap }}
th.word, td.word {{ text-align: left }} th {{ color: var(--muted); font-weight: 600; white-space: normal; vertical-align: bottom }}
td.word:first-child {{ white-space: normal; min-width: 7.5em }}
td.best {{ font-weight: 700; color: var(--accent) }}
tr.small td {{ font-size: .78rem; color: var(--muted); padding-top: 0 }}
.claims {{ list-style: none; padding: 0; max-width: 90ch }}
.claims li {{ padding: 8px 0 8px 74px; position: relative; border-bottom: 1px solid var(--grid) }}
.claims .mark {{ position: absolute; left: 0; top: 8px; font-weight: 700 }}
.holds .mark {{ color: var(--good) }} .fails .mark {{ color: var(--bad) }} .open .mark {{ color: var(--muted) }}
.claims span.why {{ display: block; color: var(--muted); font-size: .87rem; overflow-wrap: anywhere }}
nav {{ display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 18px 0; font-size: .92rem }}
pre {{ overflow-x: auto; background: var(--card); padding: 12px; border-radius: 8px; font-size: .8rem }}
code {{ overflow-wrap: anywhere }}
footer {{ max-width: 1120px; margin: 40px auto 24px; padding: 0 16px; color: var(--muted); font-size: .85rem }}
"""


@dataclass(frozen=True)
class Chapter:
    """One source on the page."""

    id: str
    title: str
    facts: tuple[str, ...]  # what was run, in short sentences
    sections: tuple[Section, ...]
    made_by: tuple[
        tuple[str, Mapping[str, Any]], ...
    ]  # name -> command, git, versions, device, config

    @property
    def claims(self) -> list[Claim]:
        return [claim for section in self.sections for claim in section.claims]


def page(chapters: Sequence[Chapter], drawings: Mapping[str, str]) -> str:
    """The whole file; `drawings` are SVG elements by `chapter.id + figure.id`."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>TwIST report</title><style>{STYLE}</style></head><body>",
        f"<header><h1>TwIST: train once, deploy at any size</h1><p>{escape(WHAT)}</p></header><main>",
    ]
    for chapter in chapters:
        parts.append(_chapter(chapter, drawings, alone=len(chapters) == 1))
    parts.append(
        "</main><footer>Written by <code>twistlm report</code>. Every number is measured unless "
    )
    parts.append("it is called the paper's or a formula's.</footer></body></html>\n")
    return "".join(parts)


def _chapter(chapter: Chapter, drawings: Mapping[str, str], alone: bool) -> str:
    at = chapter.id
    head = "" if alone else f'<h2 id="{at}">{escape(chapter.title)}</h2>'
    lead = next((s.figures[0] for s in chapter.sections if s.lead and s.figures), None)
    said = [line for section in chapter.sections for line in section.headlines]
    claims = [claim for claim in chapter.claims if claim.holds is not None]
    n_hold = sum(claim.holds is True for claim in claims if claim.whose == "paper")
    n_paper = sum(claim.whose == "paper" for claim in claims)
    if n_paper:
        said.append(f"{n_hold} of {n_paper} statements of the paper hold here.")
    first = ['<div class="first">']
    if said:
        lines = "".join(f"<li>{escape(line)}</li>" for line in said)
        first.append(
            f'<div class="won"><h3>What won (perplexity, lower is better)</h3><ul>{lines}</ul></div>'
        )
    if lead is not None:
        first.append(_figure(lead, at, drawings))
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in chapter.facts)
    first.append(f'<div class="facts"><h3>What was measured</h3><ul>{facts}</ul></div></div>')
    links = [f'<a href="#{at}-about-{s.id}">{escape(s.title)}</a>' for s in chapter.sections]
    if claims:
        links.insert(0, f'<a href="#{at}-claims">Which claims hold</a>')
    links.append(f'<a href="#{at}-run">What was run</a>')
    nav = f"<nav>{''.join(links)}</nav>"
    body = [_section(s, at, drawings, None if lead is None else lead.id) for s in chapter.sections]
    return "".join([head, *first, nav, _claims(claims, at), *body, _made_by(chapter)])


def _section(section: Section, at: str, drawings: Mapping[str, str], shown: str | None) -> str:
    figures = [_figure(f, at, drawings) for f in section.figures if f.id != shown]
    parts = [
        f'<h3 id="{at}-about-{section.id}">{escape(section.title)}</h3><p>{escape(section.what)}</p>'
    ]
    if figures:
        parts.append(f'<div class="figures">{"".join(figures)}</div>')
    parts += [_table(table) for table in section.tables]
    return "".join(parts)


def _figure(figure: Figure, at: str, drawings: Mapping[str, str]) -> str:
    data = base64.b64encode(json.dumps(figure.data).encode()).decode()
    name = f"{at}-{figure.id}"
    link = f'<a download="{name}.json" href="data:application/json;base64,{data}">data (JSON)</a>'
    caption = (
        f"<figcaption><b>{escape(figure.title)}</b>"
        f'<span class="reading">{escape(figure.reading)}</span> {link}</figcaption>'
    )
    return f'<figure id="{name}">{caption}{drawings[name]}</figure>'


def _table(table: Table) -> str:
    def kind(column: int) -> str:
        return ' class="word"' if column < table.names else ""

    head = "".join(
        f'<th scope="col"{kind(i)}>{escape(text)}</th>' for i, text in enumerate(table.head)
    )
    rows = []
    for i, row in enumerate(table.rows):
        cells = []
        for j, text in enumerate(row):
            best = ' class="best"' if (i, j) in table.best else kind(j)
            cells.append(f"<td{best}>{escape(text)}</td>")
        small = ' class="small"' if i in table.small else ""
        rows.append(f"<tr{small}>{''.join(cells)}</tr>")
    # outside of the table: a wide one scrolls, and its note would with it
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _claims(claims: Sequence[Claim], at: str) -> str:
    if not claims:
        return ""
    parts = [f'<h3 id="{at}-claims">Which claims hold here</h3>']
    for whose, title in (("paper", "Of the paper"), ("ours", "Our own questions")):
        mine = [claim for claim in claims if claim.whose == whose]
        if not mine:
            continue
        parts.append(
            f'<p class="muted">{title}, decided by the numbers on this page:</p><ul class="claims">'
        )
        for claim in mine:
            mark, word = ("holds", "✓ holds") if claim.holds else ("fails", "✗ no")
            parts.append(
                f'<li class="{mark}"><span class="mark">{word}</span>{escape(claim.says)}'
                f'<span class="why">{escape(claim.because)}</span></li>'
            )
        parts.append("</ul>")
    return "".join(parts)


def _made_by(chapter: Chapter) -> str:
    """Every command with its code and machine, what came of it, and the configs."""
    ways: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for name, run in chapter.made_by:
        versions = ", ".join(f"{k} {v}" for k, v in run.get("versions", {}).items())
        way = (
            f"<code>{escape(str(run.get('command', '')))}</code><br>"
            f'<span class="muted">commit {escape(str(run.get("git", "unknown")))}, '
            f"{escape(str(run.get('device', '')))}; {escape(versions)}</span>"
        )
        ways.setdefault(way, []).append((name, run))
    parts = [f'<h3 id="{chapter.id}-run">What was run</h3>']
    for way, made in ways.items():
        parts.append(f"<p>{way}</p><ul>")
        for name, run in made:
            text = escape(json.dumps(run.get("config"), indent=1))
            more = f"<details><summary>{escape(name)}</summary><pre>{text}</pre></details>"
            parts.append(f"<li>{more if run.get('config') else escape(name)}</li>")
        parts.append("</ul>")
    return "".join(parts)
