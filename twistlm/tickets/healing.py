"""`twistlm heal`: train a ticket for itself, on tokens, with its parent as a frozen teacher.

A ticket is a dense model like any other, so this is a data-parallel run of one worker: its folder
OUT.healing has checkpoints and metrics, the same command goes on from there after a stop, and it is
removed when the healed ticket stands in OUT.
"""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from .. import config
from ..compute.perplexity import perplexity
from ..config import BlocksConfig, Config, DataConfig, ModelConfig, RunConfig
from ..data.builtin import resolve
from ..data.token_file import open_tokens
from ..model import huggingface
from ..model.blocks import State
from ..system import manifest
from ..system.device import pick_device
from ..system.files import save_tensors, whole_folder
from ..system.provenance import describe_run
from ..system.terminal import console, markdown_code, markdown_text
from ..training import checkpoint, rounds
from . import modeling_ticket
from .deploy import TICKET, cut_from, foreign_files, load_ticket, read_ticket, seal
from .extract import check_finite, check_target
from .hf_folder import CARD, CODE, name_of
from .parent import what_is
from .requests import HealRequest, amount
from .text import text_for

STEPS = 10  # in a round: between two looks at the clock, the metrics and signals
WARMUP = 0.05  # of all steps
# keys of ticket.json that say nothing about the healed weights; the last two are made anew
UNTRUE = ("perplexity", "max_logit_difference", manifest.FILES, manifest.OWN)


def heal(
    request: HealRequest,
    overrides: Sequence[str] = (),
    *,
    like: Config | None = None,
    quiet: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train the ticket and write it anew; returns its record with what healing did.

    `like` is the config of a run whose settings are taken, instead of the teacher's.
    """
    check_target(request.out)
    if not amount("tokens", request.tokens):
        raise ValueError(f"--tokens {request.tokens}: healing needs at least one, as in 20M")
    if request.out.resolve() == request.ticket.resolve():
        raise ValueError(f"--out {request.out} is the ticket to heal: choose another folder")
    model, ticket = load_ticket(request.ticket), read_ticket(request.ticket)
    cfg = settings(request, model, cut_from(ticket), overrides, like)
    t, work = cfg.train, Path(cfg.run.out)
    if not quiet:
        n_tokens = t.rounds * t.interval * t.batch * cfg.data.seq_len
        console.print(
            f"{n_tokens:,} tokens in steps of {t.batch} x {cfg.data.seq_len}, teacher: {t.teacher}"
        )
    text, found = None, {}
    if cfg.data.valid != cfg.data.train or cfg.data.valid.startswith("builtin:"):
        file = open_tokens(resolve(cfg.data.valid, "valid"))  # never what was trained on
        words = request.ticket / "tokenizer.json"
        text = text_for(model, file, cfg.data.seq_len, request.valid_tokens, words)
        found = {"data": file.stem, "n_tokens": text.n_tokens}

    def measure(when: str) -> None:
        if text is not None:
            torch.nn.Module.to(model, pick_device(cfg.run.device))
            found[when] = value = perplexity(model, text)
            check_finite(value, "ticket", model.dtype)
            torch.nn.Module.to(model, "cpu")

    measure("before")
    last = rounds.train(cfg, resume=True, quiet=quiet, on_round=on_round)
    weights = load_file(last / "model.safetensors")
    with torch.no_grad():
        for name, param in huggingface.state(model).items():
            param.copy_(weights[name])  # which rounds to the ticket's dtype
    measure("after")
    rows = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    healed = {
        "from": str(request.ticket),
        "teacher": t.teacher,
        "distil": 0.0 if t.teacher == "none" else t.distil,
        "data": cfg.data.train,
        "n_tokens": sum(row["n_tokens"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "lr": t.lr,
        "batch": t.batch,
        "seq_len": cfg.data.seq_len,
        "steps": t.rounds * t.interval,
        "loss": rows[-1]["loss"],
        **describe_run(),
        **({"perplexity": found} if found else {}),
    }
    kept = {key: value for key, value in ticket.items() if key not in UNTRUE}
    record = kept | {"healed": [*ticket.get("healed", []), healed]}
    state = {name: param.detach() for name, param in huggingface.state(model).items()}
    record = _write(request, state, record)
    shutil.rmtree(work)
    return record


def settings(
    request: HealRequest,
    model: PreTrainedModel,
    cut_from: str,
    overrides: Sequence[str],
    like: Config | None,
) -> Config:
    """The run that heals a ticket: its teacher's settings, one worker, cosine, a short warm-up."""
    teacher = cut_from if request.teacher is None else request.teacher
    path, is_gguf = Path(teacher), teacher.startswith("gguf:")
    if teacher == "start" and not path.exists():
        raise ValueError(
            "--teacher start: a ticket starts as itself, which teaches nothing; give a run, a "
            "model or none"
        )
    is_path = not is_gguf and (path.is_absolute() or len(path.parts) > 2)  # no hub id
    if request.teacher is None and is_path and not path.exists():
        raise ValueError(
            f"{request.ticket} was cut out of {teacher}, which is not here: give --teacher RUN or "
            "MODEL, or --teacher none to learn from text alone"
        )
    run, near = like or Config(data=DataConfig(train="", valid="")), None
    here = (source for source in (teacher, cut_from) if Path(source).exists())
    if runs := [source for source in here if what_is(source) == "checkpoint"]:
        found = checkpoint.open_(runs[0])  # its text and settings are taken
        run, near = like or found.config, found.path
        teacher = str(found.path) if runs[0] == teacher else teacher
    if not (data := request.data or run.data.train):
        raise ValueError(
            f"nothing is known to train {request.ticket} on, since neither its teacher ({teacher}) "
            f"nor its parent ({cut_from}) is a run that is here: give --data STEM"
        )
    valid = request.valid or run.data.valid or data
    if near is not None:  # a run's tokens may be seen from its folder, not from here
        data, valid = resolve(data, "train", near), resolve(valid, "valid", near)
    seq_len = min(run.data.seq_len, huggingface.n_positions(model))
    cfg = Config(
        model=ModelConfig(weights=str(request.ticket), type=model.config.model_type),
        data=DataConfig(train=data, valid=valid, seq_len=seq_len),
        # nothing is cut any more: one block in every FFN layer
        blocks=BlocksConfig(setting="ffn", n_ffn=1, k_ffn=(1,), shared_first=0, shared_last=0),
        train=replace(
            run.train,
            method="dense",
            n_workers=1,
            batch=run.train.batch * run.train.n_workers,
            interval=STEPS,
            schedule="cosine",
            teacher=teacher,
            distil=run.train.distil or 0.9,
            outer="none",
            rounds=0,  # of the tokens, unless `overrides` say how many
            epochs=0.0,
        ),
        run=RunConfig(out=f"{request.out}.healing", eval_every=-1, eval_ratios=("1",)),
    )
    cfg = config.override(cfg, overrides)
    huggingface.check_positions(model, cfg.data.seq_len)
    per_round = cfg.train.batch * cfg.data.seq_len * cfg.train.interval
    n_rounds = cfg.train.rounds or max(1, math.ceil(amount("tokens", request.tokens) / per_round))
    warmup = int(WARMUP * n_rounds * cfg.train.interval)
    cfg = replace(
        cfg,
        train=replace(cfg.train, rounds=n_rounds, warmup=warmup),
        run=replace(cfg.run, save_every=max(1, n_rounds // 10)),
    )
    return config.override(cfg, overrides)


def reading(record: dict[str, Any]) -> str:
    """What healing did, in one sentence."""
    healed = record["healed"][-1]
    who = "the text alone" if healed["teacher"] == "none" else name_of(healed["teacher"])
    n, data = healed["n_tokens"], Path(healed["data"]).name
    said = f"{n:,} tokens of {data} in {healed['seconds']:,.0f} s, taught by {who}"
    if found := healed.get("perplexity"):
        n = found["n_tokens"]
        said += f": perplexity on {n:,} tokens {found['before']:.2f} -> {found['after']:.2f}"
    return said


def _write(request: HealRequest, state: State, record: dict[str, Any]) -> dict[str, Any]:
    """The old folder with new weights; record and card lose what is no longer true."""
    with whole_folder(request.out, foreign_files(request.out, TICKET)) as draft:
        foreign = foreign_files(request.ticket, TICKET)
        for name, path in manifest.folder_files(request.ticket).items():
            if Path(name) not in foreign and name != TICKET:
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                is_code = name == f"{CODE}.py"  # of a stranger's ticket it may be anybody's
                shutil.copyfile(modeling_ticket.__file__ if is_code else path, draft / name)
        settings = manifest.read_json(draft / "config.json")
        if any(not str(w).startswith(CODE) for w in settings.get("auto_map", {}).values()):
            del settings["auto_map"]  # somebody's code, not ours
            (draft / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        save_tensors(state, draft / "model.safetensors")
        if (card := draft / CARD).is_file():
            untrue, healed = tuple(f"| {name}" for name in UNTRUE), record["healed"][-1]
            lines = [each for each in card.read_text().splitlines() if not each.startswith(untrue)]
            lines += ["", "## Healing", ""]
            lines += [f"Trained after the cut: {markdown_text(reading(record))}."]
            lines += [f"Made by {markdown_code(healed['command'])}, twistlm {healed['git']}.", ""]
            card.write_text("\n".join(lines))
        return seal(draft, record)
