"""The page: a size, a prompt, and what the whole model and the ticket make of them. Served to this machine alone."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from . import PICKS
from .host import Host, ModelEnded
from .shown import CSS, numbers, sizes_table, title, training_table, warning

MOST_CHARACTERS = 20_000  # of a prompt
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

    def cut(size: float, pick: str, seed: float | None) -> Iterator[str]:
        asked = _asked(size, pick, seed)
        try:
            for found in host.ask("cut", asked=asked):
                yield numbers(found, about, asked["size"])
        except (ValueError, ModelEnded) as error:
            yield warning(str(error))

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
                    said = f"whole model {took[0]:.0f} ms per token, ticket {took[1]:.0f} ms per token. {said}"
                yield whole, ticket, f'<span class="faint">{escape(said)}</span>'
        except (ValueError, ModelEnded) as error:
            yield whole, ticket, warning(str(error))

    def curve(pick: str, seed: float | None) -> Iterator[str]:
        rows: list[dict[str, Any]] = []
        try:
            for row in host.ask("curve", pick=pick, seed=int(seed or 0)):
                rows.append(row)
                yield sizes_table(rows, about)
        except (ValueError, ModelEnded) as error:
            yield sizes_table(rows, about) + warning(str(error))

    with gr.Blocks(title="twistlm play", analytics_enabled=False) as page:
        gr.HTML(title(about), elem_classes="twist")
        with gr.Tab("Play"):
            with gr.Row():
                size = gr.Slider(
                    1, n_sizes, start, step=1, label="Size", elem_id="size", scale=3, min_width=280
                )
                pick = gr.Radio(
                    list(PICKS),
                    value=PICKS[0],
                    label="Blocks",
                    elem_id="pick",
                    scale=3,
                    min_width=310,
                )
                seed = gr.Number(
                    0, label="Seed", precision=0, elem_id="seed", scale=1, min_width=90
                )
            shown = gr.HTML(elem_id="numbers", elem_classes="twist")
            prompt = gr.Textbox(
                "The city lies on both banks of the river and",
                label="Prompt",
                lines=2,
                max_lines=6,
                elem_id="prompt",
                interactive=not about["no_tokenizer"],
            )
            with gr.Row():
                n_new = gr.Slider(
                    1,
                    200,
                    40,
                    step=1,
                    label="Tokens to write",
                    elem_id="n-new",
                    scale=3,
                    min_width=220,
                )
                heat = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", scale=3, min_width=220)
                go = gr.Button("Write", variant="primary", elem_id="write", scale=1, min_width=110)
                stop = gr.Button("Stop", elem_id="stop", scale=1, min_width=110)
            note = gr.HTML(elem_id="note", elem_classes="twist")
            with gr.Row():
                one = gr.Textbox(label="Whole model", lines=8, elem_id="whole-text", min_width=280)
                two = gr.Textbox(label="Ticket", lines=8, elem_id="ticket-text", min_width=280)
        with gr.Tab("Sizes"):
            with gr.Row():
                gr.HTML(
                    '<p class="faint">Perplexity over parameters and over ms per token, for the blocks chosen '
                    "in Play.</p>",
                    elem_classes="twist",
                    min_width=280,
                )
                measure = gr.Button("Measure every size", elem_id="measure", scale=0, min_width=260)
            sizes = gr.HTML(sizes_table([], about), elem_id="curve", elem_classes="twist")
        with gr.Tab("Training"):
            progress = gr.HTML(training_table(run), elem_id="training", elem_classes="twist")
        controls = [size, pick, seed]
        for event in (size.change, pick.change, seed.change, page.load):
            event(cut, controls, shown, trigger_mode="always_last", show_progress="hidden")
        asked = [prompt, n_new, heat, *controls]
        running = gr.on([go.click, prompt.submit], write, asked, [one, two, note])
        stop.click(None, cancels=[running])
        measure.click(curve, [pick, seed], sizes)
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
        theme=gr.themes.Default(
            primary_hue="teal",
            neutral_hue="slate",
            font=FONTS,
            font_mono=["ui-monospace", "monospace"],
        ),
    )
    return address


def _asked(size: float, pick: str, seed: float | None) -> dict[str, Any]:
    return {"size": int(size), "pick": str(pick), "seed": int(seed or 0)}
