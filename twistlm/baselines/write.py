"""A pruned model on disk: a plain Hugging Face folder with zeros in it, or a ticket."""

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..model.blocks import widths_of_ratio
from ..system.files import whole_folder
from ..system.provenance import describe_run
from ..system.terminal import progress
from ..tickets import deploy, extract, hf_folder
from ..tickets.importance import parse_pick, pick_blocks
from ..tickets.parent import Parent
from ..tickets.text import calibrate
from . import STRUCTURED, PruneRequest
from .methods import METHODS, prune_, sparsities
from .repair import repair_parent

RECORD = "prune.json"


def check_target(folder: Path, source: str) -> None:
    """An earlier pruned model or an empty folder is replaced; anything else is left alone."""
    if Path(source).exists() and Path(source).resolve() == folder.resolve():
        raise ValueError(f"--out {folder} is the model to prune: choose another folder")
    if (folder / deploy.TICKET).is_file():  # of block:*
        return extract.check_target(folder)
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (held and not {RECORD, "model.safetensors"} <= held):
        raise ValueError(f"--out {folder} exists and is no pruned model: choose another folder")


def write(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool = False
) -> dict[str, Any]:
    """Prune a parent and write what is left of it, with its record; returns the record.

    `block:*` gives a ticket of the blocks that score highest, all others a model of the parent's
    shape with zeros in it.
    """
    method, how, block_map = request.method, request.repair, parent.block_map
    name, is_block = method.removeprefix(STRUCTURED), method.startswith(STRUCTURED)
    n_layers = len(block_map.layers)  # each reads every sequence
    if is_block:
        if how == "bias" and not any(len(group.out) > 1 for group in block_map.groups):
            raise ValueError(
                f"--repair bias: no output projection of this {parent.template.config.model_type} "
                "has a bias; use rescale or lstsq"
            )
        widths, pick = widths_of_ratio(block_map, request.ratio), parse_pick(f"importance:{name}")
        scored, n_passes = pick.needs_calibration, n_layers if how else 0
    else:
        wanted = sparsities(block_map, request.ratio)
        scored, n_passes = False, n_layers if METHODS[name].observe else 0
    text = ids = None
    if scored or n_passes:
        text = calibrate(parent, request.data, request.n, request.seed)
        ids = text.ids
    with progress(quiet) as bar:
        task = bar.add_task(f"prune {method}", total=request.n * n_passes or 1, note="")
        tick, began = partial(bar.advance, task), time.perf_counter()
        if is_block:
            seen = text if scored else None
            blueprint, based_on = pick_blocks(parent, widths, pick, request.seed, None, seen, bar)
            if how is not None and ids is not None:
                parent = repair_parent(parent, blueprint, how, ids, tick)
        else:
            model = parent.whole(parent.central.weights.clone()).model  # it stays as it is
            zeros = prune_(model, block_map, METHODS[name], wanted, ids, tick)
        seconds = time.perf_counter() - began
    if is_block:
        chosen = {"how": pick.asked, "seed": request.seed, **based_on}
        notes: dict[str, Any] = {"pick": chosen, "method": method}
        notes |= {"ratio": request.ratio, "seconds": seconds, "scale": parent.scale}
        if how is not None and text is not None:
            notes["repair"] = {"how": how, "data": text.stem, "n_sequences": request.n}
        deploy.save_ticket(parent, blueprint, folder, notes)
        return deploy.read_ticket(folder)
    record = {
        "parent": parent.source,
        "method": method,
        "sparsity": {name: float(sparsity) for name, sparsity in wanted.items()},
        "calibration": text.to_dict() | {"seed": request.seed} if text else {},
        "seconds": seconds,
        "n_pruned": sum(model.get_parameter(name).numel() for name in zeros),
        "n_zeros": sum(zeros.values()),
        "blocks": asdict(parent.cfg.blocks),
        "zeros": zeros,
        **describe_run(),
    }
    with whole_folder(folder, deploy.foreign_files(folder, RECORD)) as draft:
        hf_folder.save(parent, parent.template, model, draft)
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record
