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
from ..tickets.text import Calibration, calibrate
from . import STRUCTURED, PruneRequest
from .methods import METHODS, prune_, sparsities

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
    write_it = _write_ticket if request.method.startswith(STRUCTURED) else _write_zeros
    return write_it(parent, folder, request, quiet)


def _write_ticket(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool
) -> dict[str, Any]:
    widths = widths_of_ratio(parent.block_map, request.ratio)
    pick = parse_pick(f"importance:{request.method.removeprefix(STRUCTURED)}")
    text = _text(parent, request) if pick.needs_calibration else None
    began = time.perf_counter()
    with progress(quiet) as bar:
        blueprint, based_on = pick_blocks(parent, widths, pick, request.seed, None, text, bar)
    seconds = time.perf_counter() - began
    chosen = {"how": pick.asked, "seed": request.seed, **based_on}
    notes = {"pick": chosen, "method": request.method, "ratio": request.ratio, "seconds": seconds}
    deploy.save_ticket(parent, blueprint, folder, notes | {"scale": parent.scale})
    return deploy.read_ticket(folder)


def _write_zeros(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool
) -> dict[str, Any]:
    block_map, method = parent.block_map, METHODS[request.method]
    wanted = sparsities(block_map, request.ratio)
    text = _text(parent, request) if method.observe else None
    n_read = request.n * len(block_map.layers) if text else 1  # each layer reads every sequence
    began = time.perf_counter()
    with progress(quiet) as bar:
        task = bar.add_task(f"prune {request.method}", total=n_read, note="")
        model = parent.whole(parent.central.weights.clone()).model  # the parent stays as it is
        ids = text.ids if text else None
        zeros = prune_(model, block_map, method, wanted, ids, partial(bar.advance, task))
    record = {
        "parent": parent.source,
        "method": request.method,
        "sparsity": {name: float(sparsity) for name, sparsity in wanted.items()},
        "calibration": text.to_dict() | {"seed": request.seed} if text else {},
        "seconds": time.perf_counter() - began,
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


def _text(parent: Parent, request: PruneRequest) -> Calibration:
    return calibrate(parent, request.data, request.n, request.seed)
