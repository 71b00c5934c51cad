"""(6) A ticket: one subnet, extracted as a dense model with the activation scale folded in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import families, models
from .blocks import BlockMap, Blueprint
from .central import Central
from .checkpoint import describe_run, save_tensors, whole_folder
from .dispatcher import cut
from .subnet import build, fold_, scales


@torch.no_grad()
def extract(
    template: PreTrainedModel,
    block_map: BlockMap,
    central: Central,
    blueprint: Blueprint,
    scale: str,
) -> PreTrainedModel:
    """A stand-alone dense model: physically narrow, scale folded into the output projections."""
    block_map.check_blueprint(blueprint)
    widths = block_map.widths(blueprint)
    where = central.layout.narrowed(block_map, widths)
    weights = cut(central, block_map, blueprint, rows=1)[0][0]
    fold_(where.views(weights), block_map, scales(block_map, widths, scale, central.rho))
    return build(template, block_map, where, weights).model


def save_ticket(
    model: PreTrainedModel,
    block_map: BlockMap,
    blueprint: Blueprint,
    folder: Path,
    tokenizer: Path | None = None,
) -> None:
    """Write the ticket's folder, whole or not at all: weights, HF config, blueprint, tokenizer."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as draft:
        params = models.state(model)
        save_tensors(params, draft / "model.safetensors")
        model.config.save_pretrained(draft)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / "tokenizer.json")
        ticket = {
            "n_params": sum(t.numel() for t in params.values()),
            "widths": {g.name: f"{len(blueprint[g.name])}/{g.n_blocks}" for g in block_map.groups},
            "blueprint": blueprint,
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
