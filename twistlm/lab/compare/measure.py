"""How each kind of cell is measured: in memory, on models that share parents, text and calibration."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...baselines import repair, walk
from ...baselines.methods import METHODS, prune_
from ...baselines.pattern import Pattern
from ...compute import speed
from ...compute.attention import causal_
from ...compute.perplexity import Evaluator, Spread, Text, perplexity
from ...config import Setting
from ...model.blocks import BlockMap, Blueprint, Shapes, shares_of_ratio, widths_of_ratio
from ...model.generator import draws, for_deployment
from ...model.masks import prefixes
from ...model.subnet import build
from ...tickets import budget, deploy, importance
from ...tickets.healing import HealRequest, heal
from ...tickets.parent import Parent, recut
from ...tickets.ticket_scale import N_DRAWS, TicketScale, TicketScales
from .rivals import Rival

REPAIR_SEQUENCES = 16  # of the calibration: a repair is measured for every random ticket
Note = Callable[[str], None]  # says where a long measurement stands
Result = dict[str, Any]


@dataclass(frozen=True)
class Healing:
    """How a size is trained for itself."""

    teacher: Rival  # its settings count, too
    tokens: int  # of all sizes of a setting; in a cell, of its size
    data: str  # stem of the training tokens
    work: Path  # a folder for all sizes; in a cell, its own, removed when it is measured


@dataclass
class CutParent:
    """A parent in one setting, ready to be evaluated; lives while its cells are measured."""

    parent: Parent
    treatments: TicketScales
    scratch: tuple[Tensor, PreTrainedModel] | None = None

    @property
    def ready(self) -> Evaluator:
        return self.treatments.ready

    def fresh(self) -> PreTrainedModel:
        """The whole parent in weights of its own, to be pruned; the one before is overwritten."""
        central = self.parent.central
        if self.scratch is None:
            weights = torch.empty_like(central.weights)
            model = build(
                self.parent.template, self.parent.block_map, central.layout, weights
            ).model
            causal_(model)
            self.scratch = weights, model
        self.scratch[0].copy_(central.weights)
        return self.scratch[1]

    def narrow(self, ratio: str) -> Shapes:
        """Shapes of a ticket's weights."""
        block_map = self.parent.block_map
        widths = widths_of_ratio(block_map, ratio)
        return block_map.narrowed(self.parent.central.layout.shapes, widths)


class Stand:
    """Lives as long as the comparison; one parent is cut at a time, and stays so for its next cell."""

    def __init__(
        self,
        text: Text,
        choice: Text | None,
        ids: Tensor | None,
        precision: str,
        device: torch.device,
    ):
        self.text, self.precision, self.device = text, precision, device
        self.choice = choice  # what activation scales are chosen on
        self.ids = ids  # calibration [n, seq_len]; None where nothing needs it
        self._cut: tuple[tuple[str, Setting], CutParent] | None = None

    def whole(self, rival: Rival) -> Result:
        cut = self._of(rival, rival.parent.cfg.blocks.setting)
        shapes = cut.parent.central.layout.shapes
        return self._result(rival, [cut.ready.full_perplexity()], 0.0, 0, shapes)

    def random(
        self,
        rival: Rival,
        setting: Setting,
        ratio: str,
        how: str | None,
        n: int,
        seed: int,
        note: Note,
    ) -> Result:
        """n random tickets, repaired if a repair is named; their scale is chosen on other ones."""
        cut = self._of(rival, setting)
        block_map, values, seconds = cut.parent.block_map, [], 0.0
        widths = widths_of_ratio(block_map, ratio)
        note("scale")
        others = draws(block_map, widths, seed=seed, n=n + N_DRAWS, first=n)
        treatment, chosen = cut.treatments.best(list(others))
        began = time.perf_counter()
        for number, blueprint in enumerate(draws(block_map, widths, seed=seed, n=n)):
            note(f"{number}/{n}")
            value, took = self._ticket(cut, blueprint, treatment, how, began)
            values.append(value)
            seconds += took / n
            began = time.perf_counter()
        found = self._result(rival, values, seconds, self._n_tokens(how=how), cut.narrow(ratio))
        return found | {"treatment": chosen}

    def nested(
        self, rival: Rival, setting: Setting, ratio: str, how: str | None, note: Note
    ) -> Result:
        """The ticket of the first blocks of the parent's own order; its scale is chosen on other text."""
        cut = self._of(rival, setting)
        began = time.perf_counter()
        blueprint = _chosen(cut.parent, ratio)
        value, took, chosen = self._scaled(cut, blueprint, how, self._now() - began)
        found = self._result(rival, [value], took, self._n_tokens(how=how), cut.narrow(ratio))
        return found | {"treatment": chosen}

    def scores(self, rival: Rival, name: str, seed: int, note: Note) -> Result:
        """Scores of all blocks that any setting cuts."""
        ids = self.ids if name in importance.NEEDS_TEXT else None
        began = time.perf_counter()
        tick = _counter(note, 0 if ids is None else len(ids))
        found = importance.score(rival.parent, name, ids, seed, tick)
        return {
            "scores": {group: values.tolist() for group, values in found.items()},
            "seconds": self._now() - began,
        }

    def blocks(
        self,
        rival: Rival,
        setting: Setting,
        ratio: str,
        how: str | None,
        scored: Result,
        needs: bool,
    ) -> Result:
        """The ticket of the highest scores; its seconds contain those of the scores."""
        cut = self._of(rival, setting)
        began = time.perf_counter()
        blueprint = _chosen(cut.parent, ratio, scored)
        value, took, chosen = self._scaled(cut, blueprint, how, self._now() - began)
        n_tokens = self._n_tokens(needs, how)
        seconds = scored["seconds"] + took
        found = self._result(rival, [value], seconds, n_tokens, cut.narrow(ratio))
        return found | {"treatment": chosen}

    def healed(
        self,
        cell: tuple[Rival, Setting, str],
        scored: Result | None,
        by: Healing,
        scratch: bool,
        note: Note,
    ) -> Result:
        """The ticket of the highest scores, without scores the nested one, or its shape with random weights, trained."""
        rival, setting, ratio = cell
        cut = self._of(rival, setting)
        blueprint = _chosen(cut.parent, ratio, scored)
        treatment, chosen = cut.treatments.best([blueprint])
        parent, folder = cut.treatments.parent_with(treatment), by.work
        if not (folder / "ticket" / deploy.TICKET).is_file():  # or one that was stopped goes on
            pruned = folder / ("shape" if scratch else "ticket")
            deploy.save_ticket(parent, blueprint, pruned)
            if scratch:
                _start_anew(parent, blueprint, pruned, folder / "ticket")
        request = HealRequest(
            ticket=folder / "ticket",
            out=folder / "healed",
            tokens=by.tokens,
            teacher="none" if scratch else by.teacher.parent.source,
            data=by.data,
            valid=by.data,  # it is measured here, on the table's own text
            device=str(self.device),
            like=by.teacher.parent.cfg,
        )
        if not (request.out / deploy.TICKET).is_file():  # or it was stopped while it was measured
            heal(request, quiet=True, note=note)
        record = deploy.read_ticket(request.out)["healed"][-1]
        model = deploy.load_ticket(folder / "healed")
        nn.Module.to(model, self.device)
        value = perplexity(model, self.text, self.precision, cut.ready.loss)
        shutil.rmtree(folder)
        n_tokens, seconds = record["n_tokens"], record["seconds"]
        if scored is not None and not scratch:
            n_tokens, seconds = n_tokens + self._n_tokens(needs=True), seconds + scored["seconds"]
        found = self._result(rival, [value], seconds, n_tokens, cut.narrow(ratio))
        return found | ({} if scratch else {"treatment": chosen}) | {"healed": record}

    def unstructured(
        self, rival: Rival, setting: Setting, ratio: str, method: str, note: Note
    ) -> Result:
        """Single weights pruned to a sparsity of 1 - ratio in each layer; no byte is saved by that."""
        cut = self._of(rival, setting)
        model, block_map = cut.fresh(), cut.parent.block_map
        ids = self.ids if METHODS[method].observe else None
        wanted = {name: Pattern(share) for name, share in _sparsities(block_map, ratio).items()}
        n_all = 0 if ids is None else len(ids) * len({g.layer for g in block_map.groups})
        began = time.perf_counter()
        prune_(model, block_map, METHODS[method], wanted, ids, _counter(note, n_all))
        seconds = self._now() - began
        value = perplexity(model, self.text, self.precision, cut.ready.loss)
        shapes = cut.parent.central.layout.shapes
        return self._result(rival, [value], seconds, self._n_tokens(ids is not None), shapes)

    def decode(self, rival: Rival, setting: Setting, ratio: str, zeros: bool) -> Result:
        """How much faster than its parent a ticket, or a parent with zeros, decodes on the CPU."""
        cut = recut(rival.parent, setting)
        kept = whole = cut.block_map.full()
        if not zeros:
            widths = widths_of_ratio(cut.block_map, ratio)
            kept = for_deployment(cut.block_map, widths, seed=0)  # any blocks: equal shapes
        full, other = (deploy.cut_ticket(cut, blueprint) for blueprint in (whole, kept))
        for model in (full, other):
            nn.Module.to(model, "cpu")
        if zeros:
            _drop_(other, cut, ratio)
        slow, fast = speed.measure_all([full, other])
        return {
            "speedup": slow.fastest_decode_ms / fast.fastest_decode_ms,
            "parent": asdict(slow),
            "pruned": asdict(fast),
        }

    def _of(self, rival: Rival, setting: Setting) -> CutParent:
        """The parent in one setting; the one before makes room."""
        key = rival.sha256, setting
        if self._cut is None or self._cut[0] != key:
            self._cut = None
            cut = recut(rival.parent, setting)
            self._cut = (
                key,
                CutParent(cut, TicketScales(cut, self.text, self.choice, self.precision)),
            )
        return self._cut[1]

    def _scaled(
        self, cut: CutParent, blueprint: Blueprint, how: str | None, picked: float
    ) -> tuple[float, float, dict[str, Any]]:
        """A ticket that took `picked` seconds to choose, at its best scale: perplexity, seconds, what was tried."""
        treatment, chosen = cut.treatments.best([blueprint])
        return *self._ticket(cut, blueprint, treatment, how, self._now() - picked), chosen

    def _ticket(
        self,
        cut: CutParent,
        blueprint: Blueprint,
        treatment: TicketScale,
        how: str | None,
        began: float,
    ) -> tuple[float, float]:
        """Perplexity of a ticket, and the seconds from `began` until it was there."""
        if how is None:
            model = cut.treatments.evaluator(treatment).refill_(blueprint).model
        else:
            assert self.ids is not None
            ids, parent = self.ids[:REPAIR_SEQUENCES], cut.treatments.parent_with(treatment)
            model = deploy.cut_ticket(repair.repair_parent(parent, blueprint, how, ids), blueprint)
            causal_(model)
        seconds = self._now() - began
        return perplexity(model, self.text, self.precision, cut.ready.loss), seconds

    def _n_tokens(self, needs: bool = False, how: str | None = None) -> int:
        """Calibration tokens behind a method that needs them, a repair, or both."""
        if self.ids is None or not (needs or how):
            return 0
        return self.ids.numel() if needs else self.ids[:REPAIR_SEQUENCES].numel()

    def _result(
        self, rival: Rival, values: list[float], seconds: float, n_tokens: int, shapes: Shapes
    ) -> Result:
        if not np.isfinite(values).all():
            raise ValueError(f"{rival.parent.source} has no perplexity: its logits are not finite")
        return {
            **Spread("", 0, tuple(values)).summary(),
            "values": values,
            "seconds": seconds,
            "calibration_tokens": n_tokens,
            "bytes": budget.weights_bytes(shapes),
        }

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _counter(note: Note, n_all: int) -> Callable[[], None]:
    n = 0

    def tick() -> None:
        nonlocal n
        n += 1
        note(f"{n}/{n_all}")

    return tick


def _chosen(parent: Parent, ratio: str, scored: Result | None = None) -> Blueprint:
    """The blocks of the highest scores or, without scores, the first ones of the parent's own order."""
    block_map, widths = parent.block_map, widths_of_ratio(parent.block_map, ratio)
    if scored is None:
        return prefixes(block_map, parent.progress.order, widths)
    scores = {g: torch.tensor(v, dtype=torch.float64) for g, v in scored["scores"].items()}
    return importance.keep_best(block_map, scores, widths)


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


@torch.no_grad()
def _drop_(model: PreTrainedModel, parent: Parent, ratio: str) -> None:
    """Zeros in random places: how many there are could matter to speed, not where."""
    draw, shares = torch.Generator().manual_seed(0), _sparsities(parent.block_map, ratio)
    for linear in walk.linears(model, parent.block_map):
        weight = linear.weight(model)
        share = float(shares[linear.group])
        weight.masked_fill_(torch.rand(weight.shape, generator=draw) < share, 0)
