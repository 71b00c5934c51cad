"""bench train: times, bytes and memory on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .app import app
from .training import Overrides, Preset

bench = typer.Typer(help="Times, bytes and memory on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command(
    epilog="Examples:\n\n"
    "twistlm bench train paper\n\n"
    "twistlm bench train paper train.batch=32 --sizes 12/12,4/12 --settings both --json bench.json\n\n"
    "twistlm bench train demo run.device=cpu"
)
def train(
    preset: Preset,
    overrides: Overrides = None,
    sizes: Annotated[
        str, typer.Option(help="Workers to measure, as shares of the blocks.")
    ] = "12/12,10/12,8/12,6/12,4/12,3/12",
    settings: Annotated[str, typer.Option(help="attn, ffn, both.")] = "attn,ffn,both",
    steps: Annotated[int, typer.Option(min=0, help="Steps behind one time; 0: enough.")] = 0,
    references: Annotated[bool, typer.Option(help="Measure Hugging Face's own step too.")] = True,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here too.")
    ] = None,
) -> None:
    """A worker's local step and a round at every size: ms, tokens/s, TFLOP/s, memory, overhead.

    The model of the preset is built with random weights and fed random tokens; nothing is loaded.
    """
    from .. import config
    from ..bench import train as benches
    from ..terminal import console

    made = benches.bench(
        config.load(preset, overrides or []), sizes.split(","), settings.split(","),
        n_steps=steps, references=references,
    )  # fmt: skip
    for table in benches.tables(made):
        console.print(table)
    if json_out is not None:
        json_out.write_text(json.dumps(made.to_dict(), indent=1) + "\n")
