"""How each cell is measured, and what its number follows from."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...baselines import COMPARED
from ...baselines.methods import METHODS, prune_, sparsities
from ...compute.attention import causal_
from ...compute.perplexity import Text, perplexity, summarize
from ...compute.slopes import order_of
from ...compute.speed import now
from ...config import Setting
from ...model import families, huggingface
from ...model.blocks import SETTINGS, Blueprint, widths_of_ratio
from ...model.masks import prefixes
from ...tickets import NEEDS_TEXT, deploy, importance, requests
from ...tickets.healing import heal
from ...tickets.importance import BlockScores
from ...tickets.parent import Parent, recut
from ...tickets.requests import HealRequest
from ...tickets.text import calibrate, open_text, text_of
from ...tickets.ticket_scale import TicketScales, choice_text, random_tickets, score_tickets
from ...tickets.widths import weights_bytes
from ..points import name_of
from . import CompareRequest, cells
from .cells import BLOCKS, Cell, importance_of, reads_text

COMMON = ("common_attn", "common_ffn")
# of the parent's training: what healing takes from there
HEALS = ("lr", "betas", "eps", "weight_decay", "clip", "moments", "distil", "batch", "n_workers")
Note = Callable[..., None]  # its `note` says where a long measurement stands
Result = dict[str, Any]


class Comparison:
    """What is compared, with its text and calibration sequences read, and how it is measured.

    All that can be refused is refused when it is made. One parent is cut at a time, and stays so
    for its next cell. What is being healed lies in `folder`.
    """

    def __init__(
        self, request: CompareRequest, device: str, overrides: Sequence[str], folder: Path
    ):
        self.n, self.seed, self.folder, heal = request.n, request.seed, folder, request.heal
        self.settings = cells.names(request.settings, "--settings", list(SETTINGS))
        if not self.settings:
            raise ValueError(f"--settings names none of {', '.join(SETTINGS)}")
        self.ratios = cells.sizes(request.ratios)
        self.methods = cells.names(request.methods, "--methods", COMPARED)
        # tokens that all sizes of a setting share, each trained for itself
        self.heal = int(requests.amount("tokens", heal, "--heal")) if heal else 0
        kinds = {method for method, _ in request.sources}
        if self.methods and kinds and "dense" not in kinds:
            raise ValueError("--methods prune a data-parallel parent: give --parent-dense, or ''")
        if heal and "dense" not in kinds:
            raise ValueError("--heal prunes and trains a data-parallel parent: give --parent-dense")
        self.parents = cells.open_all(request.sources, self.settings, device, overrides)
        # of healing: its training settings count, too
        self.teacher = next((p for p in self.parents if p.method == "dense"), self.parents[0])
        first = self.parents[0].parent
        source, cfg = first.source, first.cfg
        self.device, self.precision = first.central.weights.device, cfg.train.precision
        self.ids: Tensor | None = None  # calibration [n, seq_len], where something needs it
        if heal or any(map(reads_text, self.methods)):
            options = ("--calibration", "--calibration-sequences")
            n = request.calibration_sequences
            self.ids = calibrate(first, request.calibration, n, request.seed, options).ids
        self.text = text_of(first, request.data, request.tokens)
        for each in (each.parent for each in self.parents):
            vocab = huggingface.vocab_size(each.template)
            self.text.file.check(cfg.data.seq_len, vocab, each.tokenizer_sha256)
            self._check_ratios(each)
        # what activation scales are chosen on: never `text`
        self.choice = choice_text(self.text, cfg.data, Path(source))
        self.heal_data = open_text(source, cfg, request.calibration, "train").stem if heal else ""
        self._text, self._choice = _tokens_of(self.text), self.choice and _tokens_of(self.choice)
        self._held: tuple[tuple[str, Setting], TicketScales] | None = None
        self._scores: dict[Any, tuple[BlockScores, float]] = {}  # of all settings

    def _check_ratios(self, parent: Parent) -> None:
        """Of single weights any share can stay, of tickets a whole number of blocks."""
        has_tickets = self.n > 0 or self.heal > 0 or not set(self.methods) <= set(METHODS)
        read: Any = widths_of_ratio if has_tickets else sparsities
        for setting in self.settings:
            blocks = replace(parent.cfg.blocks, setting=setting)
            block_map = families.partition(parent.template, blocks)
            for ratio in self.ratios:
                try:
                    read(block_map, ratio)
                except ValueError as error:
                    n_blocks = {block_map.n_blocks(kind) for kind in SETTINGS[setting]}
                    advice = "; each kind can have its own, as in --ratios attn=1/3,ffn=4/12"
                    advice = advice if len(n_blocks) > 1 and "=" not in ratio else ""
                    raise ValueError(f"--ratios {ratio}: {error}{advice}") from None

    def cells(self) -> list[Cell]:
        """All cells in the order of measurement: parent, setting, ratio."""
        found: list[Cell] = []
        for each in self.parents:
            found.append(Cell(each, cells.WHOLE))
            has_order = bool(each.parent.progress.order)
            for setting in self.settings:
                learnt, rows = setting in each.settings, []
                if self.n and learnt:
                    rows += [cells.RANDOM, *([cells.NESTED] if has_order else ())]
                if each.method == "dense":
                    rows += [*self.methods, *((cells.HEALED, cells.SCRATCH) if self.heal else ())]
                elif self.heal and has_order and learnt:
                    rows.append(cells.NESTED_HEALED)
                found += [Cell(each, what, setting, r) for r in self.ratios for what in rows]
        return found

    def config(self, cell: Cell) -> dict[str, Any]:
        """Everything that the number of a cell follows from: weights and tokens by their sha256,
        so that another comparison or parent folder finds it, too.
        """
        what, parent = cell.what, cell.parent.parent
        precision = f"{self.precision} on {self.device.type}"
        text = {**self._text, "seq_len": self.text.seq_len, "precision": precision}
        made: Result = {"what": what, "weights": cell.parent.sha256, "text": text}
        if cell.setting is None:  # the whole model
            return made
        blocks = {key: getattr(parent.cfg.blocks, key) for key in (*BLOCKS, *COMMON)}
        made |= {"setting": cell.setting, "blocks": blocks, "ratio": cell.ratio, "seed": self.seed}
        blocks["common_by"] = "index"  # this and `repair`: so that cells of before are found
        made |= {"chosen_on": self._choice, "repair": None}
        learnt = {"rho": parent.progress.rho, "order": parent.progress.order}
        made |= {"scale": parent.scale, "rho and order": name_of(learnt)}
        if reads_text(what) and self.ids is not None:
            made["calibration"] = hashlib.sha256(self.ids.numpy().data).hexdigest()
        if what == cells.RANDOM:
            made["n"] = self.n
        if what in cells.TRAINED:
            train = self.teacher.parent.cfg.train
            made |= {"tokens": self.heal // len(self.ratios), "data": self.heal_data}
            made |= {"train": {key: getattr(train, key) for key in HEALS}}
            made |= {"teacher": self.teacher.sha256}
        return made

    def measure(self, cell: Cell, note: Note) -> Result:
        """The perplexities of a cell, and what they cost."""
        cut, what, ids = self._cut(cell), cell.what, self.ids
        block_map, key = cut.parent.block_map, (cell.parent.sha256, importance_of(what))

        def score(name: str) -> BlockScores:
            if key not in self._scores:
                began = now(self.device)
                some = ids if name in NEEDS_TEXT else None
                found = importance.score(cell.parent.parent, name, some, self.seed)
                self._scores[key] = found, now(self.device) - began
            return self._scores[key][0]

        if what in cells.TRAINED:
            (ticket,), _ = tickets_of(cut, what, cell.ratio, score=score)
            made, seconds = self._healed(cell, cut, ticket, note)
        else:
            made, seconds = measured(cut, what, cell.ratio, self.n, self.seed, ids, score)
        if not np.isfinite(made["values"]).all():
            source = cell.parent.parent.source
            raise ValueError(f"{source} has no perplexity: its logits are not finite")
        n_tokens = made.get("healed", {}).get("n_tokens", 0)
        if what != cells.SCRATCH:
            seconds += self._scores[key][1] if key in self._scores else 0.0
            n_tokens += ids.numel() if ids is not None and reads_text(what) else 0
        is_ticket = cell.ratio and what not in METHODS
        widths = widths_of_ratio(block_map, cell.ratio) if is_ticket else block_map.full_widths()
        n_bytes = weights_bytes(block_map.narrowed(cut.parent.central.layout.shapes, widths))
        return {**made, "seconds": seconds, "calibration_tokens": n_tokens, "bytes": n_bytes}

    def _healed(
        self, cell: Cell, cut: TicketScales, ticket: Blueprint, note: Note
    ) -> tuple[Result, float]:
        """A ticket, or its shape with random weights, trained as the data-parallel parent was."""
        config, scratch = self.config(cell), cell.what == cells.SCRATCH
        teacher = self.teacher.parent
        folder = self.folder / name_of(config)  # one that was stopped goes on there
        scale, chosen = cut.best([ticket])
        if not (folder / "ticket" / deploy.TICKET).is_file():
            parent = cut.parent_with(scale)
            model = deploy.cut_ticket(parent, ticket)
            if scratch:  # the same shape with random weights, as its family initialises them
                deploy.save_ticket(parent, ticket, folder / "shape", model=model)
                torch.manual_seed(0)
                shape = deploy.load_ticket(folder / "shape").config
                model = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
            deploy.save_ticket(parent, ticket, folder / "ticket", model=model)
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
            heal(request, quiet=True, on_round=lambda row: note(note=how_far(row)))
        record = deploy.read_ticket(request.out)["healed"][-1]
        model = deploy.load_ticket(request.out)
        nn.Module.to(model, self.device)
        made = _one(perplexity(model, self.text, self.precision, cut.ready.loss))
        shutil.rmtree(folder)
        made |= {"healed": record} if scratch else {"treatment": chosen, "healed": record}
        return made, record["seconds"]

    def _cut(self, cell: Cell) -> TicketScales:
        """The cell's parent in its setting, ready to be evaluated; the one before makes room."""
        parent = cell.parent.parent
        setting = cell.setting or parent.cfg.blocks.setting
        key = cell.parent.sha256, setting
        if self._held is None or self._held[0] != key:
            self._held = None
            cut = TicketScales(recut(parent, setting), self.text, self.choice, self.precision)
            self._held = key, cut
        return self._held[1]


def measured(
    cut: TicketScales, what: str, ratio: str, n: int, seed: int, ids: Tensor | None, score: Any
) -> tuple[Result, float]:
    """Perplexities of a parent, or of what is left of it at one size; seconds of pruning.

    Single weights are pruned to a sparsity of 1 - ratio, exactly.
    """
    ready, parent, block_map = cut.ready, cut.parent, cut.parent.block_map
    if what == cells.WHOLE:
        return _one(ready.full_perplexity()), 0.0
    if what not in METHODS:
        return score_tickets(cut, *tickets_of(cut, what, ratio, n, seed, score)), 0.0
    model = parent.whole(parent.central.weights.clone()).model
    causal_(model)
    began = now(model.device)
    prune_(model, block_map, METHODS[what], sparsities(block_map, ratio), ids)
    seconds = now(model.device) - began
    return _one(perplexity(model, ready.text, ready.precision, ready.loss)), seconds


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


def _one(value: float) -> Result:
    return {"values": [value], **summarize([value])}


def _tokens_of(text: Text) -> Result:
    """The tokens that a perplexity follows from."""
    first = text.first * text.seq_len
    used = text.file.tokens[first : first + text.n_tokens]
    sha256 = hashlib.sha256(np.ascontiguousarray(used).data).hexdigest()
    return {"sha256": sha256, "n_tokens": len(used)}
