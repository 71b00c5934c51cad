"""A pruned model on disk: a plain Hugging Face folder with zeros in it, or a ticket."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict, dataclass
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
from ..system import manifest
from ..system.files import save_tensors, whole_folder
from ..system.provenance import describe_run
from ..system.terminal import progress
from ..tickets import NEEDS_TEXT, deploy, extract, hf_folder
from ..tickets.calibration import MOST_SEQUENCES, calibrate
from ..tickets.parent import Parent
from ..tickets.pick import Basis, Pick, pick_blocks
from . import NAMES, STRUCTURED
from .methods import METHODS, prune_
from .pattern import Pattern, n_of_m, sparsity_of
from .repair import check_repair, repair_parent

RECORD = "prune.json"


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """How a parent is pruned: the method, how much goes, and the text that it goes by."""

    method: str  # one of `pruners.NAMES`
    sparsity: str | None = None  # one of these three says how much
    ratio: str | None = None
    nm: str | None = None
    data: str | None = None  # calibration text; None: the training tokens of the parent's run
    n: int = MOST_SEQUENCES  # calibration sequences
    seed: int = 0
    repair: str | None = None  # of whole blocks: one of `pruners.REPAIRS`

    def __post_init__(self) -> None:
        if self.method not in NAMES:
            raise ValueError(f"--method {self.method!r}: use one of {', '.join(NAMES)}")

    @property
    def importance(self) -> str | None:
        """What whole blocks are scored by; None where single weights go."""
        is_block = self.method.startswith(STRUCTURED)
        return self.method.removeprefix(STRUCTURED) if is_block else None


def check_target(folder: Path) -> None:
    """An earlier pruned model or an empty folder is replaced; anything else is left alone."""
    if (folder / deploy.TICKET).is_file():  # of block:*
        return extract.check_target(folder)
    if _is_pruned(folder / RECORD) or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ValueError(f"--out {folder} exists and is no pruned model: choose another folder")


def _is_pruned(record: Path) -> bool:
    try:
        return "n_zeros" in manifest.read_json(record)
    except (OSError, ValueError, TypeError):
        return False


def write(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool = False
) -> dict[str, Any]:
    """Prune a parent and write what is left of it, with its record; returns the record."""
    check_target(folder)
    if Path(parent.source).exists() and Path(parent.source).resolve() == folder.resolve():
        raise ValueError(f"--out {folder} is the model to prune: choose another folder")
    if request.importance is not None:
        if request.ratio is None or request.sparsity or request.nm:
            raise ValueError(
                f"--method {request.method} keeps whole blocks: give --ratio, and only that"
            )
        return _whole_blocks(parent, folder, request, quiet)
    if request.repair is not None:
        raise ValueError(
            f"--repair {request.repair} is for whole blocks: --method {request.method} removes none"
        )
    return _single_weights(parent, folder, request, quiet)


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


def _single_weights(
    parent: Parent, folder: Path, request: PruneRequest, quiet: bool
) -> dict[str, Any]:
    block_map, central, method = parent.block_map, parent.central, METHODS[request.method]
    wanted = patterns(block_map, request.sparsity, request.ratio, request.nm)
    ids: Tensor | None = None
    based_on: dict[str, Any] = {}
    if method.observe is not None:
        text = calibrate(parent, request.data, request.n, request.seed)
        ids, (n, seq_len) = text.ids, text.ids.shape
        based_on = {
            "data": text.stem,
            "n_sequences": n,
            "seq_len": seq_len,
            "seed": request.seed,
        }
    weights = central.weights.clone()  # the parent stays as it is
    model = build(parent.template, block_map, central.layout, weights).model
    n_layers = len({group.layer for group in block_map.groups})
    with progress(quiet) as bar:
        total = 1 if ids is None else n_layers * len(ids)
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
    name, how = request.importance, request.repair
    assert name is not None
    assert request.ratio is not None
    widths = widths_of_ratio(parent.block_map, request.ratio)
    text, repaired = None, {}
    if how is not None:
        check_repair(parent, how)
    if name in NEEDS_TEXT or how is not None:
        text = calibrate(parent, request.data, request.n, request.seed)
    with progress(quiet) as bar:
        began = time.perf_counter()
        pick = Pick(f"importance:{name}", method=name)
        basis = Basis(seed=request.seed, calibration=text)
        blueprint, based_on = pick_blocks(parent, widths, pick, basis, bar)
        if how is not None and text is not None:
            layers = {group.layer for group in parent.block_map.groups}
            task = bar.add_task(f"repair {how}", total=len(text.ids) * len(layers), note="")
            tick = partial(bar.advance, task)
            parent = repair_parent(parent, blueprint, how, text.ids, tick)
            repaired = {"repair": {"how": how, "data": text.stem, "n_sequences": len(text.ids)}}
        seconds = time.perf_counter() - began
    notes = {
        "pick": {"how": pick.asked, "seed": request.seed, **based_on},
        "method": request.method,
        "ratio": request.ratio,
        "seconds": seconds,
        "scale": parent.scale,
        **repaired,
    }
    deploy.save_ticket(parent, blueprint, folder, notes)
    return deploy.read_ticket(folder)
