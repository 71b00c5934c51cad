"""(6) A ticket: one subnet, extracted as a dense model with the activation scale folded in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import families, models
from .blocks import Blueprint
from .checkpoint import describe_run, save_tensors, whole_folder
from .dispatcher import cut
from .parent import Parent
from .subnet import build, fold_, scales


@torch.no_grad()
def extract(parent: Parent, blueprint: Blueprint) -> PreTrainedModel:
    """A stand-alone dense model: physically narrow, scale folded into the output projections."""
    block_map, central = parent.block_map, parent.central
    block_map.check_blueprint(blueprint)
    widths = block_map.widths(blueprint)
    where = central.layout.narrowed(block_map, widths)
    weights = cut(central, block_map, blueprint, rows=1)[0][0]
    fold_(where.views(weights), block_map, scales(block_map, widths, parent.scale, central.rho))
    return build(parent.template, block_map, where, weights).model


def save_ticket(
    parent: Parent,
    blueprint: Blueprint,
    folder: Path,
    notes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Extract a ticket and write its folder, whole or not at all; `notes` join ticket.json."""
    model, block_map = extract(parent, blueprint), parent.block_map
    nn.Module.to(model, dtype)
    model.config.dtype = dtype
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as draft:
        params = models.state(model)
        save_tensors(params, draft / "model.safetensors")
        model.config.save_pretrained(draft)
        if parent.tokenizer is not None:
            shutil.copyfile(parent.tokenizer, draft / "tokenizer.json")
        ticket = {
            "n_params": sum(t.numel() for t in params.values()),
            "widths": {g.name: f"{len(blueprint[g.name])}/{g.n_blocks}" for g in block_map.groups},
            "blueprint": blueprint,
            **(notes or {}),
            **describe_run(),
        }
        (draft / "ticket.json").write_text(json.dumps(ticket, indent=1) + "\n")


def load_ticket(folder: Path) -> PreTrainedModel:
    """The dense model of a ticket folder: HF's own class, narrowed to the widths of its weights."""
    if not (folder / "ticket.json").is_file():
        raise ValueError(f"{folder} is no ticket: it has no ticket.json")
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
    ticket = json.loads((folder / "ticket.json").read_text())
    kinds = {name.rpartition(".")[2] for name in ticket["blueprint"]}
    whole = families.block_map(model, kinds.pop() if len(kinds) == 1 else "both")
    models.bind_(model, load_file(folder / "model.safetensors"))
    families.refit_(model, whole)
    return model.eval()
