"""A pruned model on disk: a plain Hugging Face folder with zeros in it, or a ticket."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model import huggingface
from ..model.blocks import BlockMap, widths_of_ratio
from ..model.subnet import build
from ..system.files import save_tensors, whole_folder
from ..system.provenance import describe_run
from ..system.terminal import progress
from ..tickets import deploy, hf_folder, importance
from ..tickets import pick as picks
from ..tickets.parent import Parent
from . import calibrate
from . import repair as repairs
from .methods import METHODS, prune_
from .pattern import Pattern, n_of_m, sparsity_of

RECORD = "prune.json"
STRUCTURED = "block:"  # before the name of an importance
NAMES = (*METHODS, *(STRUCTURED + name for name in importance.METHODS))


def check(folder: Path, method: str) -> None:
    """What can be refused before a model is loaded: an unknown method, a folder in use."""
    if method not in NAMES:
        raise ValueError(f"--method {method!r}: use one of {', '.join(NAMES)}")
    if any((folder / name).is_file() for name in (RECORD, deploy.TICKET)) or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ValueError(f"--out {folder} exists and is no pruned model: choose another folder")


def write(
    parent: Parent,
    folder: Path,
    method: str,
    *,
    sparsity: str | None = None,
    ratio: str | None = None,
    nm: str | None = None,
    data: str | None = None,
    n: int = picks.MOST_EXAMPLES,
    seed: int = 0,
    repair: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Prune a parent and write what is left of it, with its record; returns the record."""
    check(folder, method)
    if Path(parent.source).exists() and Path(parent.source).resolve() == folder.resolve():
        raise ValueError(f"--out {folder} is the model to prune: choose another folder")
    if method.startswith(STRUCTURED):
        if ratio is None or sparsity or nm:
            raise ValueError(f"--method {method} keeps whole blocks: give --ratio, and only that")
        return _ticket(parent, folder, method, ratio, data, n, seed, repair, quiet)
    if repair is not None:
        raise ValueError(f"--repair {repair} is for whole blocks: --method {method} removes none")
    wanted = patterns(parent.block_map, sparsity, ratio, nm)
    return _unstructured(parent, folder, method, wanted, data, n, seed, quiet)


def patterns(
    block_map: BlockMap, sparsity: str | None, ratio: str | None, nm: str | None
) -> dict[str, Pattern]:
    """What goes from each group's matrices; a ratio K/N of the blocks means a sparsity of 1 - K/N."""
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


def _unstructured(
    parent: Parent,
    folder: Path,
    method: str,
    wanted: Mapping[str, Pattern],
    data: str | None,
    n: int,
    seed: int,
    quiet: bool,
) -> dict[str, Any]:
    block_map, central = parent.block_map, parent.central
    ids: Tensor | None = None
    based_on: dict[str, Any] = {}
    if METHODS[method].observe is not None:
        stem, ids = calibrate.windows(parent, data, n, seed)
        based_on = {"data": stem, "n_sequences": n, "seq_len": ids.shape[1], "seed": seed}
    weights = central.weights.clone()  # the parent stays as it is
    model = build(parent.template, block_map, central.layout, weights).model
    n_layers = len({group.layer for group in block_map.groups})
    with progress(quiet) as bar:
        total = 1 if ids is None else n_layers * len(ids)
        task = bar.add_task(f"prune {method}", total=total, note="")
        began = time.perf_counter()
        zeros = prune_(
            model, block_map, METHODS[method], wanted, ids, lambda: bar.advance(task)
        )  # fmt: skip
        seconds = time.perf_counter() - began
        bar.update(task, completed=total)
    record = {
        "parent": parent.source,
        "method": method,
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
    with whole_folder(folder) as draft:
        save_tensors(huggingface.state(model), draft / "model.safetensors")
        config.save_pretrained(draft)
        if model.generation_config is not None:  # as it is: save_pretrained refuses some
            model.generation_config.to_json_file(draft / "generation_config.json")
        tokenizer = hf_folder.parent_tokenizer(parent)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _ticket(
    parent: Parent,
    folder: Path,
    method: str,
    ratio: str,
    data: str | None,
    n: int,
    seed: int,
    repair: str | None,
    quiet: bool,
) -> dict[str, Any]:
    name = method.removeprefix(STRUCTURED)
    widths = widths_of_ratio(parent.block_map, ratio)
    sequences, repaired = None, {}
    if repair is not None:
        repairs.check(parent, repair)
    if name in importance.NEEDS_TEXT or repair is not None:
        sequences = picks.Calibration(*calibrate.windows(parent, data, n, seed))
    with progress(quiet) as bar:
        began = time.perf_counter()
        how = picks.Pick(f"importance:{name}", method=name)
        blueprint, based_on = picks.pick(parent, widths, how, seed, None, sequences, bar)
        if repair is not None and sequences is not None:
            ids, layers = sequences.ids, {group.layer for group in parent.block_map.groups}
            task = bar.add_task(f"repair {repair}", total=len(ids) * len(layers), note="")
            tick = partial(bar.advance, task)
            parent = repairs.repair(parent, blueprint, repair, ids, tick)
            repaired = {"repair": {"how": repair, "data": sequences.stem, "n_sequences": len(ids)}}
        seconds = time.perf_counter() - began
    notes = {
        "pick": {"how": how.asked, "seed": seed, **based_on},
        "method": method,
        "ratio": ratio,
        "seconds": seconds,
        "scale": parent.scale,
        **repaired,
    }
    deploy.save_ticket(parent, blueprint, folder, notes)
    return deploy.read_ticket(folder)
