"""shrink, demo, prepare, train, eval, plan."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from .. import config
from ..fields import option
from ..system import signals
from ..system.terminal import console
from ..tickets.requests import ScoreRequest, ShrinkRequest, amount
from .options import ANY_MODEL, app, command, show, split_sources

NO_RAY = (  # it ends a process whose node or head is lost, without a word
    "Ray is gone: its head, or its process on this machine, died; start them again, and the run "
    "with --resume; the last checkpoint is unharmed"
)
COVERAGE, CONFIDENCE = 0.95, 0.99


@command(
    app,
    "twistlm shrink HuggingFaceTB/SmolLM2-135M --text book.txt --to 100M --to 80M -o small",
    "twistlm shrink gguf:model.gguf --text code/:0.7 --text wiki.parquet:0.3 --to 350M "
    "--tokens 50M --gguf q8_0 -o small",
    "twistlm shrink model/ --text notes.jsonl --memory 2GB --context 8k --hours 2 -o small",
)
def shrink(request: ShrinkRequest, overrides: list[str]) -> None:
    """Train a model on text so that it works at the sizes asked for, and write a ticket of each.

    Blocks, masks, teacher, rate and rounds are chosen, and written to OUT/train.toml. The tickets
    are plain models of the family. The last 2% of every text are held out to measure on. A stopped
    one goes on where it was when the same command is called again.
    """
    from .. import shrinking

    rows = shrinking.run(replace(request, overrides=tuple(overrides)))
    console.print(shrinking.table(rows))
    console.print(f"tickets: {', '.join(str(row.folder) for row in rows[2:])}")


@command(app, "twistlm demo", "twistlm demo -o runs/tiny train.rounds=20 model.config.n_layer=2")
def demo(
    overrides: list[str],
    out: Path = option("Folder for everything the demo makes.", Path("runs/demo")),
    n: int = option("Random subnets behind each number.", 20, "--n", least=2, most=10**6),
) -> None:
    """Train a small GPT-2 twice on text that ships with Python, and compare random subnets.

    About 4 minutes on two CPU cores, no download.
    """
    config.load("demo", overrides)  # a mistake there is told before torch is imported
    from ..demo import run

    run(out, n, overrides)


@command(
    app,
    "twistlm prepare wiki/*.parquet -o data/wiki-train --tokenizer gpt2",
    "twistlm prepare hub:Salesforce/wikitext:wikitext-103-raw-v1:train -o data/wt103",
    "twistlm prepare -o data/wiki-train --teacher gpt2-medium --top 64",
)
def prepare(
    *,
    out: Path = option("Stem of the token file to write, or to teach from."),
    sources: list[str] | None = option(
        "Files of text or sources, .jsonl, .parquet, folders of them, or "
        "hub:NAME[:CONFIG[:SPLIT]]; none with --teacher: the token file is there.",
        None,
        argument=True,
    ),
    tokenizer: str = option("tokenizer.json, a folder with one, a hub id, or gguf:FILE.", "gpt2"),
    column: str = option("Text column of .jsonl and .parquet.", "text"),
    eos: str | None = option("Token after each document; default: the tokenizer's own.", None),
    teacher: str | None = option(
        "A model with this tokenizer: store what it predicts beside the tokens.", None
    ),
    top: int = option("Likeliest tokens that are stored of each prediction, 4 bytes each.", 64),
    seq_len: int = option("Tokens that the teacher reads at a time: the run's data.seq_len.", 1024),
    device: str,
) -> None:
    """Turn text into a memory-mapped token file (STEM.bin, STEM.json, STEM.tokenizer.json).

    With --teacher also STEM.teacher.bin and .json: what train.teacher = "cache" learns from.
    Stopped while it makes them, the same command with -o and --teacher alone goes on.
    """
    if not sources and not teacher:
        raise ValueError("nothing to prepare: name files of text, or a --teacher of what is there")
    from ..data.builtin import resolve
    from ..data.prepare import prepare
    from ..data.token_file import open_tokens

    if sources:
        file = prepare(sources, out, tokenizer, column=column, eos=eos)
        console.print(
            f"{file.stem}.bin: {file.meta.n_tokens:,} tokens of {file.meta.n_documents:,} "
            f"documents, vocabulary {file.meta.vocab_size:,}"
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


@command(
    app,
    "twistlm train demo",
    "twistlm train wiki-gpt2 data.train=data/wiki-train data.valid=data/wiki-test train.lr=5e-4",
    "twistlm train runs/wiki-gpt2 --resume",
    "torchrun --nproc-per-node 4 -m twistlm train demo run.variant=hybrid",
)
def train(
    preset: str,
    overrides: list[str],
    resume: bool = option("Go on from the newest valid checkpoint.", False),
    auto_resume: bool = option(
        "Resume, or start where there is no checkpoint: for jobs that a scheduler restarts.", False
    ),
    minutes: float = option("Save and stop after this time; 0: never.", 0, least=0),
) -> None:
    """Train a parent in TwIST rounds (or a control: data parallel, structured dropout)."""
    cfg = config.load(preset, overrides)  # a mistake there is told before torch is imported
    start = cfg.model.weights
    if not (resume or auto_resume) and start.startswith("runs/") and not Path(start).exists():
        raise ValueError(
            f"model.weights = {start!r}: there is no such run yet; make it with `twistlm train "
            f"{preset} model.weights=random train.method=dense train.teacher=none train.lr=1e-3 "
            f"run.out={start}`"
        )
    signals.end_with_launcher()  # also while the imports that follow take their time
    with signals.apart(NO_RAY) if cfg.run.variant == "ray" else nullcontext():
        from ..training import checkpoint, rounds
        from ..transport.ranks import on_central_rank

        there = checkpoint.numbered(Path(cfg.run.out) / "checkpoints")
        if resume and on_central_rank() and not there:
            said = f"run.out = {cfg.run.out!r}: there is no checkpoint to resume"
            raise ValueError(f"{said}; leave out --resume, or say --auto-resume, which may start")
        deadline = time.monotonic() + 60 * minutes
        is_late = (lambda: time.monotonic() >= deadline) if minutes else None
        last = rounds.train(cfg, resume=resume or auto_resume, is_late=is_late)
        if on_central_rank():
            console.print(f"checkpoint: {last}")


@command(
    app,
    "twistlm eval runs/demo/twist --ratio 6/12 --ratio 3/12 --n 20",
    "twistlm eval runs/demo/ticket --data runs/demo/text/valid",
    "twistlm eval gpt2 --data data/wiki-test --tokens 65536 data.seq_len=512",
    "twistlm eval runs/demo/twist --certify --ratio 6/12 --n 200 --json certificate.json",
    "twistlm eval runs/wiki-gpt2 --ratio 8/12 --ratio 6/12 --tasks arc_easy,piqa,hellaswag",
)
def eval_(
    sources: list[str] = option(
        f"{ANY_MODEL} Several are for --tasks.",
        metavar="SOURCE... [SECTION.KEY=VALUE]...",
        argument=True,
    ),
    *,
    request: ScoreRequest,
    tasks: str | None = option(
        "Zero-shot tasks by comma, instead of perplexity: names of lm-eval's (extra `tasks`), "
        "files (.jsonl, .jsonl.gz) or folders of them. With --ratio also for tickets: the nested "
        "one of each ratio, or a random one.",
        None,
    ),
    bound: bool = option("Bound almost all random tickets of one size.", False, "--certify"),
    coverage: float = option("With --certify: share of all tickets to bound.", COVERAGE),
    confidence: float = option("With --certify: how sure the bound must be.", CONFIDENCE),
    device: str,
    json_out: Path | None,
) -> None:
    """Perplexity of the full model (no scale) and of random subnets (scaled), or of a ticket.

    Without --ratio a model that was not trained here is measured as it is.
    With --tasks: accuracies, and bits per byte of right answers, with standard errors.
    With --certify: how good random tickets of one size are, and a bound on almost all of them
    that assumes nothing about the distribution (it is one of the measured values in order).
    """
    (source, *others), more = split_sources(sources)
    ratios = request.ratios
    if not bound and (coverage, confidence) != (COVERAGE, CONFIDENCE):
        raise ValueError("--coverage and --confidence are those of a bound: give --certify, too")
    if tasks is not None:
        if bound:
            raise ValueError("--certify bounds perplexities: leave --tasks out")
        if request.n or request.data or request.tokens:
            raise ValueError("--tasks bring their own text: leave --n, --data and --tokens out")
        from ..tickets import tasks as zero_shot

        opened = zero_shot.open_tasks(tasks)
        models = zero_shot.models_of([source, *others], ratios, request.seed, device, more)
        rows = list(zero_shot.score_tasks(models, opened))
        return show(zero_shot.record(rows), json_out, zero_shot.table(rows))
    if others:
        raise ValueError(f"{others[0]}: perplexity is measured for one model at a time")
    if bound and len(ratios) > 1:
        raise ValueError(f"--certify takes one --ratio, not {len(ratios)}: {', '.join(ratios)}")
    from ..tickets import score
    from ..tickets.parent import open_parent, what_is

    kind, said = what_is(source), []
    if kind == "ticket" and ratios:
        raise ValueError(f"--ratio {ratios[0]}: {source} is a ticket, which is cut already")
    if bound:
        request = replace(request, n=request.n or score.N_CERTIFIED)
        score.rank(request.n, coverage, confidence)  # too few are refused before the model loads
    if kind == "checkpoint" or ratios or bound:
        parent = open_parent(source, device, more)
        if bound:
            request = replace(request, ratios=ratios or score.usual_ratios(parent)[:1])
        scores = score.score_parent(parent, request, Path(source).name)
    else:
        scores = score.score_whole(source, request, device, more)
        said += [f"--n {request.n}: no --ratio, no random subnets"] if request.n else []
    record = scores.to_dict()
    if bound:
        made = score.certificate(scores.subnets[0].values, coverage, confidence)
        record["certificate"], said = made, [score.reading(made)]
    show(record, json_out, score.table([scores]), *said)


@command(
    app,
    "twistlm plan paper",
    "twistlm plan paper run.wire=int8 train.n_workers=16 --gbit 10 --tflops 0.1",
    "twistlm plan paper --memory 2.5GB --memory 8GB",
)
def plan(
    *,
    preset: str,
    overrides: list[str],
    gbit: float = option("Speed of every worker's link, Gbit/s.", 1.0),
    tflops: float = option("Speed of a worker, TFLOP/s (`twistlm lab bench train`).", 100.0),
    memory: list[str] | None = option(
        "Memory of a worker: says which K `twistlm node --memory` would take. Repeatable.", None
    ),
    json_out: Path | None,
) -> None:
    """Memory, parameters, bytes, rounds and the busiest link, before training."""
    cfg = config.load(preset, overrides)
    rooms = [int(amount("size", each, "--memory")) for each in memory or ()]
    from ..training import plan

    made = plan.make(cfg, gbit, tflops, rooms)
    plan.show(made, cfg)
    show(made, json_out)
