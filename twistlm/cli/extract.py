"""extract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..tickets.requests import TicketRequest
from .options import Device, Overrides, Parent, app, known, out_option, with_requests


@app.command(
    epilog="Examples:\n\n"
    "twistlm extract runs/demo/twist -o ticket --ratio 4/12\n\n"
    "twistlm extract runs/wiki -o ticket --params 85M --pick best-of:16 --data data/wiki-test\n\n"
    "twistlm extract runs/wiki -o ticket --size 60MB --dtype bfloat16 --pick importance\n\n"
    "twistlm extract runs/wiki -o ticket --latency 12ms --device cpu\n\n"
    "twistlm extract runs/wiki -o tickets --memory 300MB --memory 200MB --context 1k --dtype "
    "float16\n\n"
    "twistlm extract runs/smollm2-stock -o ticket --params 100M --stock\n\n"
    "twistlm extract gpt2 -o ticket --ratio attn=1,ffn=6/12,ffn.5=1 blocks.setting=both"
)
@with_requests
def extract(
    source: Parent,
    out: Annotated[
        Path,
        out_option("Folder of the ticket; of several budgets, each has one in it."),
    ],
    request: TicketRequest,
    overrides: Overrides = None,
    device: Device = "auto",
) -> None:
    """Cut the ticket that fits a budget out of a parent, and write it with its proof."""
    changes = known(overrides)
    from ..system.terminal import console
    from ..tickets.extract import kind_of, table, write_tickets

    for folder, ticket in write_tickets(source, out, request, device, changes):
        console.print(table(ticket))
        if ticket.proof["whole"]:
            console.print("the budget has room for the whole parent: this ticket is all of it")
        console.print(f"ticket: {folder}, {kind_of(ticket)}")
