"""A pruned model on disk: a plain Hugging Face folder with zeros in it, or a ticket."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model import huggingface
from ..model.blocks import BlockMap, widths_of_ratio
from ..model.subnet import build
from ..system.files import save_tensors, whole_folder
from ..system.provenance import describe_run
from ..system.terminal import progress
from ..tickets import NEEDS_TEXT, deploy, extract, hf_folder, importance
from ..tickets.calibration import Calibration, calibrate
from ..tickets.parent import Parent
from .methods import METHODS, prune_
from .pattern import Pattern, n_of_m, sparsity_of
from .repair import check_repair, repair_parent
from .request import PruneRequest
from .walk import n_layers

RECORD = "prune.json"


def check_target(folder: Path) -> None:
    """An earlier pruned model or an empty folder is replaced; anything else is left alone."""
    if (folder / deploy.TICKET).is_file():  # of block:*
        return extract.check_target(folder)
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (held and not {RECORD, "model.safetensors"} <= held):
        raise ValueError(f"--out {folder} exists and is no pruned model: choose another folder")


def write(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool = False
) -> dict[str, Any]:
    """Prune a parent and write what is left of it, with its record; returns the record."""
    check_target(folder)
    if Path(parent.source).exists() and Path(parent.source).resolve() == folder.resolve():
        raise ValueError(f"--out {folder} is the model to prune: choose another folder")
    prune = _single_weights if request.importance is None else _whole_blocks
    return prune(parent, folder, request, quiet)


def patterns(
    block_map: BlockMap, sparsity: str | None, ratio: str | None, nm: str | None
) -> dict[str, Pattern]:
    """What goes from each group's matrices; K/N of the blocks means a sparsity of 1 - K/N."""
    if (sparsity is not None) + (ratio is not None) > 1 or not (sparsity or ratio or nm):
        raise ValueError("give one of --sparsity, --ratio and --nm")
    shares: dict[str, Fraction] = {}
    if ratio is not None:
        widths = widths_of_ratio(block_map, ratio)
        shares = {g.name: 1 - Fraction(widths[g.name], g.n_blocks) for g in block_map.groups}
    elif sparsity is not None:
        shares = {group.name: sparsity_of(sparsity) for group in block_map.groups}
    if nm is None:
        return {name: Pattern(share) for name, share in shares.items()}
    pattern = n_of_m(nm)
    for share in shares.values():
        if share != pattern.sparsity:
            raise ValueError(
                f"--nm {nm} is a sparsity of {float(pattern.sparsity):g}, not {float(share):g}: "
                "give --nm alone"
            )
    return {group.name: pattern for group in block_map.groups}


def _calibrate(parent: Parent, request: PruneRequest) -> tuple[Calibration, dict[str, Any]]:
    """The text that a method goes by, and its record."""
    text = calibrate(parent, request.data, request.n, request.seed)
    n, seq_len = text.ids.shape
    return text, {"data": text.stem, "n_sequences": n, "seq_len": seq_len}


def _single_weights(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool
) -> dict[str, Any]:
    """A model of the parent's shape with zeros in it."""
    block_map, central, method = parent.block_map, parent.central, METHODS[request.method]
    wanted = patterns(block_map, request.sparsity, request.ratio, request.nm)
    ids, total = None, 1
    based_on: dict[str, Any] = {}
    if method.observe is not None:
        text, based_on = _calibrate(parent, request)
        ids, based_on = text.ids, based_on | {"seed": request.seed}
        total = len(ids) * n_layers(block_map)
    weights = central.weights.clone()  # the parent stays as it is
    model = build(parent.template, block_map, central.layout, weights).model
    with progress(quiet) as bar:
        task = bar.add_task(f"prune {request.method}", total=total, note="")
        began = time.perf_counter()
        zeros = prune_(model, block_map, method, wanted, ids, lambda: bar.advance(task))
        seconds = time.perf_counter() - began
        bar.update(task, completed=total)
    record = {
        "parent": parent.source,
        "method": request.method,
        "sparsity": {name: float(pattern.sparsity) for name, pattern in wanted.items()},
        "nm": next((f"{p.n}:{p.m}" for p in wanted.values() if p.m), None),
        "calibration": based_on,
        "seconds": seconds,
        # of the whole process, the parent included; nothing on a CPU
        "gpu_bytes": torch.cuda.max_memory_allocated(weights.device) if weights.is_cuda else None,
        "n_pruned": sum(model.get_parameter(name).numel() for name in zeros),
        "n_zeros": sum(zeros.values()),
        "n_params": central.layout.n_params,
        "blocks": asdict(parent.cfg.blocks),
        "zeros": zeros,
        **describe_run(),
    }
    _save(parent, model, folder, record)
    return record


def _save(parent: Parent, model: PreTrainedModel, folder: Path, record: dict[str, Any]) -> None:
    """A folder that plain transformers loads; it appears whole or not at all."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder, deploy.foreign_files(folder, RECORD)) as draft:
        save_tensors(huggingface.state(model), draft / "model.safetensors")
        config.save_pretrained(draft)
        if model.generation_config is not None:  # as it is: save_pretrained refuses some
            model.generation_config.to_json_file(draft / "generation_config.json")
        tokenizer = hf_folder.parent_tokenizer(parent)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _whole_blocks(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool
) -> dict[str, Any]:
    """A ticket of the blocks that score highest, repaired where that is asked for."""
    name, how, seed = request.importance, request.repair, request.seed
    assert name is not None
    assert request.ratio is not None
    widths = widths_of_ratio(parent.block_map, request.ratio)
    if how is not None:
        check_repair(parent, how)
    ids, n_repair = None, 0
    based_on: dict[str, Any] = {}
    if name in NEEDS_TEXT or how is not None:
        text, based_on = _calibrate(parent, request)
        ids = text.ids
        n_repair = len(ids) * n_layers(parent.block_map) if how is not None else 0
    needs = ids if name in NEEDS_TEXT else None
    notes: dict[str, Any] = {
        "pick": {"how": f"importance:{name}", "seed": seed, "method": name}
        | (based_on if needs is not None else {}),
        "method": request.method,
        "ratio": request.ratio,
    }
    with progress(quiet) as bar:
        total = n_repair + (0 if needs is None else len(needs))
        task = bar.add_task(f"prune {request.method}", total=total or 1, note="")

        def tick() -> None:
            bar.advance(task)

        began = time.perf_counter()
        scores = importance.score(parent, name, needs, seed, tick)
        blueprint = importance.keep_best(parent.block_map, scores, widths)
        if how is not None and ids is not None:
            parent = repair_parent(parent, blueprint, how, ids, tick)
            notes["repair"] = {"how": how, "data": based_on["data"], "n_sequences": len(ids)}
        notes |= {"seconds": time.perf_counter() - began, "scale": parent.scale}
        bar.update(task, completed=total or 1)
    deploy.save_ticket(parent, blueprint, folder, notes)
    return deploy.read_ticket(folder)
