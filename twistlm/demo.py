"""`twistlm demo`: one start, trained on in two ways, and what is left when blocks go missing."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import config
from .config import Config, Method
from .data.builtin import build
from .model.blocks import widths_of_ratio
from .system.device import cpu_threads
from .system.provenance import describe_run
from .system.terminal import console
from .tickets.extract import make_ticket
from .tickets.parent import Parent, open_parent
from .tickets.requests import ScoreRequest, TicketRequest
from .tickets.runnable import open_runnable, write_text
from .tickets.score import Scores, score_parent, table
from .tickets.text import text_of
from .tickets.ticket_scale import TicketScales, choice_text, random_tickets
from .training import checkpoint, rounds

# name -> method, and its share of the start's rate: data parallel likes half, fresh masks all of it
PARENTS: dict[str, tuple[Method, float]] = {
    "data parallel": ("dense", 0.5),
    "TwIST": ("twist", 1.0),
}
# times as long as each way: nobody cuts a model that has hardly learnt, and it is the teacher
START = 3
TICKET = "6/12"
PROMPT = "Return the"
CHOICE_TOKENS = 4096  # that an activation scale is chosen on
SAVE_EVERY = 25  # rounds: what a stopped demo loses at most


@cpu_threads(1)  # of so small a model two wait for each other, on a busy machine for long
def run(out: Path, n: int, overrides: list[str]) -> None:
    """Text, a start, two trainings from it, the table, a ticket, a line of text."""
    began = time.perf_counter()
    cfg = config.load("demo", overrides)
    if cfg.train.rounds < 1 or not cfg.run.eval_ratios:
        raise ValueError(
            f"train.rounds = {cfg.train.rounds}, run.eval_ratios = {list(cfg.run.eval_ratios)}: "
            "the demo needs at least one round and one ratio"
        )
    _prepare(out, cfg)
    files = build(out / "text")
    t = cfg.train
    start = config.override(
        cfg,
        [f"data.{split}={file.stem}" for split, file in files.items()]
        + ["train.method=dense", f"train.rounds={START * t.rounds}", f"run.out={out}/start"]
        + ["run.threads=1", "run.eval_every=-1", f"run.save_every={SAVE_EVERY}"],
    )
    trained = out / "start/checkpoints" / checkpoint.folder_name(START * t.rounds)
    configs = {}
    for name, (method, share) in PARENTS.items():
        own = [f"model.weights={trained}", f"run.out={out}/{method}", f"train.method={method}"]
        own += ["train.teacher=start"] if method == "twist" else ["train.teacher=none"]
        own += [f"train.rounds={t.rounds}", f"train.lr={t.lr * share}"]
        own += [f"run.seed={cfg.run.seed + 1}"]  # other batches
        configs[name] = config.override(start, own)
    n_tokens = t.rounds * t.interval * t.n_workers * t.batch * cfg.data.seq_len
    console.print(
        f"a {cfg.model.config['n_layer']}-layer GPT-2: {START * n_tokens:,} tokens of data "
        f"parallel, then {n_tokens:,} in two ways, with S = {t.n_workers} workers: data parallel, "
        "and TwIST with the start as teacher"
    )
    for each in (start, *configs.values()):
        rounds.train(each, resume=True)
    request = ScoreRequest(ratios=cfg.run.eval_ratios, n=n, tokens=cfg.run.eval_tokens)
    scores = []
    for name, made in configs.items():
        parent, scale = best_scaled(open_parent(made.run.out, "cpu"), request)
        scores.append(replace(score_parent(parent, request, name), scale=scale))
    console.print(table(scores))
    console.print(reading(scores))
    (out / "scores.json").write_text(json.dumps([s.to_dict() for s in scores], indent=1) + "\n")
    show_ticket(parent, out / "ticket", cfg.run.eval_tokens)
    console.print(
        f"\neverything is in {out}/ ({time.perf_counter() - began:.0f} s); try\n"
        f"  twistlm extract {out}/twist -o my-ticket --ratio 4/12\n"
        f'  twistlm generate my-ticket --prompt "{PROMPT}"'
    )


def _prepare(out: Path, cfg: Config) -> None:
    """A folder for the demo: an unfinished one of the same config goes on.

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
            return
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps({"config": asked, **describe_run()}, indent=1) + "\n")


def reading(scores: list[Scores]) -> str:
    """The table in words, for somebody who has never seen one."""
    dense, twist = scores
    d, t = dense.subnets[-1], twist.subnets[-1]
    wins = [b.ratio for a, b in zip(dense.subnets, twist.subnets, strict=True) if b.mean < a.mean]
    nested = f" ({twist.nested[-1]:.1f} for the nested ticket)" if twist.nested else ""
    return (
        "How to read it: each row keeps so many of the blocks of every layer and throws the rest "
        "away, without further training; lower is better.\n"
        f"- With {d.ratio} of the blocks, the data-parallel model goes from {dense.full:.1f} to "
        f"{d.mean:.1f}, the TwIST model from {twist.full:.1f} to {t.mean:.1f}{nested}.\n"
        f"- Random tickets of the TwIST model are better at {', '.join(wins) or 'no size'}.\n"
        f"- The price: whole, the TwIST model has {twist.full / dense.full:.2f} times the "
        "perplexity of the data-parallel one."
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


def show_ticket(parent: Parent, folder: Path, n_tokens: int) -> None:
    """Extract the ticket that `extract` would take, load it back from disk and let it write."""
    seed = parent.cfg.run.seed
    request = TicketRequest(ratio=(TICKET,), seed=seed, tokens=n_tokens)
    made = make_ticket(parent, request, quiet=True)
    made.save(folder)
    said: list[str] = []
    ticket = open_runnable(folder, "cpu")
    drawn: dict[str, Any] = {"temperature": 0.6, "top_k": 10, "seed": seed}
    write_text(ticket, PROMPT, max_new_tokens=40, emit=said.append, **drawn)
    console.print(
        f"\na ticket with {TICKET} of the blocks ({made.proof['n_params']:,} parameters, dense, "
        f"perplexity {made.proof['perplexity']['ticket']:.2f}) writes:"
    )
    console.print("".join(said).replace("\n", " "), style="italic", highlight=False)
