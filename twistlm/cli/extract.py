"""extract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..tickets import DTYPES, IMPORTANCES, SPENDS
from .options import Data, Device, Overrides, Parent, app, known, seed_of, words


@app.command(
    epilog="Examples:\n\n"
    "twistlm extract runs/demo/twist -o ticket --ratio 4/12\n\n"
    "twistlm extract runs/wiki -o ticket --params 85M --pick best-of:16 --data data/wiki-test\n\n"
    "twistlm extract runs/wiki -o ticket --size 60MB --dtype bfloat16 --pick importance\n\n"
    "twistlm extract runs/wiki -o ticket --latency 12ms --device cpu\n\n"
    "twistlm extract runs/wiki -o tickets --memory 300MB --memory 200MB --context 1k --dtype float16\n\n"
    "twistlm extract runs/smollm2-stock -o ticket --params 100M --stock\n\n"
    "twistlm extract gpt2 -o ticket --ratio attn=1,ffn=6/12,ffn.5=1 blocks.setting=both"
)
def extract(
    source: Parent,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder of the ticket; of several budgets, each has one in it."
        ),
    ],
    overrides: Overrides = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of blocks: 6/12, attn=2/3,ffn=6/12 or ffn=6/12,ffn.5=1 (layer 5, if it is cut). Budgets are "
            "repeatable: a ticket for each."
        ),
    ] = None,
    params: Annotated[
        list[str] | None, typer.Option(help="At most so many parameters: 85M.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="At most so many bytes of weights: 60MB (10^6), 60MiB (2^20)."),
    ] = None,
    latency: Annotated[
        list[str] | None,
        typer.Option(help="At most so long per decoded token, measured here: 12ms."),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="At most so many bytes of weights and of the keys and values of --context tokens: 2GB."
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens that --memory has room for: 8k (8192) or 2000.")
    ] = None,
    spend: Annotated[
        str,
        typer.Option(
            help="measured: blocks of a budget (not of a ratio) go where losing them costs the most loss on "
            "the text that blocks are scored on; even: the same share everywhere."
        ),
    ] = SPENDS[0],
    pick: Annotated[
        str,
        typer.Option(
            help="nested: the first blocks of the order that the parent was trained with (the default where it "
            "has one, else random); random; best-of:N by validation loss; importance (by fisher), or "
            f"importance:METHOD with METHOD {words(IMPORTANCES)}."
        ),
    ] = "auto",
    stock: Annotated[
        bool,
        typer.Option(
            "--stock",
            help="Only the same widths in all layers, so that the ticket is a plain model of its family that "
            "every runtime loads.",
        ),
    ] = False,
    seed: Annotated[int, seed_of("the pick")] = 0,
    data: Data = None,
    tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens for each perplexity and for calibration; 0 takes all."),
    ] = 4096,
    dtype: Annotated[str, typer.Option(help=f"{words(DTYPES)}.")] = DTYPES[0],
    device: Device = "auto",
) -> None:
    """Cut the ticket that fits a budget out of a parent, and write it with its proof."""
    changes = known(overrides)
    from ..system.terminal import console
    from ..tickets.budget import parse_budgets
    from ..tickets.extract import TicketRequest, check_target, kind_of, table, write
    from ..tickets.parent import open_parent
    from ..tickets.pick import parse_pick

    budgets = parse_budgets(
        context, ratio=ratio, params=params, size=size, latency=latency, memory=memory
    )
    folders = [out] if len(budgets) == 1 else [out / budget.slug for budget in budgets]
    requests = [
        TicketRequest(
            budget=budget,
            pick=parse_pick(pick),
            seed=seed,
            data=data,
            tokens=tokens,
            dtype=dtype,
            spend=spend,
            stock=stock,
        )
        for budget in budgets
    ]
    for folder in folders:
        check_target(folder)
    parent = open_parent(source, device, changes)
    for folder, request in zip(folders, requests, strict=True):
        ticket = write(parent, folder, request)
        console.print(table(ticket))
        if ticket.proof["whole"]:
            console.print("the budget has room for the whole parent: this ticket is all of it")
        console.print(f"ticket: {folder}, {kind_of(ticket)}")
