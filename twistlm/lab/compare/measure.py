"""How each cell is measured, and what its number follows from; finished ones are kept."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...baselines.methods import METHODS, prune_, sparsities
from ...compute.attention import causal_
from ...compute.perplexity import Text, perplexity, summarize
from ...compute.slopes import order_of
from ...compute.speed import now
from ...config import Setting
from ...model.blocks import Blueprint, widths_of_ratio
from ...model.masks import prefixes
from ...tickets import NEEDS_TEXT, deploy, importance
from ...tickets.cost import weights_bytes
from ...tickets.healing import heal
from ...tickets.importance import BlockScores
from ...tickets.parent import recut
from ...tickets.requests import HealRequest
from ...tickets.ticket_scale import TicketScales, random_tickets, score_tickets
from ..points import Points, name_of
from . import cells
from .cells import BLOCKS, Cell, Sweep, importance_of, reads_text

COMMON = ("common_attn", "common_ffn", "common_by")
# of the parent's training: what healing takes from there
HEALS = ("lr", "betas", "eps", "weight_decay", "clip", "moments", "distil", "batch", "n_workers")
Note = Callable[[str], None]  # says where a long measurement stands
Result = dict[str, Any]
Measured = tuple[list[float], float, Result]  # perplexities, seconds, what else is known


class Comparison:
    """Measures cells of a sweep; one parent is cut at a time, and stays so for its next cell.

    A cell goes by `config(cell)`, everything that its number follows from: weights and tokens by
    their sha256, so that another sweep or parent folder finds it, too. What is being healed lies in
    `folder`.
    """

    def __init__(self, sweep: Sweep, points: Points, folder: Path):
        self.sweep, self.points, self.folder = sweep, points, folder
        first = sweep.parents[0].parent
        self.device, self.precision = first.central.weights.device, first.cfg.train.precision
        precision = f"{self.precision} on {self.device.type}"
        self.text = _tokens_of(sweep.text) | {"seq_len": sweep.text.seq_len, "precision": precision}
        self.choice = None if sweep.choice is None else _tokens_of(sweep.choice)
        # of healing: its training settings count, too
        self.teacher = next((p for p in sweep.parents if p.method == "dense"), sweep.parents[0])
        self._held: tuple[tuple[str, Setting], TicketScales] | None = None
        self._scores: dict[Any, tuple[BlockScores, float]] = {}  # of all settings

    def find(self, cell: Cell) -> Result:
        """The result of a cell; empty where it was not measured before."""
        found = self.points.find(self.config(cell))
        return {} if found is None else found["result"]

    def fill(self, cell: Cell, note: Note) -> None:
        """Measure the cell, if it was not measured before."""
        self.points.measure(self.config(cell), lambda: self._measure(cell, note))

    def config(self, cell: Cell) -> dict[str, Any]:
        """Everything that the number of a cell follows from."""
        what, parent, sweep = cell.what, cell.parent.parent, self.sweep
        made: Result = {"what": what, "weights": cell.parent.sha256, "text": self.text}
        if cell.setting is None:  # the whole model
            return made
        blocks = {key: getattr(parent.cfg.blocks, key) for key in (*BLOCKS, *COMMON)}
        made |= {"setting": cell.setting, "blocks": blocks, "ratio": cell.ratio}
        made |= {"seed": sweep.seed, "chosen_on": self.choice}
        made["repair"] = None  # so that cells of before are found
        learnt = {"rho": parent.progress.rho, "order": parent.progress.order}
        made |= {"scale": parent.scale, "rho and order": name_of(learnt)}
        if reads_text(what) and sweep.ids is not None:
            made["calibration"] = hashlib.sha256(sweep.ids.numpy().data).hexdigest()
        if what == cells.RANDOM:
            made["n"] = sweep.n
        if what in cells.TRAINED:
            train = self.teacher.parent.cfg.train
            made |= {"tokens": sweep.heal // len(sweep.ratios), "data": sweep.heal_data}
            made |= {"train": {key: getattr(train, key) for key in HEALS}}
            made |= {"teacher": self.teacher.sha256}
        return made

    def _measure(self, cell: Cell, note: Note) -> Result:
        cut, what, ids = self._cut(cell), cell.what, self.sweep.ids
        block_map, widths = cut.parent.block_map, cut.parent.block_map.full_widths()
        values, seconds, more = [0.0], 0.0, Result()
        if what == cells.WHOLE:
            values = [cut.ready.full_perplexity()]
        elif what in METHODS:
            values[0], seconds = score_pruned(cut, what, cell.ratio, ids)
        else:
            widths = widths_of_ratio(block_map, cell.ratio)
            if what in cells.TRAINED:
                values, seconds, more = self._healed(cell, cut, note)
            else:
                tickets, held_out, seconds = self._pick(cell, cut)
                scores = score_tickets(cut, tickets, held_out)
                values, more = scores["values"], {"treatment": scores["treatment"]}
        if not np.isfinite(values).all():
            source = cell.parent.parent.source
            raise ValueError(f"{source} has no perplexity: its logits are not finite")
        n_tokens = more.get("healed", {}).get("n_tokens", 0)
        if ids is not None and reads_text(what) and what != cells.SCRATCH:
            n_tokens += ids.numel()
        shapes = block_map.narrowed(cut.parent.central.layout.shapes, widths)
        costs = {"calibration_tokens": n_tokens, "bytes": weights_bytes(shapes)}
        return {**summarize(values), "values": values, "seconds": seconds, **costs, **more}

    def _pick(
        self, cell: Cell, cut: TicketScales
    ) -> tuple[list[Blueprint], list[Blueprint], float]:
        """Tickets, others that their scale is chosen on, and the seconds of scoring blocks."""
        key = cell.parent.sha256, importance_of(cell.what)

        def score(name: str) -> BlockScores:
            if key not in self._scores:
                began, ids = now(self.device), self.sweep.ids if name in NEEDS_TEXT else None
                found = importance.score(cell.parent.parent, name, ids, self.sweep.seed)
                self._scores[key] = found, now(self.device) - began
            return self._scores[key][0]

        made = tickets_of(cut, cell.what, cell.ratio, self.sweep.n, self.sweep.seed, score)
        return *made, self._scores[key][1] if key in self._scores else 0.0

    def _healed(self, cell: Cell, cut: TicketScales, note: Note) -> Measured:
        """A ticket, or its shape with random weights, trained as the data-parallel parent was."""
        config, scratch = self.config(cell), cell.what == cells.SCRATCH
        teacher = self.teacher.parent
        folder = self.folder / name_of(config)  # one that was stopped goes on there
        (blueprint,), _, picking = self._pick(cell, cut)
        scale, chosen = cut.best([blueprint])
        if not (folder / "ticket" / deploy.TICKET).is_file():
            parent = cut.parent_with(scale)
            model = deploy.cut_ticket(parent, blueprint)
            if scratch:  # the same shape with random weights, as its family initialises them
                deploy.save_ticket(parent, blueprint, folder / "shape", model=model)
                torch.manual_seed(0)
                shape = deploy.load_ticket(folder / "shape").config
                model = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
            deploy.save_ticket(parent, blueprint, folder / "ticket", model=model)
        request = HealRequest(
            ticket=folder / "ticket",
            out=folder / "healed",
            tokens=str(config["tokens"]),
            teacher="none" if scratch else teacher.source,
            data=config["data"],
            valid=config["data"],  # it is measured here, on the table's own text
            device=str(self.device),
            like=teacher.cfg,
        )
        if not (request.out / deploy.TICKET).is_file():  # or it was stopped while it was measured
            how_far = f"{cell} round {{round}}/{{n_rounds}}".format_map
            heal(request, quiet=True, on_round=lambda row: note(how_far(row)))
        record = deploy.read_ticket(request.out)["healed"][-1]
        model = deploy.load_ticket(request.out)
        nn.Module.to(model, self.device)
        value = perplexity(model, self.sweep.text, self.precision, cut.ready.loss)
        shutil.rmtree(folder)
        if scratch:
            return [value], record["seconds"], {"healed": record}
        return [value], record["seconds"] + picking, {"treatment": chosen, "healed": record}

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


def tickets_of(
    cut: TicketScales, what: str, ratio: str, n=0, seed=0, score=None
) -> tuple[list[Blueprint], list[Blueprint]]:
    """n random tickets and others that their scale is chosen on; else the one that is picked."""
    block_map = cut.parent.block_map
    widths = widths_of_ratio(block_map, ratio)
    if what == cells.RANDOM:
        return random_tickets(block_map, widths, n=n, seed=seed)
    name = importance_of(what)
    order = order_of(score(name)) if name else cut.parent.progress.order
    return [prefixes(block_map, order, widths)], []


def score_pruned(
    cut: TicketScales, method: str, ratio: str, ids: Tensor | None
) -> tuple[float, float]:
    """Single weights pruned to a sparsity of 1 - ratio, exactly: perplexity, seconds of pruning."""
    parent, block_map = cut.parent, cut.parent.block_map
    model = parent.whole(parent.central.weights.clone()).model
    causal_(model)
    began = now(model.device)
    prune_(model, block_map, METHODS[method], sparsities(block_map, ratio), ids)
    seconds = now(model.device) - began
    return perplexity(model, cut.ready.text, cut.ready.precision, cut.ready.loss), seconds


def _tokens_of(text: Text) -> dict[str, Any]:
    """The tokens that a perplexity follows from."""
    first = text.first * text.seq_len
    used = text.file.tokens[first : first + text.n_tokens]
    sha256 = hashlib.sha256(np.ascontiguousarray(used).data).hexdigest()
    return {"sha256": sha256, "n_tokens": len(used)}
