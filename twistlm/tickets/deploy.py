"""(6) A ticket: one subnet, extracted as a dense model with the activation scale folded in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..model import families, huggingface
from ..model.blocks import Blueprint
from ..model.central import cut_subnet
from ..model.subnet import add_means_, build, fold_
from ..system import manifest
from ..system.files import whole_folder
from ..system.provenance import describe_run
from ..system.terminal import console
from ..training.checkpoint import MANIFEST
from . import card, hf_folder, stock
from .budget import weights_bytes
from .parent import Parent
from .register import register

TICKET = "ticket.json"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # the number of layers in a config.json
OURS = {  # files of a model that was written before manifests
    "model.safetensors", "config.json", "generation_config.json", "modeling_ticket.py", card.NAME,
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "added_tokens.json",
}  # fmt: skip


@torch.no_grad()
def cut_ticket(parent: Parent, blueprint: Blueprint) -> PreTrainedModel:
    """A stand-alone dense model: physically narrow, scale folded into the output projections."""
    block_map, central = parent.block_map, parent.central
    block_map.check_blueprint(blueprint)
    widths = block_map.widths(blueprint)
    where = central.layout.narrowed(block_map, widths)
    weights = cut_subnet(central, blueprint, rows=1)[0]
    params, factors = where.views(weights), parent.scales(widths)
    fold_(params, block_map, factors)
    add_means_(params, block_map, blueprint, factors, parent.means)
    return build(parent.template, block_map, where, weights, gates="none").model


def save_ticket(
    parent: Parent,
    blueprint: Blueprint,
    folder: Path,
    notes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Extract a ticket and write its folder; `notes` join ticket.json."""
    model = cut_ticket(parent, blueprint)
    nn.Module.to(model, dtype)
    save_model(parent, blueprint, model, folder, notes or {})


def save_model(
    parent: Parent,
    blueprint: Blueprint,
    model: PreTrainedModel,
    folder: Path,
    notes: dict[str, Any],
) -> None:
    """Write the folder of a ticket, whole or not at all: this very model, in its own dtype."""
    state = huggingface.state(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder, foreign_files(folder, TICKET)) as draft:
        config = hf_folder.save(parent, model, draft)
        _check_size(draft / "model.safetensors", model)
        groups = parent.block_map.groups
        ticket = {
            "parent": parent.source,
            "n_params": sum(t.numel() for t in state.values()),
            "widths": {g.name: f"{len(blueprint[g.name])}/{g.n_blocks}" for g in groups},
            "blueprint": blueprint,
            "stock": notes.get("stock")
            or stock.described(parent.template, huggingface.shapes(model)),
            **notes,
            **describe_run(),
        }
        card.save(parent, config, ticket, notes, draft)
        files = manifest.describe_files(manifest.folder_files(draft))
        record = manifest.sealed({**ticket, manifest.FILES: files})
        (draft / TICKET).write_text(manifest.written(record))


def foreign_files(folder: Path, record: str) -> list[Path]:
    """What in an earlier model's folder was not written with it, as paths in it."""
    if not (folder / record).is_file():
        return []
    try:
        ours = set(manifest.vouched(folder / record, manifest.read_json(folder / record)))
    except ValueError:  # damaged: what is ours shows by its name
        ours = set()
    ours |= {record} | (set() if ours else OURS)
    return manifest.foreign_files(folder, ours)


def _check_size(file: Path, model: PreTrainedModel) -> None:
    """The bytes that a budget was spent on must be those of the file, before it gets its name."""
    expected = weights_bytes(huggingface.shapes(model), str(model.dtype).removeprefix("torch."))
    if (found := file.stat().st_size) != expected:
        raise OSError(f"{file.name} has {found:,} bytes, not {expected:,}: nothing was written")


def load_ticket(folder: str | Path) -> PreTrainedModel:
    """The dense model of a ticket folder, checked against its ticket.json."""
    folder = Path(folder)
    ticket = verify_ticket(folder)
    register()
    load: Any = AutoModelForCausalLM.from_pretrained  # its type knows of no loading info
    try:
        _check_promise(folder)
        model, info = load(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except Exception as error:  # a damaged config or weights fail in many ways
        raise ValueError(
            f"{folder} cannot be loaded as a ticket: {huggingface.one_line(error)}"
        ) from None
    # Hugging Face fills what is missing or misshapen with random numbers
    for what, names in info.items():
        if names:
            first = sorted(str(name) for name in names)[0]
            raise ValueError(f"{folder}: weights and config.json disagree ({what}: {first})")
    _check_fits(folder, ticket, model)
    return model.eval()


def _check_promise(folder: Path) -> None:
    """The config must not promise more than the weights hold: nothing that large is built."""
    held = huggingface.header(folder / "model.safetensors")
    most = sum(map(math.prod, held.values()))
    what = f"{folder} holds {most:,} weights"
    plain = manifest.read_json(folder / "config.json")
    for name in LAYERS:  # transformers makes a config for each layer as it reads the file
        if plain.get(name, 0) > len(held):
            raise ValueError(f"{what}, and its config promises {plain[name]} layers")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    huggingface.check_size(config, most, len(held), what)


def _check_fits(folder: Path, ticket: dict[str, Any], model: PreTrainedModel) -> None:
    """The record must be that of these weights: its parameters, and k/n of the full width."""
    found = sum(param.numel() for param in model.parameters())
    if found != ticket["n_params"]:
        raise ValueError(
            f"{folder}: ticket.json tells of {ticket['n_params']:,} parameters, the weights have "
            f"{found:,}"
        )
    family, config = families.family(model), model.config
    fields = config.to_dict()
    for name, text in ticket["widths"].items():
        k, n_blocks = map(int, text.split("/"))
        layer, kind = name.split(".")[-2:]
        width = getattr(family, kind).width
        if hasattr(config, "ticket"):
            here, full = getattr(config.per_layer_config[int(layer)], width), fields[width]
        else:  # a stock ticket: its config knows nothing of the parent
            here, full = fields[width], int(ticket["stock"][width].split("/")[1])
        if here * n_blocks != full * k:
            raise ValueError(
                f"{folder}: ticket.json gives {name} {text} of the blocks, its weights have "
                f"{here}/{full} of {width}"
            )


def verify_ticket(folder: Path) -> dict[str, Any]:
    """The record of a ticket whose files are as they were written; an edited card is said."""
    ticket = read_ticket(folder)
    for sentence in manifest.check_folder(folder, TICKET, editable=(card.NAME,)):
        console.print(f"the model card was changed: {sentence}", style="yellow")
    return ticket


def read_ticket(folder: Path) -> dict[str, Any]:
    """The record of a ticket folder: parameters, widths, blueprint, what made it."""
    if not (folder / TICKET).is_file():
        what = "it has no ticket.json"
        if (folder / MANIFEST).is_file() or (folder / "checkpoints").is_dir():
            what = "it is a checkpoint, from which tickets are cut"
        elif (folder / "config.json").is_file():
            what = "it is a Hugging Face model without ticket.json"
        raise ValueError(f"{folder} is no ticket: {what}")
    try:
        ticket = manifest.read_json(folder / TICKET)
        for name, kept in ticket["blueprint"].items():
            k, n_blocks = map(int, ticket["widths"][name].split("/"))
            if len(kept) != k or not 0 <= min(kept) <= max(kept) < n_blocks:
                raise ValueError(f"blueprint[{name!r}] does not fit its width {k}/{n_blocks}")
        int(ticket["n_params"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / TICKET} is damaged: {huggingface.one_line(error)}") from None
    return ticket
