"""What the page shows, as HTML: tiles of numbers, tables, curves."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

CSS = """
html {scrollbar-gutter: stable}
.gradio-container {width: 100%; max-width: 1060px !important; margin: 0 auto !important}
.twist {padding: 0 !important}
.twist h2 {margin: 8px 0 2px !important; font-size: 26px}
.twist .faint {color: var(--body-text-color-subdued); font-size: 14px}
.twist .tiles {display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px; margin: 4px 0 10px}
.twist .tile {border: 1px solid var(--border-color-primary); border-radius: 12px; padding: 12px 14px;
  background: var(--background-fill-secondary); font-variant-numeric: tabular-nums}
.twist .tile b {display: block; font-size: 24px; line-height: 1.25; font-weight: 650}
.twist .bar {height: 5px; border-radius: 3px; background: var(--border-color-primary); margin: 8px 0 6px; overflow: hidden}
.twist .bar i {display: block; height: 100%; border-radius: 3px; background: var(--color-accent)}
.twist .bar i.over {background: var(--body-text-color-subdued)}
.twist table, .twist tr {border: 0 !important}
.twist table {border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: 0}
.twist td, .twist th {border: 0 !important; border-bottom: 1px solid var(--border-color-primary) !important;
  padding: 6px 10px !important; text-align: right; white-space: nowrap}
.twist th {font-weight: 500; color: var(--body-text-color-subdued)}
.twist td:first-child, .twist th:first-child {text-align: left}
.twist .plots {display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 16px; margin: 12px 0}
.twist svg {width: 100%; height: auto; max-width: 540px}
.twist .wide {overflow-x: auto}
.twist [role=alert] {border-left: 4px solid #d97706; padding: 8px 12px; margin: 6px 0}
@media (max-width: 480px) {.twist .tile {padding: 10px} .twist .tile b {font-size: 18px}}
#write, #stop {align-self: center}
footer {display: none !important}
"""


def numbers(found: dict[str, Any], about: dict[str, Any], size: int) -> str:
    """What the ticket costs and how good it is, each beside the whole model."""
    ticket, whole = found["ticket"], found["whole"]
    tiles = ""
    for name, key, unit in (
        ("parameters", "parameters", ""),
        ("weights", "bytes", " MB"),
        ("a decoded token", "ms", " ms"),
        ("perplexity", "perplexity", ""),
    ):
        if key == "perplexity" and about["no_text"]:
            continue
        values = [_value(key, each.get(key)) for each in (ticket, whole)]
        share = ticket[key] / whole[key] if key in ticket and key in whole else None
        tiles += _tile(name, values[0] + unit, f"whole model {values[1]}{unit}", share)
    said = [f"<b>ticket: {escape(about['sizes'][size - 1])}</b>"]
    said += [f"loads as a stock {about['family']} model"] if ticket["stock"] else []
    said += [f"of this size: {band}"] if (band := about["bands"][size - 1]) else []
    first, *more = said
    line = " · ".join([first, *map(escape, more)])
    return f'<div class="tiles">{tiles}</div><div class="faint">{line}</div>'


def _value(key: str, value: float | None) -> str:
    if value is None:
        return "…"
    if key == "parameters":
        return f"{value:,}"
    if key == "bytes":
        return f"{value / 1e6:,.{1 if value > 1e6 else 3}f}"
    return f"{value:.1f}" if key == "ms" else f"{value:.2f}"


def _tile(name: str, value: str, below: str, share: float | None) -> str:
    """A number in a box; the bar is its share, grey where it is more than all."""
    bar = ""
    if share is not None:
        over = ' class="over"' if share > 1 else ""
        bar = f'<div class="bar"><i{over} style="width:{100 * min(share, 1):.1f}%"></i></div>'
    return (
        f'<div class="tile"><span class="faint">{escape(name)}</span><b>{escape(value)}</b>{bar}'
        f'<span class="faint">{escape(below)}</span></div>'
    )


def sizes_table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """All sizes with what is known of them, and two curves."""
    known = {row["size"]: row for row in rows}
    lines = []
    for i, label in enumerate(about["sizes"], 1):
        row = known.get(i, {})
        cells = [label, f"{about['parameters'][i - 1]:,}"]
        cells += [
            f"{row['ms']:.1f}" if row else "",
            f"{row.get('perplexity', 0):.2f}" if "perplexity" in row else "",
        ]
        cells.append(about["bands"][i - 1])
        lines.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    head = "".join(
        f"<th>{name}</th>"
        for name in ("blocks", "parameters", "ms per token", "perplexity", "measured before")
    )
    table = f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
    drawn = ""
    good = [row for row in rows if "perplexity" in row]
    for key, name in (("parameters", "parameters"), ("ms", "ms per token")):
        drawn += _curve([(row[key], row["perplexity"]) for row in good], f"perplexity over {name}")
    return f'<div class="plots">{drawn}</div><div class="wide">{table}</div>'


def training_table(run: Path | None) -> str:
    """Loss, perplexities and who takes part in the training that a run folder tells of."""
    if run is None or not (run / "run.json").is_file():
        return '<p class="faint">This model is no run folder: there is no training to follow.</p>'
    config = json.loads((run / "run.json").read_text())["config"]
    rows = _lines(run / "metrics.jsonl")
    planned = config["train"]["rounds"] or "…"
    for resumed in _lines(run / "resumes.jsonl"):
        planned = resumed["changed"].get("train.rounds", (planned, planned))[1]
    done = rows[-1]["round"] if rows else 0
    share = done / planned if isinstance(planned, int) else None
    method, workers = config["train"]["method"], config["train"]["n_workers"]
    tiles = _tile(
        "training", f"{done:,} of {planned} rounds", f"{method}, {workers} workers", share
    )
    if rows:
        last = rows[-1]
        tiles += _tile("loss", f"{last['loss']:.3f}", f"lr {last['lr']:.2g}", None)
        speed = f"{last['n_tokens'] / last['seconds']:,.0f}"
        tiles += _tile("tokens per second", speed, f"{last['seconds']:.1f} s per round", None)
    events = [
        escape(" ".join(f"{k} {v}" for k, v in event.items() if k != "time"))
        for event in _lines(run / "events.jsonl")[-5:]
    ]
    marks = [row for row in rows if row.get("eval")]
    table = ""
    if marks:
        names = list(marks[-1]["eval"])
        head = "".join(f"<th>{escape(name)}</th>" for name in ("round", *names))
        body = ""
        for row in marks[-8:]:
            values = [row["eval"].get(n) for n in names]
            cells = [v if not isinstance(v, dict) else v["mean"] for v in values]
            body += f"<tr><td>{row['round']}</td>" + "".join(
                f"<td>{cell:.2f}</td>" if cell is not None else "<td></td>" for cell in cells
            )
        table = (
            f'<div class="wide"><span class="faint">perplexity by share of blocks that stay</span>'
            f"<table><tr>{head}</tr>{body}</table></div>"
        )
    drawn = _curve([(row["round"], row["loss"]) for row in rows], "loss over rounds")
    said = f'<div class="faint">{"<br>".join(events)}</div>' * bool(events)
    return f'<div class="tiles">{tiles}</div>{said}<div class="plots">{drawn}</div>{table}'


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that another process may be writing."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.strip()]


def _curve(points: list[tuple[float, float]], title: str) -> str:
    """A small drawing of y over x; nothing below two points."""
    if len(points) < 2:
        return ""
    if len(points) > 400:  # a long training
        points = points[:: len(points) // 400] + points[-1:]
    xs, ys = zip(*points, strict=True)
    wide, high = max(xs) - min(xs) or 1, max(ys) - min(ys) or 1

    def at(x: float, y: float) -> tuple[float, float]:
        return 64 + 430 * (x - min(xs)) / wide, 220 - 170 * (y - min(ys)) / high

    line = [at(x, y) for x, y in sorted(points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in line)
    words = 'font-size="13" fill="var(--body-text-color-subdued)"'
    grid = ""
    for share in (0, 0.5, 1):
        y = 220 - 170 * share
        grid += (
            f'<line x1="64" x2="494" y1="{y}" y2="{y}" stroke="var(--border-color-primary)"/>'
            f'<text x="56" y="{y + 4}" text-anchor="end" {words}>{_short(min(ys) + high * share)}</text>'
        )
    return (
        f'<svg viewBox="0 0 510 252" role="img" aria-label="{escape(title)}">'
        f'<text x="64" y="22" font-size="15" fill="var(--body-text-color)">{escape(title)}</text>{grid}'
        f'<polygon points="64,220 {path} 494,220" fill="var(--color-accent)" opacity="0.10"/>'
        f'<polyline points="{path}" fill="none" stroke="var(--color-accent)" stroke-width="2.5"/>'
        f'<g fill="var(--color-accent)">{dots if len(line) < 60 else ""}</g>'
        f'<text x="64" y="242" {words}>{_short(min(xs))}</text>'
        f'<text x="494" y="242" text-anchor="end" {words}>{_short(max(xs))}</text></svg>'
    )


def warning(text: str) -> str:
    return f'<p role="alert"><b>{escape(text)}</b></p>'


def title(about: dict[str, Any]) -> str:
    n = about["parameters"][-1]
    return (
        f"<h2>{escape(_name(about['source']))} and its tickets</h2>"
        f'<p class="faint">a {escape(about["family"])} model of {n:,} parameters; move the slider, and a smaller '
        "dense model is cut out of it</p>"
    )


def _name(source: str) -> str:
    parts = [part for part in Path(source).parts if part not in ("/", "checkpoints")]
    return "/".join(parts[-2:])


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
