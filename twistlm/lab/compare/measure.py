"""How each cell is measured, and what its number follows from; finished ones are kept."""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...baselines import STRUCTURED, repair, walk
from ...baselines.methods import METHODS, prune_
from ...baselines.pattern import Pattern
from ...compute import speed
from ...compute.attention import causal_
from ...compute.perplexity import Spread, Text, perplexity
from ...config import Setting
from ...model import huggingface
from ...model.blocks import BlockMap, Blueprint, Shapes, shares_of_ratio, widths_of_ratio
from ...model.generator import for_deployment
from ...model.masks import prefixes
from ...model.subnet import build
from ...tickets import budget, deploy, importance
from ...tickets.healing import heal
from ...tickets.parent import Parent, recut
from ...tickets.requests import HealRequest
from ...tickets.ticket_scale import TicketScale, TicketScales, random_tickets, score_tickets
from ..points import Points, name_of
from .cells import (
    DECODE,
    HEALED,
    NESTED,
    NESTED_HEALED,
    RANDOM,
    SCORED_BY,
    SCRATCH,
    WHOLE,
    ZEROS,
    Cell,
    Sweep,
    exact,
)
from .parents import ComparedParent

REPAIR_SEQUENCES = 16  # of the calibration: a repair is measured for every random ticket
BLOCKS = ("attn_by", "n_ffn", "shared_first", "shared_last")  # what says how layers are cut
COMMON = ("common_attn", "common_ffn")  # named where there are some: older points have none
# of the parent's training: what healing takes from there
HEALS = ("lr", "betas", "eps", "weight_decay", "clip", "moments", "distil")
Note = Callable[[str], None]  # says where a long measurement stands
Result = dict[str, Any]


class Comparison:
    """Measures cells of a sweep; one parent is cut at a time, and stays so for its next cell.

    `find(cell)` is the result of a finished cell, `fill(cell)` measures it if there is none. Both
    go by `config(cell)`, everything that the number follows from: weights by their sha256, tokens
    by theirs, so that another sweep, parent folder or spelling of a ratio finds it, too.
    """

    def __init__(self, parents: Sequence[ComparedParent], sweep: Sweep, points: Points):
        self.sweep, self.points, first = sweep, points, parents[0].parent
        self.device, self.precision = first.central.weights.device, first.cfg.train.precision
        self.text = _tokens_of(sweep.text) | {
            "seq_len": sweep.text.seq_len,
            "precision": f"{self.precision} on {self.device.type}",
        }
        self.choice = None if sweep.choice is None else _tokens_of(sweep.choice)
        self._held: tuple[tuple[str, Setting], TicketScales] | None = None

    def find(self, cell: Cell) -> Result | None:
        """The result, if the cell was measured before."""
        found = self.points.find(self.config(cell))
        return None if found is None else found["result"]

    def fill(self, cell: Cell, note: Note = lambda where: None) -> Result:
        """The result, measured now if the cell was not measured before."""
        return self.points.measure(self.config(cell), lambda: self._measure(cell, note))["result"]

    # ---------------------------------------------------------------- what a number follows from

    def config(self, cell: Cell) -> dict[str, Any]:
        """Everything that the number of a cell follows from."""
        what, parent, sweep = cell.what, cell.parent.parent, self.sweep
        if what == WHOLE:
            return {"what": what, "weights": cell.parent.sha256, "text": self.text}
        assert cell.setting is not None
        blocks = _blocks(parent, cell.setting)
        made: Result = {"what": what, "blocks": blocks, "ratio": exact(cell.ratio)}
        if what in (DECODE, ZEROS):
            template = parent.template
            shapes = {name: list(s) for name, s in huggingface.shapes(template).items()}
            model = {"type": template.config.model_type, "shapes": shapes}
            cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
            return made | {"model": name_of(model), "cpu": cpu}
        made |= {"weights": cell.parent.sha256, "text": self.text}
        if what in METHODS or what.startswith(STRUCTURED) or what == SCRATCH:
            made["calibration"] = self._calibration() if reads_text(what) else None
        if what in METHODS:
            return made
        how, scale = cell.repair, parent.scale
        made |= {
            "scale": {scale: parent.progress.rho} if scale == "measured" else scale,
            "chosen_on": self.choice,
            "repair": None if how is None else {how: self._calibration(REPAIR_SEQUENCES)},
        }
        if what == RANDOM:
            made |= {"n": sweep.n, "seed": sweep.seed}
        if what in (NESTED, NESTED_HEALED):
            order = parent.progress.order
            made["order"] = name_of({group: list(blocks) for group, blocks in order.items()})
        if what in (HEALED, NESTED_HEALED, SCRATCH):
            assert sweep.healing is not None
            teacher = sweep.healing.teacher
            train = teacher.parent.cfg.train
            made |= {
                "tokens": sweep.healing.tokens // len(sweep.ratios_in(cell.setting)),
                "data": sweep.healing.data,
                "train": {key: getattr(train, key) for key in HEALS}
                | {"batch": train.batch * train.n_workers},
            }
            if what == NESTED_HEALED:
                made["teacher"] = teacher.sha256
        return made

    def _calibration(self, n: int | None = None) -> dict[str, Any]:
        assert self.sweep.ids is not None
        ids = self.sweep.ids[:n].contiguous()
        return {"sha256": hashlib.sha256(ids.numpy().data).hexdigest(), "shape": list(ids.shape)}

    # ---------------------------------------------------------------- how it is measured

    def _measure(self, cell: Cell, note: Note) -> Result:
        if cell.what in (DECODE, ZEROS):
            return _speed(cell)
        cut = self._cut(cell)
        shapes = cut.parent.central.layout.shapes
        if cell.what == WHOLE:
            return self._result(cell, shapes, [cut.ready.full_perplexity()], 0.0)
        if cell.what in METHODS:
            return self._result(cell, shapes, *self._single_weights(cell, cut, note))
        block_map = cut.parent.block_map
        shapes = block_map.narrowed(shapes, widths_of_ratio(block_map, cell.ratio))
        if cell.what in (HEALED, NESTED_HEALED, SCRATCH):
            return self._healed(cell, cut, shapes, note)
        return self._tickets(cell, cut, shapes, note)

    def _tickets(self, cell: Cell, cut: TicketScales, shapes: Shapes, note: Note) -> Result:
        """Random tickets, whose scale is chosen on other ones; else the one that is picked."""
        if cell.what == RANDOM:
            n, seed, block_map = self.sweep.n, self.sweep.seed, cut.parent.block_map
            widths = widths_of_ratio(block_map, cell.ratio)
            tickets, held_out = random_tickets(block_map, widths, n=n, seed=seed)
            picking = 0.0
        else:
            ticket, picking = self._pick(cell, cut, note)
            tickets, held_out = [ticket], []
        times: list[float] = []  # of every ticket, until it is there

        def measure(scale: TicketScale, blueprint: Blueprint) -> float:
            note(f"{len(times)}/{len(tickets)}")
            began = self._now()
            if cell.repair is None:
                model = cut.evaluator(scale).refill_(blueprint).model
            else:
                assert self.sweep.ids is not None
                ids, parent = self.sweep.ids[:REPAIR_SEQUENCES], cut.parent_with(scale)
                repaired = repair.repair_parent(parent, blueprint, cell.repair, ids)
                model = deploy.cut_ticket(repaired, blueprint)
                causal_(model)
            times.append(self._now() - began)
            return perplexity(model, self.sweep.text, self.precision, cut.ready.loss)

        note("scale")
        scores = score_tickets(cut, tickets, held_out, measure)
        seconds = picking + sum(times) / len(times)
        found = self._result(cell, shapes, list(scores.values), seconds)
        return found | {"treatment": scores.record}

    def _pick(self, cell: Cell, cut: TicketScales, note: Note) -> tuple[Blueprint, float]:
        """The nested blocks, or those of the highest scores, and the seconds that they took."""
        parent, block_map = cut.parent, cut.parent.block_map
        widths, name = widths_of_ratio(block_map, cell.ratio), _importance(cell.what)
        if name is None:
            began = self._now()
            return prefixes(block_map, parent.progress.order, widths), self._now() - began
        found = self._scores(cell.parent, name, note)
        began = self._now()
        scores = {g: torch.tensor(v, dtype=torch.float64) for g, v in found["scores"].items()}
        blueprint = importance.keep_best(block_map, scores, widths)
        return blueprint, found["seconds"] + self._now() - began

    def _scores(self, compared: ComparedParent, name: str, note: Note) -> Result:
        """Scores of all blocks: a point of their own, since all settings and ratios share them."""
        parent, reads = compared.parent, name in importance.NEEDS_TEXT
        config = {
            "what": f"scores {name}",
            "weights": compared.sha256,
            "blocks": _blocks(parent, parent.cfg.blocks.setting),
            "calibration": self._calibration() if reads else None,
            "device": self.device.type,
        }

        def measure() -> Result:
            ids = self.sweep.ids if reads else None
            began = self._now()
            tick = _counter(note, 0 if ids is None else len(ids))
            found = importance.score(parent, name, ids, self.sweep.seed, tick)
            scores = {group: values.tolist() for group, values in found.items()}
            return {"scores": scores, "seconds": self._now() - began}

        return self.points.measure(config, measure)["result"]

    def _single_weights(
        self, cell: Cell, cut: TicketScales, note: Note
    ) -> tuple[list[float], float]:
        """Pruned to a sparsity of 1 - ratio in each layer: perplexity and seconds."""
        central, block_map = cut.parent.central, cut.parent.block_map
        method, ids = METHODS[cell.what], self.sweep.ids
        model = build(cut.parent.template, block_map, central.layout, central.weights.clone()).model
        causal_(model)
        shares = _sparsities(block_map, cell.ratio)
        wanted = {name: Pattern(share) for name, share in shares.items()}
        n_all = 0 if ids is None else len(ids) * walk.n_layers(block_map)
        began = self._now()
        prune_(model, block_map, method, wanted, ids, _counter(note, n_all))
        seconds = self._now() - began
        return [perplexity(model, self.sweep.text, self.precision, cut.ready.loss)], seconds

    def _healed(self, cell: Cell, cut: TicketScales, shapes: Shapes, note: Note) -> Result:
        """A ticket, or its shape with random weights, trained as the data-parallel parent was."""
        healing, config = self.sweep.healing, self.config(cell)
        assert healing is not None
        teacher, scratch = healing.teacher.parent, cell.what == SCRATCH
        folder = healing.folder / name_of(config)  # one that was stopped goes on there
        blueprint, picking = self._pick(cell, cut, note)
        scale, chosen = cut.best([blueprint])
        if not (folder / "ticket" / deploy.TICKET).is_file():
            parent, pruned = cut.parent_with(scale), folder / ("shape" if scratch else "ticket")
            deploy.save_ticket(parent, blueprint, pruned)
            if scratch:
                _start_anew(parent, blueprint, pruned, folder / "ticket")
        note(f"{config['tokens']:,} tokens")
        request = HealRequest(
            ticket=folder / "ticket",
            out=folder / "healed",
            tokens=str(config["tokens"]),
            teacher="none" if scratch else teacher.source,
            data=healing.data,
            valid=healing.data,  # it is measured here, on the table's own text
            device=str(self.device),
            like=teacher.cfg,
        )
        if not (request.out / deploy.TICKET).is_file():  # or it was stopped while it was measured
            heal(request, quiet=True, note=note)
        record = deploy.read_ticket(request.out)["healed"][-1]
        model = deploy.load_ticket(request.out)
        nn.Module.to(model, self.device)
        value = perplexity(model, self.sweep.text, self.precision, cut.ready.loss)
        shutil.rmtree(folder)
        seconds = record["seconds"] + (0.0 if scratch else picking)
        found = self._result(cell, shapes, [value], seconds)
        found["calibration_tokens"] += record["n_tokens"]
        return found | ({} if scratch else {"treatment": chosen}) | {"healed": record}

    def _cut(self, cell: Cell) -> TicketScales:
        """The cell's parent in its setting, ready to be evaluated; the one before makes room."""
        parent, sweep = cell.parent.parent, self.sweep
        setting = cell.setting or parent.cfg.blocks.setting
        key = cell.parent.sha256, setting
        if self._held is None or self._held[0] != key:
            self._held = None
            cut = TicketScales(recut(parent, setting), sweep.text, sweep.choice, self.precision)
            self._held = key, cut
        return self._held[1]

    def _result(self, cell: Cell, shapes: Shapes, values: list[float], seconds: float) -> Result:
        if not np.isfinite(values).all():
            source = cell.parent.parent.source
            raise ValueError(f"{source} has no perplexity: its logits are not finite")
        n_tokens, ids = 0, self.sweep.ids
        if ids is not None and (reads_text(cell.what) or cell.repair):
            n_tokens = (ids if reads_text(cell.what) else ids[:REPAIR_SEQUENCES]).numel()
        return {
            **Spread("", 0, tuple(values)).summary(),
            "values": values,
            "seconds": seconds,
            "calibration_tokens": 0 if cell.what == SCRATCH else n_tokens,
            "bytes": budget.weights_bytes(shapes),
        }

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _importance(what: str) -> str | None:
    """What the blocks of a cell are scored by, if they are."""
    if what in (HEALED, SCRATCH):
        return SCORED_BY
    return what.removeprefix(STRUCTURED) if what.startswith(STRUCTURED) else None


def reads_text(what: str) -> bool:
    """Whether what is measured needs calibration text."""
    if what in METHODS:
        return METHODS[what].observe is not None
    return _importance(what) in importance.NEEDS_TEXT


def _blocks(parent: Parent, setting: Setting) -> dict[str, Any]:
    """How a setting cuts a parent's layers."""
    blocks = parent.cfg.blocks
    common: dict[str, Any] = {key: c for key in COMMON if (c := list(getattr(blocks, key)))}
    if common and blocks.common_by != "index":  # the same numbers mean other blocks
        common["common_by"] = blocks.common_by
    return {"setting": setting, **{key: getattr(blocks, key) for key in BLOCKS}, **common}


def _tokens_of(text: Text) -> dict[str, Any]:
    """The tokens that a perplexity follows from."""
    first = text.first * text.seq_len
    used = text.file.tokens[first : first + text.n_sequences * text.seq_len]
    sha256 = hashlib.sha256(np.ascontiguousarray(used).data).hexdigest()
    return {"sha256": sha256, "n_tokens": len(used)}


def _counter(note: Note, n_all: int) -> Callable[[], None]:
    n = 0

    def tick() -> None:
        nonlocal n
        n += 1
        note(f"{n}/{n_all}")

    return tick


def _start_anew(parent: Parent, blueprint: Blueprint, ticket: Path, out: Path) -> None:
    """A ticket of the same shape with random weights, as its family initialises them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        deploy.load_ticket(ticket).config, trust_remote_code=False
    )
    deploy.save_model(parent, blueprint, model, out, {})


def _sparsities(block_map: BlockMap, ratio: str) -> dict[str, Fraction]:
    """1 - ratio for each group, exactly: single weights need no whole number of blocks."""
    said = shares_of_ratio(block_map, ratio)
    return {name: 1 - Fraction(text) for name, text in said.items()}


def _speed(cell: Cell) -> Result:
    """How much faster than its parent a ticket, or a parent with zeros, decodes on the CPU."""
    assert cell.setting is not None
    cut = recut(cell.parent.parent, cell.setting)
    kept = whole = cut.block_map.full()
    if cell.what == DECODE:
        widths = widths_of_ratio(cut.block_map, cell.ratio)
        kept = for_deployment(cut.block_map, widths, seed=0)  # any blocks: equal shapes
    full, other = (deploy.cut_ticket(cut, blueprint) for blueprint in (whole, kept))
    for model in (full, other):
        nn.Module.to(model, "cpu")
    if cell.what == ZEROS:
        _drop_(other, cut, cell.ratio)
    slow, fast = speed.measure_all([full, other])
    return {
        "speedup": slow.fastest_decode_ms / fast.fastest_decode_ms,
        "parent": asdict(slow),
        "pruned": asdict(fast),
    }


@torch.no_grad()
def _drop_(model: PreTrainedModel, parent: Parent, ratio: str) -> None:
    """Zeros in random places: how many there are could matter to speed, not where."""
    draw, shares = torch.Generator().manual_seed(0), _sparsities(parent.block_map, ratio)
    for linear in walk.linears(model, parent.block_map):
        weight = linear.weight(model)
        share = float(shares[linear.group])
        weight.masked_fill_(torch.rand(weight.shape, generator=draw) < share, 0)
