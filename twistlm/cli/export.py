"""export, push: a ticket for other runtimes, and for other people."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..export import FORMATS
from .options import ANY_MODEL, Tokens, app, out_option, words

STEPS = {("gguf", ""): 4, ("onnx", ""): 3, ("onnx", "q8"): 4}  # that an export tells of


@app.command(
    epilog="Examples:\n\n"
    "twistlm export runs/ticket --to gguf -o ticket.gguf --data data/test\n\n"
    "twistlm export runs/ticket --to gguf -o ticket.gguf --type q4_k_m\n\n"
    "twistlm export runs/wiki --to onnx -o whole-onnx --type q8"
)
def export(
    source: Annotated[str, typer.Argument(help=ANY_MODEL)],
    to: Annotated[str, typer.Option(help=f"{words(FORMATS)}: for llama.cpp, for onnxruntime.")],
    out: Annotated[Path, out_option("GGUF file or ONNX folder to write.")],
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
    """Write a ticket, or the whole model of a run, as GGUF or ONNX, and compare it with torch on
    the spot.
    """
    if to not in FORMATS:
        raise ValueError(f"--to {to}: a ticket is exported to {words(FORMATS)}")
    from ..compute.perplexity import Text
    from ..data.token_file import open_tokens
    from ..export import gguf, onnx, verify
    from ..model.huggingface import vocab_size
    from ..system.terminal import console, progress
    from ..tickets.runnable import open_runnable

    opened = open_runnable(source, "cpu")
    model = opened.model.float()  # a ticket saved in bfloat16 is compared, and written, exactly
    text = None
    if data is not None:
        most = getattr(model.config, "max_position_embeddings", None) or 1024
        text = Text(open_tokens(data), min(1024, most), tokens, batch=1)
        text.file.check(text.seq_len, vocab_size(model))
    write = {"gguf": gguf.export, "onnx": onnx.export}[to]
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        type_ = type_ or FORMATS[to][0]
        total = STEPS.get((to, type_), STEPS[to, ""])
        task = bar.add_task(f"export to {to}", total=total, note="")
        done = iter(range(total))

        def tell(step: str) -> None:
            bar.update(task, completed=next(done), note=step)

        tokenizer = opened.tokenizer_file(Path(folder))
        rows = write(model, out, type_, tokenizer, text, prompt or verify.PROMPT, tell)
        bar.update(task, completed=total)
    console.print(verify.table(rows))
    if to == "gguf" and len(rows) == 1:
        console.print("not run in llama.cpp, which is not installed: pip install -e '.[llama]'")
    if rows[-1].text:
        console.print(rows[-1].text)
    console.print(f"written: {out}")


@app.command(
    epilog="Examples:\n\n"
    "twistlm push runs/ticket me/my-ticket --dry-run\n\n"
    "twistlm push runs/ticket me/my-ticket --public"
)
def push(
    ticket: Annotated[Path, typer.Argument(help="A ticket folder.")],
    repo: Annotated[
        str, typer.Argument(metavar="NAME/REPO", help="A model repository of the hub.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is seen by all.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")
    ] = False,
) -> None:
    """Send a ticket to the Hugging Face hub, with its card; it is loaded once, as a check."""
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    from ..system.terminal import console, table
    from ..tickets.deploy import load_ticket

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo!r} names no repository: {error}") from None
    model = load_ticket(ticket)
    files = sorted(path for path in ticket.rglob("*") if path.is_file())
    data = ModelCard.load(ticket / "README.md").data
    shown = table(f"{ticket} -> {repo} ({'public' if public else 'private'})", "file", "bytes")
    for path in files:
        shown.add_row(str(path.relative_to(ticket)), f"{path.stat().st_size:,}")
    console.print(shown)
    console.print(
        f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters; "
        "card: licence "
        f"{data.license or 'not given'}, base model {data.base_model or 'not given'}"
    )
    if dry_run:
        console.print("nothing was sent (--dry-run)")
        return
    hub = HfApi()
    try:
        hub.create_repo(repo, private=not public, exist_ok=True)
        sent = hub.upload_folder(
            repo_id=repo, folder_path=ticket, commit_message="A ticket of twistlm"
        )
    except LocalTokenNotFoundError:
        raise ValueError("the hub knows you not: run `hf auth login` first") from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"the hub refused: {str(error).splitlines()[0]}") from None
    console.print(f"sent: {sent.commit_url}")
