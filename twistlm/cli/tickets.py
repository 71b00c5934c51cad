"""extract, heal, generate, verify, export, push: what is done with tickets."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from ..export import FORMATS, check_target, check_type
from ..fields import N_TOKENS, option, seed_of, words
from ..system.terminal import clean, console, progress, table, waiting
from ..tickets.requests import HealRequest, TicketRequest
from .options import MODEL, app, command


@command(
    app,
    "twistlm extract runs/demo/twist -o ticket --ratio 4/12",
    "twistlm extract runs/wiki -o ticket --params 85M --pick best-of:16 --data data/wiki-test",
    "twistlm extract runs/wiki -o tickets --memory 300MB --latency 12ms --context 1k --device cpu",
    "twistlm extract small/parent -o ticket --params 100M --stock",
    "twistlm extract gpt2 -o ticket --ratio attn=1,ffn=6/12,ffn.5=1 blocks.setting=both",
)
def extract(
    *,
    source: str,
    out: Path = option("Folder of the ticket; several budgets: each has one in it."),
    request: TicketRequest,
    overrides: list[str],
    device: str,
) -> None:
    """Cut the ticket that fits a budget out of a parent, and write it with its proof."""
    from ..tickets import extract

    for folder, ticket in extract.write_tickets(source, out, request, device, overrides):
        console.print(extract.table(ticket))
        if ticket.proof["whole"]:
            console.print("the budget has room for the whole parent: this ticket is all of it")
        console.print(f"ticket: {folder}, {extract.loaded_by(folder)}")


@command(
    app,
    "twistlm heal runs/demo/ticket -o runs/demo/healed --tokens 200k",
    "twistlm heal ticket -o healed --tokens 20M --teacher gpt2 --data data/wiki/train --valid "
    "data/wiki/test train.lr=2e-4 train.batch=16",
)
def heal(request: HealRequest, overrides: list[str], device: str) -> None:
    """Train a ticket for itself, with its parent as a frozen teacher, and write it anew.

    A stopped one goes on where it was when the same command is called again. Learning rate, batch
    and all else are keys of the training config; those of the teacher's run, or of the parent's,
    are taken where there is one.
    """
    from ..tickets import healing

    healed = healing.heal(request, [f"run.device={device}", *overrides])
    console.print(healing.reading(healed))
    console.print(f"ticket: {request.out}")


@command(
    app,
    'twistlm generate runs/demo/ticket --prompt "Return the"',
    'twistlm generate gpt2 --prompt "In the beginning" --temperature 0.8 --top-k 40 --seed 1',
)
def generate(
    *,
    ticket: str = MODEL,
    prompt: str = option("The text to go on from."),
    max_new_tokens: int | None,
    temperature: float | None = option(
        "Draw instead of taking the likeliest token.", None, least=1e-3
    ),
    top_k: int | None = option("Draw among this many likeliest tokens.", None, least=1),
    seed: int = seed_of("the draw"),
    device: str,
) -> None:
    """Write text, token by token as it comes; greedy unless told to draw."""
    from ..tickets.runnable import open_runnable, write_text

    def emit(text: str) -> None:
        print(clean(text), end="", flush=True)

    drawn: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed}
    model = open_runnable(ticket, device)
    write_text(model, prompt, max_new_tokens=max_new_tokens, emit=emit, **drawn)
    sys.stdout.write("\n")


@command(app, "twistlm verify runs/demo/text/train runs/demo/twist runs/demo/ticket")
def verify(
    sources: list[str] = option("Token files, tickets, checkpoints or run folders.", argument=True),
) -> None:
    """Read every byte of files that twistlm wrote and compare it with their sha256.

    Exit codes: 0 all are whole, 2 something is damaged or missing.
    """
    from ..tickets.deploy import verify

    damages = []
    with progress() as bar:
        task = bar.add_task("verify", total=len(sources), note="")
        for source in sources:
            bar.update(task, note=source)
            try:
                for sentence in verify(source):
                    console.print(sentence)
            except ValueError as damage:
                damages.append(str(damage))
            bar.advance(task)
    if damages:
        raise ValueError("; ".join(damages))


@command(
    app,
    "twistlm export runs/ticket --to gguf -o ticket.gguf --data data/test",
    "twistlm export runs/wiki --to onnx -o whole-onnx --type q8",
)
def export(
    source: str = MODEL,
    to: str = option(f"{words(FORMATS)}: for llama.cpp, for onnxruntime."),
    out: Path = option("GGUF file or ONNX folder to write."),
    type_: str | None = option(
        "; ".join(f"{to}: {words(types)}" for to, types in FORMATS.items())
        + ". The default is the first.",
        None,
        "--type",
    ),
    data: str | None = option("Token file: compare perplexity, too.", None),
    tokens: int = option(N_TOKENS, 8192, least=0),
    prompt: str | None = option("Text that torch and the runtime both continue.", None),
) -> None:
    """Write a ticket, or the whole model of a run, as GGUF or ONNX, and compare it with torch on
    the spot.
    """
    if to not in FORMATS:
        raise ValueError(f"--to {to}: a ticket is exported to {words(FORMATS)}")
    type_ = type_ or FORMATS[to][0]
    check_type(to, type_)
    check_target(to, out)
    from ..data.builtin import resolve
    from ..data.token_file import open_tokens
    from ..export import gguf, onnx, verify
    from ..tickets.parent import default_seq_len
    from ..tickets.runnable import open_runnable
    from ..tickets.text import text_for

    file, text = open_tokens(resolve(data, "valid")) if data else None, None
    opened = open_runnable(source, "cpu")
    model = opened.model.float()  # a ticket saved in bfloat16 is compared, and written, exactly
    write = {"gguf": gguf.export, "onnx": onnx.export}[to]
    with tempfile.TemporaryDirectory() as folder, waiting.status(f"export to {to}"):
        tokenizer = opened.tokenizer_file(Path(folder))
        if file is not None:
            text = text_for(model, file, default_seq_len(model), tokens, tokenizer)
        prompt = verify.PROMPT if prompt is None else prompt
        rows = write(model, out, type_, tokenizer, text, prompt)
    console.print(verify.table(rows))
    if to == "gguf" and len(rows) == 1:
        console.print("not run in llama.cpp, which is not installed: pip install -e '.[llama]'")
    if rows[-1].text:
        console.print(rows[-1].text)
    console.print(f"written: {out}")


@command(
    app,
    "twistlm push runs/ticket me/my-ticket --dry-run",
    "twistlm push runs/ticket me/my-ticket --public",
)
def push(
    ticket: Path = option("A ticket folder.", argument=True),
    repo: str = option("A model repository of the hub.", metavar="NAME/REPO", argument=True),
    public: bool = option("A new repository is seen by all.", False),
    dry_run: bool = option("Say what would be sent, and send nothing.", False),
) -> None:
    """Send a ticket to the Hugging Face hub, with its card; it is loaded once, as a check."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    from ..tickets.deploy import load_ticket

    validate_repo_id(repo)
    load_ticket(ticket)
    shown = table(f"{ticket} -> {repo} ({'public' if public else 'private'})", "file", "bytes")
    for path in sorted(path for path in ticket.rglob("*") if path.is_file()):
        shown.add_row(str(path.relative_to(ticket)), f"{path.stat().st_size:,}")
    console.print(shown)
    if dry_run:
        console.print("nothing was sent (--dry-run)")
        return
    hub, note = HfApi(), "A ticket of twistlm"
    try:
        hub.create_repo(repo, private=not public, exist_ok=True)
        sent = hub.upload_folder(repo_id=repo, folder_path=ticket, commit_message=note)
    except LocalTokenNotFoundError:
        raise ValueError("the hub knows you not: run `hf auth login` first") from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"the hub refused: {str(error).splitlines()[0]}") from None
    console.print(f"sent: {sent.commit_url}")
