"""`twistlm demo`: one start trained on in two ways, and what is left of each when blocks go missing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from . import config
from .compute.perplexity import perplexity
from .config import Config, Method
from .data.builtin import build
from .model.blocks import widths_of_ratio
from .system.provenance import describe_run
from .system.signals import Ended
from .system.terminal import console, progress
from .tickets import deploy
from .tickets.parent import Parent, open_parent
from .tickets.pick import AUTO, pick_blocks, pick_for
from .tickets.score import ScoreRequest, Scores, score_parent, table, text_of
from .tickets.ticket_scale import TicketScales, choice_text, random_tickets
from .training import checkpoint, rounds

# name -> method, and its share of the start's rate: data parallel likes half, fresh masks all of it
PARENTS: dict[str, tuple[Method, float]] = {
    "data parallel": ("dense", 0.5),
    "TwIST": ("twist", 1.0),
}
START = 3  # times as long as each way: nobody cuts a model that has hardly learnt, and it is the teacher
TICKET = "6/12"
PROMPT = "Return the"
CHOICE_TOKENS = 4096  # that an activation scale is chosen on
SAVE_EVERY = 25  # rounds: what a stopped demo loses at most
FAILURES = {2: ValueError, 3: OSError, 4: FloatingPointError}  # by exit code of a training
GRACE = 30  # seconds for a training to end its round


def run(out: Path, n: int, overrides: list[str]) -> None:
    """Corpus, a start, two trainings from it side by side, the table, one ticket, one line of text."""
    began = time.perf_counter()
    cfg = config.load("demo", overrides)
    if cfg.train.rounds < 1 or not cfg.run.eval_ratios:
        raise ValueError(
            f"train.rounds = {cfg.train.rounds}, run.eval_ratios = {list(cfg.run.eval_ratios)}: the demo needs at "
            f"least one round and one ratio"
        )
    goes_on = _prepare(out, cfg)
    files = build(out / "text")
    start = replace(
        cfg,
        data=replace(cfg.data, train=files["train"].stem, valid=files["valid"].stem),
        train=replace(cfg.train, method="dense", rounds=START * cfg.train.rounds),
        run=replace(
            cfg.run, out=str(out / "start"), threads=1, eval_every=-1, save_every=SAVE_EVERY
        ),
    )
    t, sizes = cfg.train, cfg.blocks.mask_ffn or cfg.blocks.k_ffn
    trained = out / "start/checkpoints" / checkpoint.folder_name(START * t.rounds)
    configs = {
        name: replace(
            start,
            model=replace(cfg.model, weights=str(trained)),
            train=replace(
                t, method=method, teacher="start" if method == "twist" else "none", lr=t.lr * factor
            ),
            run=replace(start.run, out=str(out / method), seed=cfg.run.seed + 1),  # other batches
        )
        for name, (method, factor) in PARENTS.items()
    }
    n_tokens = t.rounds * t.interval * t.n_workers * t.batch * cfg.data.seq_len
    console.print(
        f"a {cfg.model.config['n_layer']}-layer GPT-2 with {cfg.model.config['n_head']} heads and {cfg.blocks.n_ffn} "
        f"FFN blocks in every layer: {START * n_tokens:,} tokens of data parallel, then {n_tokens:,} in two ways, with "
        f"S = {t.n_workers} workers: data parallel, and TwIST with subnets of "
        f"{', '.join(map(str, sorted(set(sizes), reverse=True)))} blocks and the start as "
        f"teacher"
    )
    if goes_on:
        console.print("an earlier demo was stopped: going on from its checkpoints")
    train_side_by_side({"start": start})
    train_side_by_side(configs)
    request = ScoreRequest(ratios=cfg.run.eval_ratios, n=n, tokens=cfg.run.eval_tokens)
    scores = []
    for name, made in configs.items():
        parent, scale = best_scaled(open_parent(made.run.out, "cpu"), request)
        scores.append(replace(score_parent(parent, request, name), scale=scale))
    console.print(table(scores))
    console.print(reading(scores))
    (out / "scores.json").write_text(json.dumps([s.to_dict() for s in scores], indent=1) + "\n")
    write_ticket(parent, out / "ticket", cfg.run.eval_tokens)
    console.print(f"everything is in {out}/   ({time.perf_counter() - began:.0f} s)")


def _prepare(out: Path, cfg: Config) -> bool:
    """A folder for the demo; true if it holds an unfinished one of the same config, which is kept.

    A finished demo, or one of another config, is replaced; anything else is left alone.
    """
    mark, asked = out / "demo.json", json.loads(json.dumps(config.to_dict(cfg)))
    if out.exists() and any(out.iterdir()):
        if not mark.is_file():
            raise ValueError(
                f"--out {out} is not empty and was not made by the demo: choose another folder"
            )
        before = json.loads(mark.read_text()).get("config")
        if before == asked and not (out / "scores.json").is_file():
            return any(out.glob("*/checkpoints/round-*"))
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps({"config": asked, **describe_run()}, indent=1) + "\n")
    return False


def train_side_by_side(configs: dict[str, Config]) -> None:
    """One process and one thread per parent: this model is too small to use two threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["twistlm.training.rounds"])  # torch is imported once for all
    jobs: dict[str, BaseProcess] = {}
    sentences: dict[str, Connection] = {}  # what a training that failed has to say
    before = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the processes inherit it: Ctrl-C is ours
    try:
        for name, cfg in configs.items():
            sentences[name], told = context.Pipe(duplex=False)
            args = (config.to_dict(cfg), told)
            jobs[name] = context.Process(target=_train, args=args, daemon=True)
            jobs[name].start()
            told.close()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        _watch(configs, jobs)
    except KeyboardInterrupt:
        for job in jobs.values():  # each ends its round and saves
            if job.is_alive():
                job.terminate()
        for job in jobs.values():
            job.join(GRACE)
        raise Ended("stopped by Ctrl-C", 130) from None
    for name, job in jobs.items():
        job.join()
        if job.exitcode in FAILURES:
            raise FAILURES[job.exitcode](sentences[name].recv_bytes().decode())
        if job.exitcode != 0:
            raise Ended(f"training {name} failed (exit code {job.exitcode})", 1)


def _watch(configs: dict[str, Config], jobs: dict[str, BaseProcess]) -> None:
    """Bars of trainings in other processes, until all have ended."""
    with progress() as bar:
        tasks = {
            name: bar.add_task(f"train {name}", total=cfg.train.rounds, note="starting")
            for name, cfg in configs.items()
        }
        while any(job.is_alive() for job in jobs.values()):
            time.sleep(0.5)
            for name, cfg in configs.items():
                _follow(bar, tasks[name], Path(cfg.run.out) / "metrics.jsonl")


def _train(table: dict, told: Connection) -> None:
    os.setpgid(0, 0)  # a Ctrl-C in the terminal reaches the demo alone, which passes it on once
    cfg = config.from_dict(table)
    try:
        rounds.train(cfg, resume=True, quiet=True)
    except Ended as end:
        sys.exit(end.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except tuple(FAILURES.values()) as error:
        told.send_bytes(str(error).encode())
        sys.exit(next(code for code, kind in FAILURES.items() if isinstance(error, kind)))


def _follow(bar, task, metrics: Path) -> None:
    """Move a bar to the last complete line of a metrics file that another process writes."""
    if not metrics.is_file():
        return
    lines = metrics.read_text().split("\n")[:-1]
    if lines:
        row = json.loads(lines[-1])
        bar.update(task, completed=row["round"], note=f"loss {row['loss']:.3f}")


def reading(scores: list[Scores]) -> str:
    """One sentence under the table, from its own numbers."""
    dense, twist = scores
    small = -1
    d, t = dense.subnets[small], twist.subnets[small]
    wins = [b.ratio for a, b in zip(dense.subnets, twist.subnets, strict=True) if b.mean < a.mean]
    nested = f", {twist.nested[small]:.1f} for the nested one" if twist.nested else ""
    return (
        f"With {d.ratio} of the blocks the data-parallel parent has {d.mean:.1f} where it had {dense.full:.1f}, the TwIST "
        f"parent {t.mean:.1f}{nested}, where it had {twist.full:.1f}. TwIST's random tickets win at "
        f"{', '.join(wins) or 'no size'}; the whole TwIST model is {twist.full / dense.full:.2f} times data parallel's."
    )


def best_scaled(parent: Parent, request: ScoreRequest) -> tuple[Parent, str]:
    """The parent with the activation scale that suits its tickets best on other text."""
    text, block_map = text_of(parent, None, request.tokens), parent.block_map
    choice = choice_text(text, parent.cfg.data)
    assert choice is not None
    choice = replace(choice, max_tokens=min(CHOICE_TOKENS, choice.max_tokens))
    scales, held_out = TicketScales(parent, text, choice), []
    for ratio in request.ratios:
        widths = widths_of_ratio(block_map, ratio)
        held_out += random_tickets(block_map, widths, n=request.n, seed=request.seed)[1]
    chosen, _ = scales.best(held_out)
    return scales.parent_with(chosen), str(chosen)


def write_ticket(parent: Parent, folder: Path, n_tokens: int) -> None:
    """Extract the ticket that `extract` would take, load it back from disk and let it write."""
    seed = parent.cfg.run.seed
    widths = widths_of_ratio(parent.block_map, TICKET)
    blueprint, _ = pick_blocks(parent, widths, pick_for(parent, AUTO), seed=seed)
    text = text_of(parent, None, n_tokens)
    model = deploy.cut_ticket(parent, blueprint)
    found = perplexity(model, text, parent.cfg.train.precision)
    notes = {"perplexity": {"ticket": found, "n_tokens": text.n_sequences * text.seq_len}}
    deploy.save_model(parent, blueprint, model, folder, notes)
    ticket: Any = deploy.load_ticket(folder)
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tok.encode(PROMPT).ids])
    torch.manual_seed(seed)
    written = ticket.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=True,
        top_k=10,
        temperature=0.6,
        pad_token_id=0,
    )
    n_params = sum(p.numel() for p in ticket.parameters())
    said = tok.decode(written[0].tolist()).replace("\n", " ")
    console.print(
        f"a ticket with {TICKET} of the blocks ({n_params:,} parameters, dense, perplexity {found:.2f}) writes:"
    )
    console.print(said, style="italic", markup=False, highlight=False)
