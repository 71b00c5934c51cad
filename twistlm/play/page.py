"""The page: a size, a prompt, and what the whole model and a ticket make of them."""

import math
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from . import PICKS, TicketChoice
from .process import ModelEnded, ModelProcess

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
NUMBERS = {"bytes": "weights", "ms": "time per token", "perplexity": "perplexity (less is better)"}
MOST_SHOWN = 300  # of a prompt that stand before what is written
MOST_SIZES = 16  # that the tab of sizes measures
REFUSALS = (ValueError, ModelEnded)  # said instead of an answer


def build(model: ModelProcess) -> Any:
    """The page over a model's process."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    model.start()  # it loads while gradio is imported
    import gradio as gr
    import pandas

    about = next(model.ask("describe"))
    n_sizes = len(about["sizes"])

    def measure(size: int, pick: str, seed: int | None) -> Iterator[str]:
        try:
            for found in model.ask("measure", choice=TicketChoice(size, pick, seed or 0)):
                yield numbers(found, about, size)
        except REFUSALS as error:
            yield warning(str(error))

    def write(
        prompt: str | None, n_new: int, temperature: float, size: int, pick: str, seed: int | None
    ) -> Iterator[tuple[str, str, str]]:
        texts, prompt = ("", ""), prompt or ""  # an emptied box may be None
        begins = prompt if len(prompt) <= MOST_SHOWN else f"…{prompt[-MOST_SHOWN:]}"
        asked = {"prompt": prompt, "n_new": n_new, "temperature": temperature}
        try:
            for part in model.ask("write", choice=TicketChoice(size, pick, seed or 0), **asked):
                texts = begins + part["whole"], begins + part["ticket"]
                yield *texts, faint(part["note"])
        except REFUSALS as error:
            yield *texts, warning(str(error))

    def measure_sizes(pick: str, seed: int | None) -> Iterator[tuple[Any, ...]]:
        """One question for each size (of many sizes, some): others are answered in between."""
        sizes = range(n_sizes, 0, -math.ceil(n_sizes / MOST_SIZES))[::-1]
        rows: list[dict[str, Any]] = []
        said = f"{pick} blocks; {about['measured_on']}"
        for size in sizes:
            try:
                *_, last = model.ask("measure", choice=TicketChoice(size, pick, seed or 0))
                rows.append({"blocks": about["sizes"][size - 1], **last["ticket"]})
                left = f"; measured {len(rows)} of {len(sizes)} sizes …"
                note = faint(said + left * (len(rows) < len(sizes)))
            except REFUSALS as error:
                note = warning(str(error))
            frame = pandas.DataFrame(rows).round(2)
            yield note, frame, frame.rename(columns={"ms": "ms per token"})

    with gr.Blocks(title="twistlm play", analytics_enabled=False) as page:
        gr.HTML(title(about), elem_classes="twist")
        with gr.Tab("Play"):
            with gr.Row():
                label = f"Size ({n_sizes} is the whole model)"
                start = max(1, n_sizes // 2)
                size = gr.Slider(1, n_sizes, start, step=1, label=label, elem_id="size", scale=2)
                pick = gr.Radio(list(PICKS), value=about["pick"], label="Blocks it keeps", scale=2)
                # up to where a browser's numbers are whole
                limits = {"precision": 0, "minimum": 0, "maximum": 2**53}
                seed = gr.Number(0, label="Seed", min_width=90, **limits)
            shown = gr.HTML(elem_id="numbers", elem_classes="twist")
            with gr.Row():
                can_read = about["has_tokenizer"]
                prompt = gr.Textbox(
                    about["prompt"], label="Prompt", max_lines=6, interactive=can_read,
                    elem_id="prompt", scale=5, min_width=280,
                )  # fmt: skip
                go = gr.Button("Write", variant="primary", elem_id="write", min_width=110)
                stop = gr.Button("Stop", elem_id="stop", min_width=110)
            with gr.Row():
                box = {"lines": 7, "min_width": 280}
                whole = gr.Textbox(label="Whole model", elem_id="whole-text", **box)
                ticket = gr.Textbox(label="Ticket", elem_id="ticket-text", **box)
            note = gr.HTML(elem_id="note", elem_classes="twist")
            with gr.Row():
                n_new = gr.Slider(1, 200, 40, step=1, label="Tokens to write")
                label = "Temperature (0 takes the likeliest token)"
                temperature = gr.Slider(0, 1.5, 0.7, step=0.1, label=label)
        with gr.Tab("Sizes") as sizes_tab:
            sizes_note = gr.HTML(elem_id="sizes-note", elem_classes="twist")
            axes = {"x": "parameters", "y": "perplexity", "visible": about["has_text"]}
            curve = gr.LinePlot(height=280, **axes)
            table = gr.Dataframe(interactive=False, elem_id="sizes")
        choice = [size, pick, seed]
        asked, written = [prompt, n_new, temperature, *choice], [whole, ticket, note]
        quiet = {"trigger_mode": "always_last", "show_progress": "hidden"}
        gr.on([page.load, size.change, pick.change, seed.change], measure, choice, shown, **quiet)
        starts = [page.load] if can_read else []
        starts += [go.click, prompt.submit, size.release, pick.input]
        running = gr.on(starts, write, asked, written, **quiet)
        stop.click(None, cancels=[running])
        opened = [page.load, sizes_tab.select]
        gr.on(opened, measure_sizes, [pick, seed], [sizes_note, curve, table], **quiet)
    return page.queue(default_concurrency_limit=8, max_size=64)


def launch(page: Any, server: str, port: int | None) -> str:
    """Serve the page; returns its address. Nothing is shared, nothing is fetched from elsewhere."""
    import gradio as gr
    from starlette.responses import Response
    from starlette.routing import Route

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    # fonts by name: gradio's own come from a web server
    theme = gr.themes.Default(primary_hue="teal", neutral_hue="slate", **fonts)
    # before gradio's own, which takes files from anyone: nothing here needs one
    closed = Route("/gradio_api/upload", lambda _: Response(status_code=404), methods=["POST"])
    _, address, _ = page.launch(
        server_name=server, server_port=port, share=False, quiet=True, prevent_thread_lock=True,
        footer_links=[], ssr_mode=False, css=CSS, theme=theme, app_kwargs={"routes": [closed]},
    )  # fmt: skip
    return address


def title(about: dict[str, Any]) -> str:
    parts = [p for p in Path(about["source"]).parts if p not in ("/", "checkpoints")]
    model = f"{about['family']} model of {about['parameters']:,} parameters"
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
    said = f"keeps {about['sizes'][size - 1]} blocks of every layer; {about['measured_on']}"
    return f'<div class="tiles">{html}</div>{faint(said)}'


def _text(key: str, value: float | None) -> str:
    if value is None:
        return "…"
    if key == "bytes":
        return f"{value / 1e6:,.{1 if value > 1e7 else 3}f} MB"
    return f"{value:.1f} ms" if key == "ms" else f"{value:.2f}"


def tile(name: str, value: str, below: str) -> str:
    return (
        f'<div class="tile"><span class="faint">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="faint">{escape(below)}</span></div>'
    )


def faint(text: str) -> str:
    return f'<p class="faint">{escape(text)}</p>' if text else ""


def warning(text: str) -> str:
    return f'<p role="alert"><b>{escape(text)}</b></p>'
