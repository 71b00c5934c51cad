"""demo, prepare, train, eval, plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..tickets.requests import CertificateRequest, ScoreRequest
from .options import (
    ANY_MODEL,
    AutoResume,
    Device,
    JsonOut,
    Overrides,
    Preset,
    Resume,
    app,
    draws_of,
    is_given,
    known,
    out_option,
    with_requests,
    write_json,
)

NO_RAY = (  # it ends a process whose node or head is lost, without a word
    "Ray is gone: its head, or its process on this machine, died; start them again, and the run "
    "with --resume; "
    "the last checkpoint is unharmed"
)


@app.command(
    epilog="Examples:\n\ntwistlm demo\n\ntwistlm demo --out runs/tiny train.rounds=20 "
    "model.config.n_layer=2"
)
def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path(
        "runs/demo"
    ),
    n: Annotated[int, draws_of("Random subnets behind each number.", 2)] = 20,
) -> None:
    """Train a small GPT-2 twice on text that ships with Python, and compare random subnets.

    About 4 minutes on two CPU cores, no download.
    """
    from .. import config

    config.load("demo", overrides or [])  # a mistake there is told before torch is imported
    from ..demo import run

    run(out, n, overrides or [])


@app.command(
    epilog="Examples:\n\n"
    "twistlm prepare wiki/*.parquet -o data/wiki-train --tokenizer gpt2\n\n"
    "twistlm prepare book.txt -o data/book --tokenizer path/to/tokenizer.json\n\n"
    "twistlm prepare hub:Salesforce/wikitext:wikitext-103-raw-v1:train -o data/wt103 --tokenizer "
    "gpt2\n\n"
    "twistlm prepare -o data/wiki-train --teacher gpt2-medium --top 64   # then train.teacher=cache"
)
def prepare(
    out: Annotated[Path, out_option("Stem of the token file to write, or to teach from.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help=".txt, .jsonl or .parquet files, or hub:NAME[:CONFIG[:SPLIT]]; none with "
            "--teacher: the token file is there.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="tokenizer.json, a folder with one, a hub id, or gguf:FILE.")
    ] = "gpt2",
    column: Annotated[str, typer.Option(help="Text column of .jsonl and .parquet.")] = "text",
    eos: Annotated[
        str | None, typer.Option(help="Token after each document; default: the tokenizer's own.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="A model with this tokenizer: store what it predicts beside the tokens."),
    ] = None,
    top: Annotated[
        int, typer.Option(help="Likeliest tokens that are stored of each prediction, 4 bytes each.")
    ] = 64,
    seq_len: Annotated[
        int, typer.Option(help="Tokens that the teacher reads at a time: data.seq_len of the run.")
    ] = 1024,
    device: Device = "auto",
) -> None:
    """Turn text into a memory-mapped token file (STEM.bin, STEM.json, STEM.tokenizer.json).

    With --teacher also STEM.teacher.bin and .json: what train.teacher = "cache" learns from.
    Stopped while it makes them, the same command with -o and --teacher alone goes on.
    """
    if not sources and not teacher:
        raise ValueError(
            "nothing to prepare: name files of text, or --teacher for a token file that is there"
        )
    from ..data.builtin import resolve
    from ..data.prepare import prepare
    from ..data.token_file import open_tokens
    from ..system.terminal import console

    if sources:
        file = prepare(sources, out, tokenizer, column=column, eos=eos)
        console.print(
            f"{file.stem}.bin: {file.meta.n_tokens:,} tokens of {file.meta.n_documents:,} "
            "documents, "
            f"vocabulary {file.meta.vocab_size:,}"
        )
    else:
        file = open_tokens(resolve(str(out), "train"))
    if teacher:
        from ..training.teacher import write_cache

        cache = write_cache(file, teacher, top, seq_len, device)
        console.print(
            f"{file.stem}.teacher.bin: the {top} likeliest tokens of {teacher} for "
            f"{len(cache.records):,} sequences of {seq_len:,} tokens, "
            f"{cache.records.nbytes / 1e6:,.1f} MB"
        )


@app.command(
    epilog="Examples:\n\n"
    "twistlm train demo\n\n"
    "twistlm train wiki-gpt2 data.train=data/wiki-train data.valid=data/wiki-test train.lr=5e-4\n\n"
    "twistlm train runs/wiki-gpt2 --resume\n\n"
    "twistlm train my.toml --resume --minutes 9\n\n"
    "torchrun --nproc-per-node 4 -m twistlm train demo run.variant=hybrid"
)
def train(
    preset: Preset,
    overrides: Overrides = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    minutes: Annotated[
        float, typer.Option(min=0, help="Save and stop after this time; 0: never.")
    ] = 0,
) -> None:
    """Train a parent in TwIST rounds (or a control: data parallel, structured dropout)."""
    import time

    from .. import config

    cfg = config.load(preset, overrides or [])  # a mistake there is told before torch is imported
    if not (resume or auto_resume):
        _check_start(cfg.model.weights, preset)
    from ..system import signals

    signals.end_with_launcher()  # also while the imports that follow take their time
    with signals.apart(NO_RAY) if cfg.run.variant == "ray" else nullcontext():
        from ..system.terminal import console
        from ..training import checkpoint, rounds
        from ..transport.ranks import on_central_rank

        there = checkpoint.numbered(Path(cfg.run.out) / "checkpoints")
        if resume and on_central_rank() and not there:
            raise ValueError(
                f"run.out = {cfg.run.out!r}: there is no checkpoint to resume; to start the run, "
                f"leave out --resume, or say --auto-resume, which starts it where there is none"
            )
        deadline = time.monotonic() + 60 * minutes
        is_late = (lambda: time.monotonic() >= deadline) if minutes else None
        last = rounds.train(cfg, resume=resume or auto_resume, is_late=is_late)
        if on_central_rank():
            console.print(f"checkpoint: {last}")


def _check_start(weights: str, preset: str) -> None:
    """A start that a preset takes from a run of yours, not there yet: say how to make it."""
    if weights.startswith("runs/") and not Path(weights).exists():
        raise ValueError(
            f"model.weights = {weights!r}: there is no such run yet; make this start with `twistlm "
            f"train {preset} model.weights=random train.method=dense train.teacher=none "
            f"run.out={weights}`, or take a pretrained model of the same type"
        )


@app.command(
    name="eval",
    epilog="Examples:\n\n"
    "twistlm eval runs/demo/twist --ratio 6/12 --ratio 3/12 --n 20\n\n"
    "twistlm eval runs/wiki/checkpoints/round-000400 --ratio attn=2/3,ffn=6/12 --data "
    "data/wiki-test\n\n"
    "twistlm eval runs/demo/ticket --data runs/demo/text/valid\n\n"
    "twistlm eval gpt2 --data data/wiki-test --tokens 65536 data.seq_len=512 blocks.setting=ffn\n\n"
    "twistlm eval runs/demo/twist --certify --ratio 6/12 --n 200 -o runs/certificate",
)
@with_requests
def eval_(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help=ANY_MODEL)],
    request: ScoreRequest,
    overrides: Overrides = None,
    bound: Annotated[
        bool,
        typer.Option(
            "--certify", help="Bound almost all random tickets of one size; --n is 200 then."
        ),
    ] = False,
    coverage: Annotated[
        float, typer.Option(help="With --certify: share of all tickets to bound.")
    ] = 0.95,
    confidence: Annotated[
        float, typer.Option(help="With --certify: how sure the bound must be.")
    ] = 0.99,
    out: Annotated[
        Path | None,
        out_option(
            "With --certify: folder for JSON and histogram; every ticket's number is kept "
            "there as it comes, so the same command goes on after a stop, or with a larger --n.",
        ),
    ] = None,
    device: Device = "auto",
    json_out: JsonOut = None,
) -> None:
    """Perplexity of the full model (no scale) and of random subnets (scaled), or of a ticket.

    With --certify: how good random tickets of one size are, and a bound on almost all of them
    that assumes nothing about the distribution (it is one of the measured values in order).
    """
    more, ratios = known(overrides), request.ratios
    if bound and len(ratios) > 1:
        raise ValueError(f"--certify takes one --ratio, not {len(ratios)}: {', '.join(ratios)}")
    if out is not None and not bound:
        raise ValueError(f"--out {out} is for --certify; numbers are written with --json FILE")
    from ..system.terminal import console
    from ..tickets import certify, score
    from ..tickets.parent import open_parent, what_is

    text: dict[str, Any] = {"data": request.data, "tokens": request.tokens}
    if bound:
        sure: dict[str, Any] = {"coverage": coverage, "confidence": confidence}
        n = request.n if is_given(context, "n") else CertificateRequest.n
        asked = CertificateRequest(ratio=ratios[0], n=n, seed=request.seed, **text, **sure)
        made = certify.certify(open_parent(source, device, more), asked, out)
        console.print(certify.table(made))
        console.print(certify.reading(made))
        write_json(json_out, made.to_dict())
        return
    if what_is(source) == "ticket":
        if is_given(context, "ratios"):
            raise ValueError(f"--ratio {ratios[0]}: {source} is a ticket, which is cut already")
        scores = score.score_ticket(Path(source), **text, device=device, overrides=more)
    else:
        scores = score.score_parent(open_parent(source, device, more), request, Path(source).name)
    console.print(score.table([scores]))
    write_json(json_out, scores.to_dict())


@app.command(
    epilog="Examples:\n\n"
    "twistlm plan paper\n\n"
    "twistlm plan wiki-gpt2 blocks.setting=attn train.rounds=500\n\n"
    "twistlm plan paper run.wire=int8 train.n_workers=16 --gbit 10 --tflops 0.1"
)
def plan(
    preset: Preset,
    overrides: Overrides = None,
    gbit: Annotated[float, typer.Option(help="Speed of every worker's link, Gbit/s.")] = 1.0,
    tflops: Annotated[
        float, typer.Option(help="Speed of a worker, TFLOP/s (`twistlm lab bench train`).")
    ] = 100.0,
    json_out: JsonOut = None,
) -> None:
    """Hours here, memory, parameters, bytes, rounds and the busiest link, before training."""
    from .. import config

    cfg = config.load(preset, overrides or [])
    from ..training.plan import make, show

    made = make(cfg, gbit, tflops)
    show(made, cfg)
    write_json(json_out, asdict(made))
