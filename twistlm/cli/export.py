"""export: a ticket for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..export import FORMATS
from .options import Tokens, app, words


@app.command(
    epilog="Examples:\n\n"
    "twistlm export runs/ticket --to gguf -o ticket.gguf --data data/test\n\n"
    "twistlm export runs/ticket --to onnx -o ticket-onnx --type q8"
)
def export(
    ticket: Annotated[Path, typer.Argument(help="A ticket folder, or any Hugging Face folder.")],
    to: Annotated[str, typer.Option(help=f"{words(FORMATS)}: for llama.cpp, for onnxruntime.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="GGUF file or ONNX folder to write.")],
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="; ".join(f"{to}: {words(types)}" for to, types in FORMATS.items())
            + ". The default is the first.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Token file: compare perplexity and reading speed too.")
    ] = None,
    tokens: Tokens = 8192,
    prompt: Annotated[
        str | None, typer.Option(help="Text that torch and the runtime both continue.")
    ] = None,
) -> None:
    """Write a ticket as GGUF or ONNX, and compare it with torch on the spot."""
    if to not in FORMATS:
        raise ValueError(f"--to {to}: a ticket is exported to {words(FORMATS)}")
    if not (ticket / "config.json").is_file():
        raise ValueError(f"{ticket} is neither a ticket nor a Hugging Face folder")
    from ..compute.perplexity import Text
    from ..data.token_file import open_tokens
    from ..export import gguf, onnx, verify
    from ..model.huggingface import from_folder_or_hub, vocab_size
    from ..system.terminal import console
    from ..tickets.deploy import load_ticket

    is_ticket = (ticket / "ticket.json").is_file()
    model = load_ticket(ticket) if is_ticket else from_folder_or_hub(str(ticket)).eval()
    model = model.float()  # a ticket saved in bfloat16 is compared, and written, exactly
    tokenizer, text = ticket / "tokenizer.json", None
    if data is not None:
        most = getattr(model.config, "max_position_embeddings", None) or 1024
        text = Text(open_tokens(data), min(1024, most), tokens, batch=1)
        text.file.check(text.seq_len, vocab_size(model))
    write = {"gguf": gguf.export, "onnx": onnx.export}[to]
    rows = write(
        model,
        out,
        type_ or FORMATS[to][0],
        tokenizer if tokenizer.is_file() else None,
        text,
        prompt or verify.PROMPT,
    )
    console.print(verify.table(rows))
    if to == "gguf" and len(rows) == 1:
        console.print("not run in llama.cpp, which is not installed: pip install 'twistlm[llama]'")
    if rows[-1].text:
        console.print(rows[-1].text)
    console.print(f"written: {out}")
