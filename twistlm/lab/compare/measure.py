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
from ...baselines.methods import METHODS, sparsities
from ...compute.perplexity import Text, perplexity
from ...model import families, huggingface
from ...model.blocks import SETTINGS, Blueprint, widths_of_ratio
from ...tickets import deploy, requests
from ...tickets.healing import heal
from ...tickets.parent import Parent
from ...tickets.requests import HealRequest
from ...tickets.text import calibrate, open_text, text_of
from ...tickets.ticket_scale import TicketScales, choice_text
from ...tickets.widths import weights_bytes
from .. import typed
from ..points import name_of
from . import CompareRequest, cells
from .cells import BLOCKS, Cell, reads_text
from .sweep import Result, Sweep, one

COMMON = ("common_attn", "common_ffn")
# of the parent's training: what healing takes from there
HEALS = ("lr", "betas", "eps", "weight_decay", "clip", "moments", "distil", "batch", "n_workers")
Note = Callable[..., None]  # its `note` says where a long measurement stands


class Comparison:
    """What is compared, with its text and calibration sequences read, and how it is measured.

    All that can be refused is refused when it is made. One parent is at hand at a time. What is
    being healed lies in `folder`.
    """

    def __init__(
        self, request: CompareRequest, device: str, overrides: Sequence[str], folder: Path
    ):
        self.n, self.seed, self.folder, heal = request.n, request.seed, folder, request.heal
        self.settings = typed.names(request.settings, "--settings", list(SETTINGS))
        self.ratios = typed.sizes(request.ratios, "--ratios")
        self.methods = typed.names(request.methods, "--methods", COMPARED, may_be_none=True)
        # tokens that all sizes of a setting share, each trained for itself
        self.heal = int(requests.amount("tokens", heal, "--heal")) if heal else 0
        if heal and self.heal < (n := len(self.ratios)):
            raise ValueError(f"--heal {heal}: {n} sizes share these tokens: give at least {n}")
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
        self._sweep: Sweep | None = None

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
        learnt = {"rho": parent.progress.rho, "order": parent.progress.order}
        made |= {"chosen_on": self._choice, "scale": parent.scale, "rho and order": name_of(learnt)}
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
        what, parent, ids = cell.what, cell.parent.parent, self.ids
        if self._sweep is None or self._sweep.parent is not parent:
            self._sweep = None  # the parent before makes room
            some = (self.text, self.choice, self.precision, lambda: ids, self.seed)
            self._sweep = Sweep(parent, *some)
        sweep, setting = self._sweep, cell.setting or parent.cfg.blocks.setting
        cut = sweep.cut(setting)
        if what in cells.TRAINED:
            (ticket,), _ = sweep.tickets(what, setting, cell.ratio)
            made, seconds = self._healed(cell, cut, ticket, note)
        else:
            made, seconds = sweep.measure(what, setting, cell.ratio, self.n)
        if not np.isfinite(made["values"]).all():
            raise ValueError(f"{parent.source} has no perplexity: its logits are not finite")
        n_tokens = made.get("healed", {}).get("n_tokens", 0)
        if what != cells.SCRATCH:
            seconds += sweep.seconds.get(cells.SCORES.get(what, ""), 0.0)
            n_tokens += ids.numel() if ids is not None and reads_text(what) else 0
        is_ticket, block_map = cell.ratio and what not in METHODS, cut.parent.block_map
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
        )
        if not (request.out / deploy.TICKET).is_file():  # or it was stopped while it was measured
            how_far = f"{cell} round {{round}}/{{n_rounds}}".format_map
            on_round = lambda row: note(note=how_far(row))  # noqa: E731
            where = [f"run.device={self.device}"]
            heal(request, where, like=teacher.cfg, quiet=True, on_round=on_round)
        record = deploy.read_ticket(request.out)["healed"][-1]
        model = deploy.load_ticket(request.out)
        nn.Module.to(model, self.device)
        made = one(perplexity(model, self.text, self.precision, cut.ready.loss))
        shutil.rmtree(folder)
        made |= {"healed": record} if scratch else {"treatment": chosen, "healed": record}
        return made, record["seconds"]


def _tokens_of(text: Text) -> Result:
    """The tokens that a perplexity follows from."""
    first = text.first * text.seq_len
    used = text.file.tokens[first : first + text.n_tokens]
    sha256 = hashlib.sha256(np.ascontiguousarray(used).data).hexdigest()
    return {"sha256": sha256, "n_tokens": len(used)}
