"""What the page shows, as HTML and as rows of its tables and plots."""

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
.twist .tiles {display: grid; gap: 12px; margin: 4px 0 10px;
  grid-template-columns: repeat(auto-fit, minmax(130px, 1fr))}
.twist .tile {border: 1px solid var(--border-color-primary); border-radius: 12px;
  padding: 12px 14px; background: var(--background-fill-secondary);
  font-variant-numeric: tabular-nums}
.twist .tile b {display: block; font-size: 24px; line-height: 1.4; font-weight: 650}
.twist [role=alert] {border-left: 4px solid #d97706; padding: 8px 12px; margin: 6px 0}
@media (max-width: 480px) {.twist .tile {padding: 10px} .twist .tile b {font-size: 18px}}
#write, #stop {align-self: center}
footer {display: none !important}
"""
NUMBERS = {
    "bytes": "weights",
    "ms": "time per token",
    "perplexity": "perplexity (less is better)",
}
SIZE_COLUMNS = ["blocks", "parameters", "time per token", "perplexity", "measured in training"]


def title(about: dict[str, Any]) -> str:
    parts = [p for p in Path(about["source"]).parts if p not in ("/", "checkpoints")]
    model = f"{about['family']} model of {about['parameters'][-1]:,} parameters"
    return f"<h2>{escape('/'.join(parts[-2:]))} and its tickets</h2>" + faint(
        f"A {model}. Move the slider: a smaller dense model is cut out and writes beside it."
    )


def numbers(found: dict[str, Any], about: dict[str, Any], size: int) -> str:
    """What the ticket costs and how good it is, each beside the whole model."""
    ticket, whole = found["ticket"], found["whole"]
    share = ticket["parameters"] / whole["parameters"]
    html = tile(
        "parameters", f"{ticket['parameters']:,}", f"{share:.0%} of {whole['parameters']:,}"
    )
    for key, name in NUMBERS.items():
        if key == "perplexity" and not about["has_text"]:
            continue
        values = [_text(key, each.get(key)) for each in (ticket, whole)]
        html += tile(name, values[0], f"whole model {values[1]}")
    said = [f"keeps {about['sizes'][size - 1]} blocks of every layer"]
    said += [f"loads as a stock {about['family']} model"] if ticket["stock"] else []
    said += [known] if (known := about["known"][size - 1]) else []
    return (
        f'<div class="tiles">{html}</div>' + faint(" · ".join(said)) + faint(about["measured_on"])
    )


def _text(key: str, value: float | None) -> str:
    if value is None:
        return "…"
    if key == "bytes":
        return f"{value / 1e6:,.{1 if value > 1e7 else 3}f} MB"
    return f"{value:.1f} ms" if key == "ms" else f"{value:.2f}"


def tile(name: str, value: str, below: str) -> str:
    """A number in a box."""
    return (
        f'<div class="tile"><span class="faint">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="faint">{escape(below)}</span></div>'
    )


def faint(text: str) -> str:
    return f'<p class="faint">{escape(text)}</p>' if text else ""


def warning(text: str) -> str:
    return f'<p role="alert"><b>{escape(text)}</b></p>'


def size_rows(measured: dict[int, dict[str, Any]], about: dict[str, Any]) -> list[list[Any]]:
    """All sizes with what is known of them: rows of SIZE_COLUMNS."""
    rows, n_columns = [], 4 + any(about["known"])
    for i, blocks in enumerate(about["sizes"]):
        found = measured.get(i + 1, {})
        cells = [_text(key, found[key]) if key in found else "" for key in ("ms", "perplexity")]
        rows.append([blocks, f"{about['parameters'][i]:,}", *cells, about["known"][i]][:n_columns])
    return rows


def training(run: Path | None) -> tuple[str, list[dict[str, Any]], list[list[str]]]:
    """How a run's training stands: HTML, its losses for a plot, its evaluations for a table."""
    if run is None or not (run / "run.json").is_file():
        return faint("This model is no run folder: there is no training to follow."), [], []
    train = json.loads((run / "run.json").read_text())["config"]["train"]
    planned = train["rounds"] or "…"
    for resumed in _lines(run / "resumes.jsonl"):
        planned = resumed["changed"].get("train.rounds", (planned, planned))[1]
    rows = _lines(run / "metrics.jsonl")
    done = rows[-1]["round"] if rows else 0
    how = f"{train['method']}, {train['n_workers']} workers"
    html = tile("training", f"{done:,} of {planned} rounds", how)
    if rows:
        last = rows[-1]
        html += tile("loss", f"{last['loss']:.3f}", f"learning rate {last['lr']:.2g}")
        speed = f"{last['n_tokens'] / last['seconds']:,.0f}"
        html += tile("tokens per second", speed, f"{last['seconds']:.1f} s per round")
    html = f'<div class="tiles">{html}</div>'
    for event in _lines(run / "events.jsonl")[-5:]:
        html += faint(" ".join(f"{k} {v}" for k, v in event.items() if k != "time"))
    every = max(1, len(rows) // 400)  # of a long training
    losses = [{"round": row["round"], "loss": row["loss"]} for row in rows[::every]]
    evaluations = []
    for row in [row for row in rows if row.get("eval")][-8:]:
        means = {n: v["mean"] if isinstance(v, dict) else v for n, v in row["eval"].items()}
        shown = ", ".join(f"{name}: {value:.2f}" for name, value in means.items())
        evaluations.append([str(row["round"]), shown])
    return html, losses, evaluations


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that another process may be writing."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.strip()]
