"""The cells of a comparison: what each number follows from, and its place in the table."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...baselines import STRUCTURED
from ...baselines.methods import METHODS
from ...compute.perplexity import Text
from ...config import Setting
from ...model import huggingface
from ...model.blocks import KINDS, SETTINGS
from ...tickets import importance
from ..points import Points, name_of
from .measure import REPAIR_SEQUENCES, Healing, Note, Result, Stand
from .rivals import Rival

NESTED = "nested"  # the first blocks of a parent's own order
SCORED_BY = "mask-fisher"  # the best score for whole blocks so far
HEALED, SCRATCH = f"{STRUCTURED}{SCORED_BY} + heal", "from scratch"
NESTED_HEALED = f"{NESTED} + heal"
BLOCKS = ("attn_by", "n_ffn", "shared_first", "shared_last")  # what says how layers are cut
COMMON = ("common_attn", "common_ffn")  # named where there are some: older points have none
# of the parent's training: what healing takes from there
HEALS = ("lr", "betas", "eps", "weight_decay", "clip", "moments", "distil")


def named_shares(ratio: str) -> dict[str, str]:
    """What stays of each kind of layer or single layer that a ratio names; nothing for a plain fraction."""
    pairs = (pair.split("=", 1) for pair in ratio.split(",")) if "=" in ratio else ()
    return dict(pairs)


def in_setting(ratio: str, setting: Setting) -> str:
    """What a ratio says of the kinds that a setting cuts: of `attn=2/3,ffn=6/12` in ffn, `6/12`."""
    kinds = SETTINGS[setting]
    mine = {
        key: text for key, text in named_shares(ratio).items() if key.partition(".")[0] in kinds
    }
    if not mine:
        return ratio
    alone = len(kinds) == 1 and set(mine) == set(kinds)
    return mine[kinds[0]] if alone else ",".join(f"{key}={text}" for key, text in mine.items())


def exact(ratio: str) -> str:
    """The same for all ways to write a ratio: `1/2` for 6/12 and for attn=2/4,ffn=0.5."""
    shares = {key: Fraction(text) for key, text in named_shares(ratio).items()}
    if len(set(shares.values())) < 2:
        return str(next(iter(shares.values()), None) or Fraction(ratio))
    own = {
        key: v
        for key, v in shares.items()
        if v != shares.get(key.partition(".")[0]) or key in KINDS
    }
    return ",".join(f"{key}={own[key]}" for key in sorted(own))


def mean_share(ratio: str) -> Fraction:
    """How large a ratio is, among others: its share, or the mean of those of its kinds of layer."""
    found = [Fraction(text) for key, text in named_shares(ratio).items() if key in KINDS]
    return sum(found, Fraction(0)) / len(found) if found else Fraction(ratio)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is compared, with its text and its calibration sequences read."""

    settings: tuple[Setting, ...]
    ratios: tuple[str, ...]
    methods: tuple[str, ...]  # of `twistlm prune`
    on: tuple[str, ...]  # kinds of parent that they prune
    repairs: tuple[str, ...]
    n: int  # random tickets of each parent and size; 0: none
    seed: int
    text: Text
    choice: Text | None  # what activation scales are chosen on: never `text`
    ids: Tensor | None  # calibration
    healing: Healing | None = None  # how each size is trained for itself, if at all

    def ratios_in(self, setting: Setting) -> tuple[str, ...]:
        """Sizes in one setting, each once: two ratios may differ in a kind that it does not cut."""
        found: dict[str, str] = {}
        for ratio in (in_setting(ratio, setting) for ratio in self.ratios):
            found.setdefault(exact(ratio), ratio)
        return tuple(found.values())

    @property
    def tickets(self) -> bool:
        whole = any(method.startswith(STRUCTURED) for method in self.methods)
        return self.n > 0 or whole or self.healing is not None

    @property
    def zeros(self) -> bool:
        return any(not method.startswith(STRUCTURED) for method in self.methods)


@dataclass(frozen=True)
class Cell:
    """One number and its place in the table."""

    rival: Rival
    what: str  # "whole", "random", "nested", a method; "decode" and "zeros" are speeds
    setting: Setting | None
    ratio: str | None
    repair: str | None
    config: dict[str, Any]  # everything that the number follows from
    measure: Callable[[Note], Result]

    def __str__(self) -> str:
        parts = [self.rival.label, self.setting, self.ratio, self.what, self.repair]
        return " ".join(part for part in parts if part)

    @property
    def is_pruned(self) -> bool:
        """A row of the table, rather than a whole parent or a speed."""
        return self.what not in ("whole", "decode", "zeros")

    def find(self, points: Points) -> Result | None:
        """The result, if the cell was measured before."""
        found = points.find(self.config)
        return None if found is None else found["result"]

    def fill(self, points: Points, note: Note) -> Result:
        """The result, measured now if the cell was not measured before."""
        return points.measure(self.config, partial(self.measure, note))["result"]


class Grid:
    """All cells of what is asked; scores of blocks, which several cells share, are points too."""

    def __init__(self, rivals: list[Rival], asked: Asked, points: Points):
        self.rivals, self.asked, self.points = rivals, asked, points
        first, text = rivals[0].parent, asked.text
        device, precision = first.central.weights.device, first.cfg.train.precision
        self.stand = Stand(text, asked.choice, asked.ids, precision, device)
        self.device = device.type
        about = {"seq_len": text.seq_len, "precision": f"{precision} on {self.device}"}
        self.text = _tokens_of(text) | about
        self.choice = None if asked.choice is None else _tokens_of(asked.choice)

    def cells(self) -> list[Cell]:
        """In the order of measurement: parent, setting, ratio; speeds last."""
        found: list[Cell] = []
        for rival in self.rivals:
            found.append(self._whole(rival))
            for setting in self.asked.settings:
                for ratio in self.asked.ratios_in(setting):
                    found += self._of(rival, setting, ratio)
        return found + list(self._decodes())

    def _of(self, rival: Rival, setting: Setting, ratio: str) -> Iterator[Cell]:
        hows = (None, *self.asked.repairs)
        if self.asked.n and setting in rival.settings:
            for how in hows:
                yield self._random(rival, setting, ratio, how)
                if rival.parent.progress.order:
                    yield self._nested(rival, setting, ratio, how)
        if rival.method in self.asked.on:
            for method in self.asked.methods:
                if not method.startswith(STRUCTURED):
                    yield self._unstructured(rival, setting, ratio, method)
                else:
                    for how in hows:
                        yield self._blocks(rival, setting, ratio, method, how)
        if self.asked.healing is not None:
            has_order = bool(rival.parent.progress.order) and setting in rival.settings
            whats = (HEALED, SCRATCH) if rival.method == "dense" else (NESTED_HEALED,) * has_order
            for what in whats:
                yield self._healed(what, rival, setting, ratio, self.asked.healing)

    def _whole(self, rival: Rival) -> Cell:
        config = {"what": "whole", "weights": rival.sha256, "text": self.text}
        return Cell(rival, "whole", None, None, None, config, lambda _: self.stand.whole(rival))

    def _random(self, rival: Rival, setting: Setting, ratio: str, how: str | None) -> Cell:
        n, seed = self.asked.n, self.asked.seed
        config = self._ticket("random", rival, setting, ratio, how) | {"n": n, "seed": seed}
        measure = partial(self.stand.random, rival, setting, ratio, how, n, seed)
        return Cell(rival, "random", setting, ratio, how, config, measure)

    def _nested(self, rival: Rival, setting: Setting, ratio: str, how: str | None) -> Cell:
        config = self._ticket(NESTED, rival, setting, ratio, how)
        config["order"] = _name_of_order(rival)
        measure = partial(self.stand.nested, rival, setting, ratio, how)
        return Cell(rival, NESTED, setting, ratio, how, config, measure)

    def _blocks(
        self, rival: Rival, setting: Setting, ratio: str, method: str, how: str | None
    ) -> Cell:
        """No setting and no ratio changes the scores of blocks: they are a point of their own."""
        name = method.removeprefix(STRUCTURED)
        needs = name in importance.NEEDS_TEXT
        text = self._calibration() if needs else None

        def measure(note: Note) -> Result:
            scored = self._scores(rival, name, note)
            return self.stand.blocks(rival, setting, ratio, how, scored, needs)

        config = self._ticket(method, rival, setting, ratio, how) | {"calibration": text}
        return Cell(rival, method, setting, ratio, how, config, measure)

    def _scores(self, rival: Rival, name: str, note: Note) -> Result:
        """Scores of all blocks, measured once."""
        scores = {
            "what": f"scores {name}",
            "weights": rival.sha256,
            "blocks": self._cut(rival, rival.parent.cfg.blocks.setting),
            "calibration": self._calibration() if name in importance.NEEDS_TEXT else None,
            "device": self.device,
        }
        score = partial(self.stand.scores, rival, name, self.asked.seed, note)
        return self.points.measure(scores, score)["result"]

    def _healed(self, what: str, rival: Rival, setting: Setting, ratio: str, by: Healing) -> Cell:
        """A size that is trained for itself, as the data-parallel parent was and with it as teacher."""
        n_tokens = by.tokens // len(self.asked.ratios_in(setting))
        config = self._ticket(what, rival, setting, ratio, None)
        config |= {"tokens": n_tokens, "data": by.data}
        if what == NESTED_HEALED:
            config |= {"order": _name_of_order(rival), "teacher": by.teacher.sha256}
        else:
            config["calibration"] = self._calibration()
        train = by.teacher.parent.cfg.train
        config["train"] = {key: getattr(train, key) for key in HEALS}
        config["train"]["batch"] = train.batch * train.n_workers
        mine = replace(by, tokens=n_tokens, work=by.work / name_of(config))

        def measure(note: Note) -> Result:
            scored = None if what == NESTED_HEALED else self._scores(rival, SCORED_BY, note)
            note(f"{n_tokens:,} tokens")
            cell = rival, setting, ratio
            return self.stand.healed(cell, scored, mine, what == SCRATCH, note)

        return Cell(rival, what, setting, ratio, None, config, measure)

    def _unstructured(self, rival: Rival, setting: Setting, ratio: str, method: str) -> Cell:
        needs = METHODS[method].observe is not None
        config = self._pruned(method, rival, setting, ratio)
        config["calibration"] = self._calibration() if needs else None
        measure = partial(self.stand.unstructured, rival, setting, ratio, method)
        return Cell(rival, method, setting, ratio, None, config, measure)

    def _decodes(self) -> Iterator[Cell]:
        """A ticket's speed depends on its shapes alone; zeros are tried once, where there are most."""
        asked = self.asked
        for setting in asked.settings if asked.tickets else ():
            for ratio in asked.ratios_in(setting):
                yield self._decode("decode", setting, ratio)
        if asked.zeros:
            last = asked.settings[-1]
            yield self._decode("zeros", last, min(asked.ratios_in(last), key=mean_share))

    def _decode(self, what: str, setting: Setting, ratio: str) -> Cell:
        rival = self.rivals[0]
        shapes = {
            name: list(shape) for name, shape in huggingface.shapes(rival.parent.template).items()
        }
        config = {
            "what": what,
            "model": name_of({"type": rival.parent.template.config.model_type, "shapes": shapes}),
            "blocks": self._cut(rival, setting),
            "ratio": exact(ratio),
            "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }

        def measure(note: Note) -> Result:
            return self.stand.decode(rival, setting, ratio, what == "zeros")

        return Cell(rival, what, setting, ratio, None, config, measure)

    def _pruned(self, what: str, rival: Rival, setting: Setting, ratio: str) -> dict[str, Any]:
        """What every perplexity of a pruned parent follows from."""
        return {
            "what": what,
            "weights": rival.sha256,
            "blocks": self._cut(rival, setting),
            "ratio": exact(ratio),
            "text": self.text,
        }

    def _ticket(
        self, what: str, rival: Rival, setting: Setting, ratio: str, how: str | None
    ) -> dict[str, Any]:
        """A ticket has an activation scale, chosen among some, and may be repaired."""
        scale, rho = rival.parent.scale, rival.parent.progress.rho
        return self._pruned(what, rival, setting, ratio) | {
            "scale": {scale: rho} if scale == "measured" else scale,
            "chosen_on": self.choice,
            "repair": None if how is None else {how: self._calibration(REPAIR_SEQUENCES)},
        }

    def _cut(self, rival: Rival, setting: Setting) -> dict[str, Any]:
        blocks = rival.parent.cfg.blocks
        common: dict[str, Any] = {key: c for key in COMMON if (c := list(getattr(blocks, key)))}
        if common and blocks.common_by != "index":  # the same numbers mean other blocks
            common["common_by"] = blocks.common_by
        return {"setting": setting, **{key: getattr(blocks, key) for key in BLOCKS}, **common}

    def _calibration(self, n: int | None = None) -> dict[str, Any]:
        assert self.asked.ids is not None
        ids = self.asked.ids[:n].contiguous()
        return {"sha256": hashlib.sha256(ids.numpy().data).hexdigest(), "shape": list(ids.shape)}


def _name_of_order(rival: Rival) -> str:
    """A parent's order of blocks, by its hash."""
    order = rival.parent.progress.order
    return name_of({group: list(blocks) for group, blocks in order.items()})


def _tokens_of(text: Text) -> dict[str, Any]:
    """The tokens that a perplexity follows from."""
    first = text.first * text.seq_len
    used = text.file.tokens[first : first + text.n_sequences * text.seq_len]
    sha256 = hashlib.sha256(np.ascontiguousarray(used).data).hexdigest()
    return {"sha256": sha256, "n_tokens": len(used)}
