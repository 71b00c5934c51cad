"""(6) Tickets: cut out of a parent as dense models, written as folders, checked and read back."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.teacher_cache import verify_teacher_cache
from ..data.token_file import open_tokens, verify_tokens
from ..model import depth, huggingface
from ..model.blocks import Blueprint
from ..model.central import cut_subnet
from ..model.subnet import add_means_, build, fold_
from ..system import manifest
from ..system.files import whole_folder
from ..system.provenance import describe_run
from ..training import checkpoint
from . import hf_folder
from .parent import Parent, what_is
from .register import register
from .widths import weights_bytes

TICKET = "ticket.json"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # the number of layers in a config.json
OURS = {  # files of a model that was written before manifests
    "model.safetensors", "config.json", "generation_config.json", "modeling_ticket.py", "README.md",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "added_tokens.json",
}  # fmt: skip


@torch.no_grad()
def cut_ticket(parent: Parent, blueprint: Blueprint) -> PreTrainedModel:
    """A stand-alone dense model: physically narrow, scale folded into the output projections.

    Layers that keep no blocks are left out; what their biases add, the layer before adds.
    """
    block_map, central = parent.block_map, parent.central
    block_map.check_blueprint(blueprint)
    widths = block_map.widths(blueprint)
    factors = parent.scales(widths)
    dropped, blueprint = block_map.dropped(widths), depth.with_all_layers(blueprint)
    where = central.layout.narrowed(block_map, block_map.widths(blueprint))
    weights = cut_subnet(central, blueprint, rows=1)[0]
    params = where.views(weights)
    fold_(params, block_map, factors)
    add_means_(params, block_map, blueprint, factors, parent.means)
    if dropped:
        depth.check(parent.template, dropped)
        depth.fold_biases_(params, parent.template, dropped)
    model = build(parent.template, block_map, where, weights, gates="none").model
    return depth.shallower(model, dropped)


def save_ticket(
    parent: Parent,
    blueprint: Blueprint,
    folder: Path,
    notes: dict[str, Any] | None = None,
    model: PreTrainedModel | None = None,
) -> None:
    """Write the folder of a ticket, whole or not at all; `notes` join ticket.json.

    `model` is the ticket if it was cut before, which is then written as it is, in its own dtype.
    """
    model, notes = model or cut_ticket(parent, blueprint), notes or {}
    cut = parent.block_map
    dropped = cut.dropped(cut.widths(blueprint))
    expected = weights_bytes(huggingface.shapes(model), str(model.dtype).removeprefix("torch."))
    with whole_folder(folder, foreign_files(folder, TICKET)) as draft:
        why = hf_folder.save(parent, depth.shallower(parent.template, dropped), model, draft)
        if (found := (draft / "model.safetensors").stat().st_size) != expected:
            raise OSError(
                f"the weights have {found:,} bytes, not {expected:,}: nothing was written"
            )
        ticket = {
            "parent": {"source": parent.source, "n_params": parent.central.layout.n_params},
            "n_params": model.num_parameters(),
            "widths": {g.name: f"{len(blueprint[g.name])}/{g.n_blocks}" for g in cut.groups},
            "blueprint": blueprint,
            "stock": why or True,  # or why it is no plain model of its family
            **notes,
            **describe_run(),
        }
        hf_folder.save_card(parent, ticket, draft)
        seal(draft, ticket)


def seal(draft: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write ticket.json, which vouches for all files of the folder and for itself."""
    files = manifest.describe_files(manifest.folder_files(draft))
    record = manifest.sealed({**record, manifest.FILES: files})
    (draft / TICKET).write_text(manifest.written(record))
    return record


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


def load_ticket(folder: str | Path) -> PreTrainedModel:
    """The dense model of a ticket folder, checked against its ticket.json."""
    folder = Path(str(folder))
    ticket, plain = read_ticket(folder), manifest.read_json(folder / "config.json")
    for name in LAYERS:  # transformers makes a config for each layer as it reads the file
        if plain.get(name, 0) > huggingface.MOST_LAYERS:
            raise ValueError(f"{folder}: its config promises {plain[name]} layers")
    register()
    model = huggingface.pretrained(str(folder), dtype="auto")  # compares every file's sha256
    n_params = model.num_parameters()
    if n_params != (told := ticket["n_params"]):
        said = f"ticket.json tells of {told:,} parameters, the weights have {n_params:,}"
        raise ValueError(f"{folder}: {said}")
    return model.eval()


def verify(source: str) -> list[str]:
    """Read every byte of a token file, ticket, checkpoint or run; a sentence for each whole one."""
    folder = Path(source)
    if not folder.is_dir():
        told = verify_teacher_cache(open_tokens(source))
        return [verify_tokens(source), *([told] if told else [])]
    if what_is(source) == "ticket":
        n = len(read_ticket(folder).get(manifest.FILES, ()))
        manifest.check_model_folder(folder)
        if not n:
            return [f"ticket {source}: nothing vouches for its files (written before manifests)"]
        return [f"ticket {source}: {n} files match their sha256"]
    is_one = (folder / checkpoint.MANIFEST).is_file()
    paths = [folder] if is_one else checkpoint.numbered(folder / "checkpoints")
    if not paths:
        raise ValueError(f"{source} is no token file, ticket, checkpoint or run: nothing to verify")
    return [
        f"checkpoint {each.path}: {len(each.manifest['files'])} files match their sha256"
        for each in map(checkpoint.verify, paths)
    ]


def read_ticket(folder: Path) -> dict[str, Any]:
    """The record of a ticket folder: parameters, widths, blueprint, what made it."""
    if not (folder / TICKET).is_file():
        raise ValueError(
            f"{folder} is no ticket, it has no ticket.json: twistlm extract cuts tickets out of "
            "checkpoints, runs and Hugging Face models"
        )
    try:
        ticket = manifest.read_json(folder / TICKET)
        dict(ticket["blueprint"]), dict(ticket["widths"]), int(ticket["n_params"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / TICKET} is damaged: {huggingface.one_line(error)}") from None
    return ticket


def cut_from(ticket: dict[str, Any]) -> str:
    """The source of a ticket's parent; old tickets may name nothing else of it."""
    parent = ticket["parent"]
    return parent["source"] if isinstance(parent, dict) else parent
