"""The page: a size, a prompt, and what the whole model and the ticket make of them. Served to this machine alone."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from . import PICKS
from .host import Host, ModelEnded

MOST_CHARACTERS = 20_000  # of a prompt
CSS = """
.gradio-container {max-width: 1100px !important; margin: 0 auto !important}
.twist table {border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums}
.twist td, .twist th {padding: 2px 8px; text-align: right; white-space: nowrap}
.twist td:first-child, .twist th:first-child {text-align: left}
.twist svg {width: 100%; height: auto; max-width: 720px}
.twist .wide {overflow-x: auto}
"""
FONTS = ["system-ui", "sans-serif"]  # by name: gradio's own come from a web server


def installed() -> bool:
    return importlib.util.find_spec("gradio") is not None


def build(host: Host, run: Path | None) -> Any:
    """The page over a model's process; `run` is a run folder whose training the last tab follows."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    host.start()  # it loads while gradio is imported
    import gradio as gr

    about = next(host.ask("describe"))
    n_sizes = len(about["sizes"])
    start = max(1, (n_sizes + 1) // 2)

    def cut(size: float, pick: str, seed: float | None) -> Iterator[tuple[str, str, str]]:
        asked = _asked(size, pick, seed)
        try:
            for found in host.ask("cut", asked=asked):
                yield (
                    numbers("whole", found["whole"], about, None),
                    numbers("ticket", found["ticket"], about, asked["size"]),
                    "",
                )
        except (ValueError, ModelEnded) as error:
            yield "", "", _warning(str(error))

    def write(
        prompt: str, n_new: float, temperature: float, size: float, pick: str, seed: float | None
    ) -> Iterator[tuple[str, str, str]]:
        asked = _asked(size, pick, seed)
        words = {"prompt": (prompt or "")[-MOST_CHARACTERS:], "n_new": int(n_new or 1)}
        whole, ticket = "", ""
        try:
            for part in host.ask("write", asked=asked, temperature=float(temperature), **words):
                whole, ticket = part["whole"]["text"], part["ticket"]["text"]
                took = [part[name]["ms"] for name in ("whole", "ticket")]
                said = part["note"]
                if None not in took:
                    said = f"{took[0]:.0f} ms per token, the ticket {took[1]:.0f}. {said}"
                yield whole, ticket, said
        except (ValueError, ModelEnded) as error:
            yield whole, ticket, _warning(str(error))

    def curve(pick: str, seed: float | None) -> Iterator[str]:
        rows: list[dict[str, Any]] = []
        try:
            for row in host.ask("curve", pick=pick, seed=int(seed or 0)):
                rows.append(row)
                yield sizes_table(rows, about)
        except (ValueError, ModelEnded) as error:
            yield sizes_table(rows, about) + _warning(str(error))

    with gr.Blocks(title="twistlm play", analytics_enabled=False) as page:
        gr.Markdown(f"## {_name(about['source'])} and its tickets")
        with gr.Tab("Play"):
            with gr.Row():
                size = gr.Slider(1, n_sizes, start, step=1, label="Size", elem_id="size")
                pick = gr.Radio(list(PICKS), value=PICKS[0], label="Blocks", elem_id="pick")
                seed = gr.Number(0, label="Seed of the draw", precision=0, elem_id="seed")
            problem = gr.HTML(elem_id="problem", elem_classes="twist")
            with gr.Row():
                left = gr.HTML(elem_id="whole-numbers", elem_classes="twist", min_width=320)
                right = gr.HTML(elem_id="ticket-numbers", elem_classes="twist", min_width=320)
            prompt = gr.Textbox(
                "The city lies on both banks of the river and",
                label="Prompt",
                lines=2,
                max_lines=6,
                elem_id="prompt",
                interactive=not about["no_tokenizer"],
            )
            with gr.Row():
                n_new = gr.Slider(1, 200, 40, step=1, label="Tokens to write", elem_id="n-new")
                heat = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature (0: likeliest)")
                go = gr.Button("Write", variant="primary", elem_id="write")
                stop = gr.Button("Stop", elem_id="stop")
            note = gr.HTML(elem_id="note", elem_classes="twist")
            with gr.Row():
                one = gr.Textbox(label="Whole model", lines=8, elem_id="whole-text")
                two = gr.Textbox(label="Ticket", lines=8, elem_id="ticket-text")
        with gr.Tab("Sizes"):
            gr.Markdown(
                "Perplexity over parameters and over ms per token, for the blocks chosen in *Play*."
            )
            measure = gr.Button("Measure every size", elem_id="measure")
            shown = gr.HTML(sizes_table([], about), elem_id="curve", elem_classes="twist")
        with gr.Tab("Training"):
            progress = gr.HTML(training_table(run), elem_id="training", elem_classes="twist")
        controls = [size, pick, seed]
        for event in (size.change, pick.change, seed.change, page.load):
            event(cut, controls, [left, right, problem], trigger_mode="always_last")
        asked = [prompt, n_new, heat, *controls]
        running = gr.on([go.click, prompt.submit], write, asked, [one, two, note])
        stop.click(None, cancels=[running])
        measure.click(curve, [pick, seed], shown)
        if run is not None:
            gr.Timer(2.0).tick(lambda: training_table(run), None, progress, show_progress="hidden")
    return page.queue(default_concurrency_limit=8, max_size=64)


def launch(page: Any, server: str, port: int | None, wait: bool = True) -> str:
    """Serve the page; returns its address. Nothing is shared, nothing is fetched from elsewhere."""
    import gradio as gr

    _, address, _ = page.launch(
        server_name=server,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        ssr_mode=False,
        css=CSS,
        theme=gr.themes.Default(font=FONTS, font_mono=["ui-monospace", "monospace"]),
    )
    return address


def numbers(name: str, found: dict[str, Any], about: dict[str, Any], size: int | None) -> str:
    """What a model costs and how good it is."""
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("weights", f"{found['bytes'] / 1e6:,.{1 if found['bytes'] > 1e6 else 3}f} MB"),
        ("decoding", f"{found['ms']:.1f} ms per token" if "ms" in found else "…"),
    ]
    if "perplexity" in found:
        rows.append(("perplexity", f"{found['perplexity']:.2f}"))
    elif not about["no_text"]:
        rows.append(("perplexity", "…"))
    title = "whole model"
    if size is not None:
        title = f"ticket: {about['sizes'][size - 1]}"
        if found["stock"]:
            rows.append(("loads as", f"a stock {about['family']} model"))
        if band := about["bands"][size - 1]:
            rows.append(("of this size", band))
    cells = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f'<div class="wide"><b>{escape(title)}</b><table>{cells}</table></div>'


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
    return f'{drawn}<div class="wide">{table}</div>'


def training_table(run: Path | None) -> str:
    """Loss, perplexities and who takes part in the training that a run folder tells of."""
    if run is None or not (run / "run.json").is_file():
        return "This model is no run folder: there is no training to follow."
    config = json.loads((run / "run.json").read_text())["config"]
    rows = _lines(run / "metrics.jsonl")
    planned = config["train"]["rounds"] or "…"
    for resumed in _lines(run / "resumes.jsonl"):
        planned = resumed["changed"].get("train.rounds", (planned, planned))[1]
    said = [f"<b>{len(rows)} of {planned} rounds</b>, method {escape(config['train']['method'])}"]
    said.append(f"{config['train']['n_workers']} workers per round")
    if rows:
        last = rows[-1]
        said.append(f"loss {last['loss']:.3f}, {last['n_tokens'] / last['seconds']:,.0f} tokens/s")
    for event in _lines(run / "events.jsonl")[-5:]:
        said.append(escape(" ".join(f"{k} {v}" for k, v in event.items() if k != "time")))
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
        table = f'<div class="wide">perplexity<table><tr>{head}</tr>{body}</table></div>'
    drawn = _curve([(row["round"], row["loss"]) for row in rows], "loss over rounds")
    return "<br>".join(said) + drawn + table


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

    def at(x: float, y: float) -> str:
        return f"{60 + 620 * (x - min(xs)) / wide:.1f},{190 - 160 * (y - min(ys)) / high:.1f}"

    line = " ".join(at(x, y) for x, y in sorted(points))
    dots = "".join(
        f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3"/>' for p in line.split()
    ) * (len(points) < 60)
    text = 'font-size="12" fill="currentColor" stroke="none"'
    return (
        f'<svg viewBox="0 0 700 220" role="img" aria-label="{escape(title)}" fill="currentColor" '
        f'stroke="currentColor"><text x="60" y="16" {text}>{escape(title)}</text>'
        f'<polyline points="{line}" fill="none" stroke-width="1.5"/>{dots}'
        f'<text x="4" y="34" {text}>{_short(max(ys))}</text><text x="4" y="192" {text}>{_short(min(ys))}</text>'
        f'<text x="60" y="212" {text}>{_short(min(xs))}</text>'
        f'<text x="680" y="212" text-anchor="end" {text}>{_short(max(xs))}</text></svg>'
    )


def _asked(size: float, pick: str, seed: float | None) -> dict[str, Any]:
    return {"size": int(size), "pick": str(pick), "seed": int(seed or 0)}


def _warning(text: str) -> str:
    return f'<p role="alert"><b>{escape(text)}</b></p>'


def _name(source: str) -> str:
    parts = [part for part in Path(source).parts if part not in ("/", "checkpoints")]
    return "/".join(parts[-2:])


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
