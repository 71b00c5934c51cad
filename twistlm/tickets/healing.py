"""`twistlm heal`: train a ticket for itself, on tokens, with its parent as a frozen teacher.

A ticket is a dense model like any other, so this is a data-parallel run of one worker: its folder
OUT.healing has checkpoints and metrics, the same command goes on from there after a stop, and it is
removed when the healed ticket stands in OUT.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from .. import config
from ..compute.perplexity import Text, perplexity
from ..config import BlocksConfig, Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from ..data.builtin import resolve
from ..data.token_file import open_tokens
from ..model import huggingface
from ..system import manifest
from ..system.device import pick_device
from ..system.files import save_tensors, whole_folder
from ..system.provenance import describe_run
from ..system.terminal import markdown_code
from ..training import checkpoint, rounds
from .deploy import TICKET, foreign_files, load_ticket, read_ticket
from .extract import check_target
from .parent import what_is
from .requests import HealRequest

STEPS = 10  # in a round: between two looks at the clock, the metrics and signals
WARMUP = 0.05  # of all steps
# of a ticket, once its weights have moved; files and seal are made anew
UNTRUE = ("perplexity", "max_logit_difference", manifest.FILES, manifest.OWN)


def heal(
    request: HealRequest, quiet: bool = False, note: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Train the ticket and write it anew; returns its record with what healing did.

    `note` is told after every round where the training is, for a caller with a bar of its own.
    """
    check_target(request.out)
    if request.n_tokens < 1:
        raise ValueError(f"--tokens {request.n_tokens}: healing needs at least one, as in 20M")
    if request.out.resolve() == request.ticket.resolve():
        raise ValueError(f"--out {request.out} is the ticket to heal: choose another folder")
    model = load_ticket(request.ticket)
    cfg = settings(request, model, read_ticket(request.ticket))
    work, text = Path(cfg.run.out), None
    if cfg.data.valid != cfg.data.train or cfg.data.valid.startswith("builtin:"):
        file = open_tokens(resolve(cfg.data.valid, "valid"))  # never what was trained on
        text = Text(file, cfg.data.seq_len, request.valid_tokens)
    before = None if text is None else _measure(model, text, request.device)
    last = rounds.train(cfg, resume=_goes_on(work, cfg), quiet=quiet, note=note)
    if checkpoint.open_(last).round < cfg.train.rounds:  # a signal: the same command goes on
        raise ValueError(f"stopped after round {checkpoint.open_(last).round}: call it again")
    weights = load_file(last / "model.safetensors")
    with torch.no_grad():
        for name, param in huggingface.state(model).items():
            param.copy_(weights[name])
    notes = _notes(cfg, work)
    if text is not None:
        after, n_tokens = _measure(model, text, request.device), text.n_sequences * text.seq_len
        about = {"data": text.file.stem, "n_tokens": n_tokens}
        notes["perplexity"] = {"before": before, "after": after, **about}
    record = _write(request, model, notes)
    shutil.rmtree(work)
    return record


def settings(request: HealRequest, model: PreTrainedModel, ticket: dict[str, Any]) -> Config:
    """The run that heals a ticket: its teacher's settings, one worker, cosine, a short warm-up."""
    cut_from = ticket["parent"]  # of a ticket with a proof, with what was measured of it
    cut_from = cut_from["source"] if isinstance(cut_from, dict) else cut_from
    teacher = cut_from if request.teacher is None else request.teacher
    path = Path(teacher)
    if teacher == "start" and not path.exists():
        raise ValueError(
            "--teacher start: a ticket starts as itself, which teaches nothing; give a run, a "
            "model or none"
        )
    is_path = path.is_absolute() or len(path.parts) > 2
    if request.teacher is None and is_path and not path.exists():
        raise ValueError(
            f"{request.ticket} was cut out of {teacher}, which is not here: give --teacher RUN or "
            "MODEL, or --teacher none to learn from text alone"
        )
    known, near = None, None
    if teacher != "none" and what_is(teacher) == "checkpoint":
        found = checkpoint.open_(path)
        teacher, known, near = str(found.path), found.config, found.path
    elif Path(cut_from).exists() and what_is(cut_from) == "checkpoint":
        found = checkpoint.open_(Path(cut_from))
        known, near = found.config, found.path
    known = request.like or known
    run = known or Config(train=TrainConfig(batch=2, lr=1e-4))
    data = request.data or (known.data.train if known else "")
    if not data:
        raise ValueError(
            f"nothing is known to train {request.ticket} on, since neither its teacher ({teacher}) "
            f"nor its parent ({cut_from}) is a run that is here: give --data STEM"
        )
    valid = request.valid or (known.data.valid if known else "") or data
    if near is not None:  # a run's tokens may be seen from its folder, not from here
        data, valid = resolve(data, "train", near), resolve(valid, "valid", near)
    most = getattr(model.config, "max_position_embeddings", None) or 1024
    cfg = Config(
        model=ModelConfig(weights=str(request.ticket), type=model.config.model_type),
        data=DataConfig(train=data, valid=valid, seq_len=min(run.data.seq_len, most)),
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
            epochs=0.0,
        ),
        run=RunConfig(
            out=f"{request.out}.healing", device=request.device, eval_every=-1, eval_ratios=("1",)
        ),
    )
    cfg = config.override(cfg, request.overrides)
    huggingface.check_positions(model, cfg.data.seq_len)
    per_round = cfg.train.batch * cfg.data.seq_len * cfg.train.interval
    n_rounds = max(1, math.ceil(request.n_tokens / per_round))
    warmup = int(WARMUP * n_rounds * cfg.train.interval)
    return replace(
        cfg,
        train=replace(cfg.train, rounds=n_rounds, warmup=warmup),
        run=replace(cfg.run, save_every=max(1, n_rounds // 10)),
    )


def _goes_on(work: Path, cfg: Config) -> bool:
    """Whether a stopped run is there; one of another ticket, text or teacher is refused."""
    found, _ = checkpoint.newest(work / "checkpoints")
    if found is None:
        return False
    was, now = (config.to_dict(c) for c in (found.config, cfg))
    for section in ("model", "data", "train"):
        for key, value in now[section].items():
            if was[section][key] != value:
                raise ValueError(
                    f"{work} is a run that healed with {section}.{key} = {was[section][key]!r}, "
                    f"not {value!r}: call it as then, choose another --out or remove that folder"
                )
    return True


def reading(record: dict[str, Any]) -> str:
    """What healing did, in one sentence."""
    healed = record["healed"][-1]
    who = "the text alone" if healed["teacher"] == "none" else healed["teacher"]
    said = f"{healed['n_tokens']:,} tokens in {healed['seconds']:,.0f} s, taught by {who}"
    if found := healed.get("perplexity"):
        n = found["n_tokens"]
        said += f": perplexity on {n:,} tokens {found['before']:.2f} -> {found['after']:.2f}"
    return said


def _measure(model: PreTrainedModel, text: Text, device: str) -> float:
    where = pick_device(device)
    torch.nn.Module.to(model, where)
    found = perplexity(model.float() if where.type == "cpu" else model, text)
    torch.nn.Module.to(model, "cpu")
    return found


def _notes(cfg: Config, work: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    t = cfg.train
    return {
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
    }


def _write(request: HealRequest, model: PreTrainedModel, notes: dict[str, Any]) -> dict[str, Any]:
    """The old folder with new weights; record and card lose what is no longer true."""
    old = read_ticket(request.ticket)
    kept = {key: value for key, value in old.items() if key not in UNTRUE}
    healed = {"from": str(request.ticket), **notes, **describe_run()}
    record = {**kept, "healed": [*old.get("healed", []), healed]}
    request.out.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(request.out, foreign_files(request.out, TICKET)) as draft:
        foreign = foreign_files(request.ticket, TICKET)
        for name, path in manifest.folder_files(request.ticket).items():
            if Path(name) not in foreign:
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, draft / name)
        dtype = load_ticket(request.ticket).dtype
        state = {n: p.detach().to(dtype) for n, p in huggingface.state(model).items()}
        save_tensors(state, draft / "model.safetensors")
        (draft / TICKET).unlink()
        card = draft / "README.md"
        if card.is_file():
            card.write_text(_card(card.read_text(), healed))
        files = manifest.describe_files(manifest.folder_files(draft))
        record = manifest.sealed({**record, manifest.FILES: files})
        (draft / TICKET).write_text(manifest.written(record))
    return record


def _card(text: str, healed: dict[str, Any]) -> str:
    """The card with a section about healing; numbers of the unhealed weights leave its table."""
    untrue = tuple(f"| {name}" for name in UNTRUE)
    lines = [line for line in text.splitlines() if not line.startswith(untrue)]
    data, teacher = (markdown_code(Path(healed[key]).name) for key in ("data", "teacher"))
    how = f"with {teacher} as a frozen teacher (KL weight {healed['distil']:g})."
    if healed["teacher"] == "none":
        how = "(cross-entropy with the text)."
    said = [
        "## Healing\n",
        f"Trained after the cut on {healed['n_tokens']:,} tokens of {data} {how}",
    ]
    if found := healed.get("perplexity"):
        said.append(
            f"Perplexity on {found['n_tokens']:,} tokens: {found['before']:.2f} before, "
            f"{found['after']:.2f} after."
        )
    said.append(f"Made by `{healed['command']}`, twistlm {healed['git']}.\n")
    at = lines.index("## Loading") if "## Loading" in lines else len(lines)
    return "\n".join([*lines[:at], *said, *lines[at:]]) + "\n"
