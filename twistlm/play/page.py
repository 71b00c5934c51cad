"""The page: a size, a prompt, and what the whole model and a ticket make of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import PICKS, TicketChoice
from .process import ModelEnded, ModelProcess
from .render import CSS, SIZE_COLUMNS, faint, numbers, size_rows, title, training, warning

MOST_SHOWN = 300  # of a prompt that stand before what is written
MOST_SIZES = 16  # that the tab of sizes measures
REFUSALS = (ValueError, ModelEnded)  # said instead of an answer


def build(model: ModelProcess, run: Path | None) -> Any:
    """The page over a model's process; its last tab follows the training in the folder `run`."""
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
        found: dict[int, dict[str, Any]] = {}
        said = f"{pick} blocks; {about['measured_on']}"
        for size in sizes:
            try:
                *_, last = model.ask("measure", choice=TicketChoice(size, pick, seed or 0))
                found[size] = last["ticket"]
                left = f"; measured {len(found)} of {len(sizes)} sizes …"
                note = faint(said + left * (len(found) < len(sizes)))
            except REFUSALS as error:
                note = warning(str(error))
            yield note, pandas.DataFrame(found.values()), size_rows(found, about)

    def follow_training() -> tuple[Any, ...]:
        html, losses, evaluations = training(run)
        plot = gr.LinePlot(pandas.DataFrame(losses), visible=bool(losses))
        return html, plot, gr.Dataframe(evaluations, visible=bool(evaluations))

    with gr.Blocks(title="twistlm play", analytics_enabled=False) as page:
        gr.HTML(title(about), elem_classes="twist")
        with gr.Tab("Play"):
            with gr.Row():
                label = f"Size ({n_sizes} is the whole model)"
                start = max(1, n_sizes // 2)
                size = gr.Slider(1, n_sizes, start, step=1, label=label, elem_id="size", scale=2)
                pick = gr.Radio(PICKS, value=about["pick"], label="Blocks it keeps", scale=2)
                most = 2**53  # beyond it a browser's numbers are no longer whole
                seed = gr.Number(
                    0, label="Seed", precision=0, minimum=0, maximum=most, min_width=90
                )
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
                whole = gr.Textbox(
                    label="Whole model", lines=7, elem_id="whole-text", min_width=280
                )
                ticket = gr.Textbox(label="Ticket", lines=7, elem_id="ticket-text", min_width=280)
            note = gr.HTML(elem_id="note", elem_classes="twist")
            with gr.Row():
                n_new = gr.Slider(1, 200, 40, step=1, label="Tokens to write")
                label = "Temperature (0 takes the likeliest token)"
                temperature = gr.Slider(0, 1.5, 0.7, step=0.1, label=label)
        with gr.Tab("Sizes") as sizes_tab:
            sizes_note = gr.HTML(elem_id="sizes-note", elem_classes="twist")
            curve = gr.LinePlot(
                x="parameters", y="perplexity", height=280, visible=about["has_text"]
            )
            rows, headers = size_rows({}, about), SIZE_COLUMNS[: 4 + any(about["known"])]
            table = gr.Dataframe(rows, headers=headers, interactive=False, elem_id="sizes")
        with gr.Tab("Training"):
            status = gr.HTML(elem_id="training", elem_classes="twist")
            losses = gr.LinePlot(x="round", y="loss", height=280)
            headers = ["round", "perplexity by share of blocks that stay"]
            evaluations = gr.Dataframe(headers=headers, interactive=False)
        choice, progress = [size, pick, seed], [status, losses, evaluations]
        asked, written = [prompt, n_new, temperature, *choice], [whole, ticket, note]
        quiet = {"trigger_mode": "always_last", "show_progress": "hidden"}
        gr.on([page.load, size.change, pick.change, seed.change], measure, choice, shown, **quiet)
        starts = [page.load] if can_read else []
        starts += [go.click, prompt.submit, size.release, pick.input]
        running = gr.on(starts, write, asked, written, **quiet)
        stop.click(None, cancels=[running])
        opened = [page.load, sizes_tab.select]
        gr.on(opened, measure_sizes, [pick, seed], [sizes_note, curve, table], **quiet)
        follows = [page.load] + ([gr.Timer(2.0).tick] if run is not None else [])
        gr.on(follows, follow_training, None, progress, show_progress="hidden")
    return page.queue(default_concurrency_limit=8, max_size=64)


def launch(page: Any, server: str, port: int | None) -> str:
    """Serve the page; returns its address. Nothing is shared, nothing is fetched from elsewhere."""
    import gradio as gr

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    # fonts by name: gradio's own come from a web server
    theme = gr.themes.Default(primary_hue="teal", neutral_hue="slate", **fonts)
    _, address, _ = page.launch(
        server_name=server, server_port=port, share=False, quiet=True, prevent_thread_lock=True,
        footer_links=[], ssr_mode=False, css=CSS, theme=theme,
    )  # fmt: skip
    return address
