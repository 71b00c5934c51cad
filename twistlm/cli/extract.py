"""extract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..tickets import DTYPES, IMPORTANCES
from .options import Data, Device, Overrides, Parent, app, words


@app.command(
    epilog="Examples:\n\n"
    "twistlm extract runs/demo/twist -o ticket --ratio 4/12\n\n"
    "twistlm extract runs/wiki -o ticket --params 85M --pick best-of:16 --data data/wiki-test\n\n"
    "twistlm extract runs/wiki -o ticket --size 60MB --dtype bfloat16 --pick importance\n\n"
    "twistlm extract runs/wiki -o ticket --latency 12ms --device cpu\n\n"
    "twistlm extract gpt2 -o ticket --ratio attn=1,ffn=6/12,ffn.0=1 blocks.setting=both"
)
def extract(
    source: Parent,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the ticket.")],
    overrides: Overrides = None,
    ratio: Annotated[
        str | None,
        typer.Option(
            help="Share of blocks: 6/12, attn=2/3,ffn=6/12 or ffn=6/12,ffn.0=1 (layer 0)."
        ),
    ] = None,
    params: Annotated[str | None, typer.Option(help="At most so many parameters: 85M.")] = None,
    size: Annotated[
        str | None,
        typer.Option(help="At most so many bytes of weights: 60MB (10^6), 60MiB (2^20)."),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="At most so long per decoded token, measured here: 12ms.")
    ] = None,
    pick: Annotated[
        str,
        typer.Option(
            help="nested: the first blocks of the order that the parent was trained with (the default where it "
            "has one, else random); random; best-of:N by validation loss; importance (by fisher), or "
            f"importance:METHOD with METHOD {words(IMPORTANCES)}."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the pick.")] = 0,
    data: Data = None,
    tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens for each perplexity and for calibration; 0 takes all."),
    ] = 4096,
    dtype: Annotated[str, typer.Option(help=f"{words(DTYPES)}.")] = DTYPES[0],
    device: Device = "auto",
) -> None:
    """Cut the ticket that fits a budget out of a parent, and write it with its proof."""
    from ..system.terminal import console
    from ..tickets.budget import parse_budget
    from ..tickets.extract import TicketRequest, check_target, table, write
    from ..tickets.parent import open_parent
    from ..tickets.pick import parse_pick

    request = TicketRequest(
        budget=parse_budget(ratio=ratio, params=params, size=size, latency=latency),
        pick=parse_pick(pick),
        seed=seed,
        data=data,
        tokens=tokens,
        dtype=dtype,
    )
    check_target(out)
    ticket = write(open_parent(source, device, overrides or []), out, request)
    console.print(table(ticket))
    if ticket.proof["whole"]:
        console.print("the budget has room for the whole parent: this ticket is all of it")
    console.print(f"ticket: {out}")
