"""certify, drop, generate, draft, verify: what tickets promise and what they do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    ANY_MODEL,
    PARENT,
    Data,
    Device,
    JsonOut,
    Overrides,
    Tokens,
    app,
    lab,
    out_option,
    seed_of,
    write_json,
)

MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens to write; default: 100, or what the model's positions leave."),
]


@lab.command(
    epilog="Examples:\n\n"
    "twistlm lab drop runs/demo/dense runs/demo/twist --nodes 4 --lose 1\n\n"
    "twistlm lab drop gpt2 --nodes 4 --lose 2 --data data/wiki-test --tokens 16384 "
    "blocks.shared_first=0"
)
def drop(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... [SECTION.KEY=VALUE]...", help=f"Parents, side by side. {PARENT}"
        ),
    ],
    nodes: Annotated[int, typer.Option(min=2, help="Nodes that serve the parent.")] = 4,
    lose: Annotated[int, typer.Option(min=1, help="Nodes that die.")] = 1,
    data: Data = None,
    tokens: Tokens = 0,
    device: Device = "auto",
    json_out: JsonOut = None,
) -> None:
    """Spread a parent's blocks over nodes, lose some of them in every possible way.

    Each node holds a contiguous run of each layer's blocks, as in tensor-parallel serving (the
    first nodes one block more where they do not divide evenly), and all that is not cut; blocks of
    a parent with an order are striped over nodes. What is left is rescaled.
    """
    from ..system.terminal import console
    from ..tickets import lost_nodes
    from ..tickets.parent import open_parent

    overrides = [source for source in sources if "=" in source and not Path(source).exists()]
    opened = {s: open_parent(s, device, overrides) for s in sources if s not in overrides}
    if not opened:
        raise ValueError("give at least one parent")
    made = lost_nodes.drop(opened, nodes, lose, data=data, tokens=tokens)
    console.print(lost_nodes.table(made, nodes, lose))
    write_json(json_out, lost_nodes.record(made, nodes, lose))


@app.command(
    epilog="Examples:\n\n"
    "twistlm heal runs/demo/ticket -o runs/demo/healed --tokens 200k\n\n"
    "twistlm heal ticket -o healed --tokens 20M --teacher gpt2 --data data/wiki/train --valid "
    "data/wiki/test "
    "train.lr=2e-4 train.batch=16\n\n"
    "twistlm heal ticket -o healed --tokens 20M --teacher none --data data/wiki/train"
)
def heal(
    ticket: Annotated[Path, typer.Argument(help="The folder of a ticket.")],
    out: Annotated[Path, out_option("Folder of the healed ticket.")],
    tokens: Annotated[str, typer.Option(help="Tokens to train on: 20M.")],
    overrides: Overrides = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Whose predictions it learns: a run, a checkpoint, a Hugging Face folder or hub "
            "id with the same tokenizer; none: the text alone. Default: the ticket's parent."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Token file to train on; default: data.train of the teacher or parent."),
    ] = None,
    valid: Annotated[
        str | None,
        typer.Option(help="Token file to measure on; default: data.valid of the same run."),
    ] = None,
    valid_tokens: Annotated[
        int, typer.Option(min=0, help="Use this many tokens of it; 0 takes all.")
    ] = 0,
    device: Device = "auto",
) -> None:
    """Train a ticket for itself, with its parent as a frozen teacher, and write it anew.

    A stopped one goes on where it was when the same command is called again. Learning rate, batch
    and all else are keys of the training config; those of the teacher's run, or of the parent's,
    are taken where there is one.
    """
    from ..system.terminal import console
    from ..tickets import healing
    from ..tickets.budget import amount
    from ..tickets.requests import HealRequest

    request = HealRequest(
        ticket=ticket,
        out=out,
        tokens=int(amount("tokens", tokens)),
        teacher=teacher,
        data=data,
        valid=valid,
        valid_tokens=valid_tokens,
        device=device,
        overrides=overrides or [],
    )
    console.print(healing.reading(healing.heal(request)))
    console.print(f"ticket: {out}")


@app.command(
    epilog="Examples:\n\n"
    'twistlm generate runs/demo/ticket --prompt "Return the"\n\n'
    'twistlm generate gpt2 --prompt "In the beginning" --temperature 0.8 --top-k 40 --seed 1'
)
def generate(
    ticket: Annotated[str, typer.Argument(help=ANY_MODEL)],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[
        float | None, typer.Option(min=1e-3, help="Draw instead of taking the likeliest token.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw among this many likeliest tokens.")
    ] = None,
    seed: Annotated[int, seed_of("the draw")] = 0,
    device: Device = "auto",
) -> None:
    """Write text, token by token as it comes; greedy unless told to draw."""
    from ..system.terminal import clean
    from ..tickets.runnable import open_runnable, write

    def emit(text: str) -> None:
        print(clean(text), end="", flush=True)

    write(
        open_runnable(ticket, device),
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        emit=emit,
    )
    sys.stdout.write("\n")


@lab.command(
    epilog="Examples:\n\n"
    'twistlm lab draft runs/demo/twist runs/demo/ticket --prompt "Return the"\n\n'
    "twistlm lab draft runs/demo/twist runs/demo/ticket --data runs/demo/text/valid --n 8 "
    "--draft-tokens 3"
)
def draft(
    parent: Annotated[str, typer.Argument(help=f"The model whose text is written. {PARENT}")],
    ticket: Annotated[str, typer.Argument(help=f"The model that drafts. {ANY_MODEL}")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from; repeatable.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Token file to take prompts from.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Prompts taken from --data.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = 16,
    max_new_tokens: MaxNewTokens = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted at a time.")] = 5,
    device: Device = "auto",
    json_out: JsonOut = None,
) -> None:
    """Let a ticket draft for its own parent: drafts accepted, tokens per second, the same text."""
    from ..system.terminal import console
    from ..tickets import speculate
    from ..tickets.runnable import open_runnable

    pair = open_runnable(parent, device), open_runnable(ticket, device)
    prompts = speculate.prompts(pair[0], prompt or [], data, n, prompt_tokens)
    made = speculate.draft(*pair, prompts, max_new_tokens=max_new_tokens, n_draft=draft_tokens)
    console.print(speculate.table(made))
    console.print(speculate.reading(made))
    write_json(json_out, made.to_dict())


@app.command(
    epilog="Examples:\n\n"
    "twistlm verify runs/demo/text/train runs/demo/twist runs/demo/ticket\n\n"
    "twistlm verify data/wiki/train"
)
def verify(
    sources: Annotated[
        list[str], typer.Argument(help="Token files, tickets, checkpoints or run folders.")
    ],
) -> None:
    """Read every byte of files that twistlm wrote and compare it with their sha256.

    Exit codes: 0 all are whole, 2 something is damaged or missing.
    """
    from ..system.terminal import console, progress
    from ..tickets import runnable

    damages = []
    with progress() as bar:
        task = bar.add_task("verify", total=len(sources), note="")
        for source in sources:
            bar.update(task, note=source)
            try:
                for sentence in runnable.verify(source):
                    console.print(sentence)
            except ValueError as damage:
                damages.append(str(damage))
            bar.advance(task)
    if damages:
        raise ValueError("; ".join(damages))
