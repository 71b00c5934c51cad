"""The cells of a comparison and how each is measured: in memory, once, kept as a point on disk."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import budget, deploy, generator, models, speed
from .. import parent as parents
from ..attention import causal_
from ..blocks import Blueprint, Widths, widths_of_ratio
from ..config import Setting
from ..evaluate import Evaluator, Spread, Text, perplexity
from ..parent import Parent
from ..points import name_of, path_of, point, read
from ..prune import calibrate, importance
from ..prune import repair as repairs
from ..prune.methods import METHODS, prune_
from ..prune.pattern import Pattern
from ..prune.write import STRUCTURED
from ..subnet import build
from .rivals import Rival

REPAIR_SEQUENCES = 16  # of the calibration: a repair is measured for every random ticket
Note = Callable[[str], None]  # says where a long measurement stands


@dataclass(frozen=True)
class Asked:
    """What is compared; calibration `ids` [n, seq_len] are None where nothing needs them."""

    settings: tuple[Setting, ...]
    ratios: tuple[str, ...]
    methods: tuple[str, ...]  # of prune/, on the parents `on`
    on: tuple[str, ...]
    repairs: tuple[str, ...]
    n: int  # random tickets of each parent and size; 0: none
    seed: int
    text: Text
    ids: Tensor | None


@dataclass(frozen=True)
class Cell:
    """One number and its place in the table."""

    rival: Rival
    what: str  # "whole", "random", a method, or "decode"
    setting: Setting | None
    ratio: str | None
    repair: str | None
    config: dict[str, Any]  # everything that the number follows from
    measure: Callable[[Note], dict[str, Any]]

    def __str__(self) -> str:
        parts = [self.rival.label, self.setting, self.ratio, self.what, self.repair]
        return " ".join(part for part in parts if part)

    def find(self, folder: Path) -> dict[str, Any] | None:
        """The result, if the cell was measured before."""
        path = path_of(folder, self.config)
        return read(path)["result"] if path.is_file() else None

    def fill(self, folder: Path, note: Note) -> dict[str, Any]:
        return point(folder, self.config, partial(self.measure, note))["result"]


@dataclass
class Cut:
    """A parent in one setting, ready to be evaluated; lives while its cells are measured."""

    parent: Parent
    ready: Evaluator
    scratch: tuple[Tensor, PreTrainedModel] | None = None

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


class Grid:
    """All cells; parents are cut and evaluators built when a cell first needs them."""

    def __init__(self, rivals: list[Rival], asked: Asked, folder: Path):
        self.rivals, self.asked, self.folder = rivals, asked, folder
        self.precision = rivals[0].parent.cfg.train.precision
        self._cut: tuple[tuple[str, Setting], Cut] | None = None
        used = asked.text.file.tokens[: asked.text.n_sequences * asked.text.seq_len]
        self._text = {
            "sha256": hashlib.sha256(np.ascontiguousarray(used).data).hexdigest(),
            "n_tokens": len(used),
            "seq_len": asked.text.seq_len,
            "precision": f"{self.precision} on {self.device.type}",
        }

    @property
    def device(self) -> torch.device:
        return self.rivals[0].parent.central.weights.device

    def cells(self) -> list[Cell]:
        """In the order of measurement: parent, setting, ratio; what is fast comes first."""
        found: list[Cell] = []
        for rival in self.rivals:
            found.append(self._whole(rival))
            for setting in self.asked.settings:
                for ratio in self.asked.ratios:
                    found += self._of(rival, setting, ratio)
        return found + list(self._decodes())

    def _of(self, rival: Rival, setting: Setting, ratio: str) -> Iterator[Cell]:
        hows = (None, *self.asked.repairs)
        if self.asked.n and setting in rival.settings:
            for how in hows:
                yield self._random(rival, setting, ratio, how)
        if rival.method in self.asked.on:
            for method in self.asked.methods:
                if not method.startswith(STRUCTURED):
                    yield self._unstructured(rival, setting, ratio, method)
                else:
                    for how in hows:
                        yield self._blocks(rival, setting, ratio, method, how)

    # ------------------------------------------------------------ one kind of cell each

    def _whole(self, rival: Rival) -> Cell:
        def measure(note: Note) -> dict[str, Any]:
            cut = self.cut(rival, rival.parent.cfg.blocks.setting)
            shapes = cut.parent.central.layout.shapes
            return self._result(rival, [cut.ready.full_perplexity()], 0.0, 0, shapes)

        config = {"what": "whole", "weights": rival.sha256, "text": self._text}
        return Cell(rival, "whole", None, None, None, config, measure)

    def _random(self, rival: Rival, setting: Setting, ratio: str, how: str | None) -> Cell:
        asked = self.asked

        def measure(note: Note) -> dict[str, Any]:
            cut = self.cut(rival, setting)
            widths = widths_of_ratio(cut.parent.block_map, ratio)
            values, seconds = [], 0.0
            for draw in range(asked.n):
                note(f"{draw}/{asked.n}")
                began = time.perf_counter()
                blueprint = generator.for_deployment(
                    cut.parent.block_map, widths, seed=asked.seed, draw=draw
                )
                value, took = self._ticket(cut, blueprint, how, began)
                values.append(value)
                seconds += took / asked.n
            shapes = _narrow(cut.parent, widths)
            return self._result(rival, values, seconds, self._n_repair(how), shapes)

        config = self._config("random", rival, setting, ratio, how) | {
            "n": asked.n,
            "seed": asked.seed,
        }
        return Cell(rival, "random", setting, ratio, how, config, measure)

    def _blocks(
        self, rival: Rival, setting: Setting, ratio: str, method: str, how: str | None
    ) -> Cell:
        name = method.removeprefix(STRUCTURED)
        needs = name in importance.NEEDS_TEXT

        def measure(note: Note) -> dict[str, Any]:
            scored = self.scores(rival, name, note)
            cut = self.cut(rival, setting)
            widths = widths_of_ratio(cut.parent.block_map, ratio)
            began = time.perf_counter()
            scores = {g: torch.tensor(v, dtype=torch.float64) for g, v in scored["scores"].items()}
            blueprint = importance.keep_best(cut.parent.block_map, scores, widths)
            value, took = self._ticket(cut, blueprint, how, began)
            n_tokens = max(self._n_calibration() if needs else 0, self._n_repair(how))
            seconds = scored["seconds"] + took
            return self._result(rival, [value], seconds, n_tokens, _narrow(cut.parent, widths))

        config = self._config(method, rival, setting, ratio, how)
        if needs:
            config["calibration"] = self._calibration(None)
        return Cell(rival, method, setting, ratio, how, config, measure)

    def _unstructured(self, rival: Rival, setting: Setting, ratio: str, method: str) -> Cell:
        needs = METHODS[method].observe is not None

        def measure(note: Note) -> dict[str, Any]:
            cut = self.cut(rival, setting)
            model, block_map = cut.fresh(), cut.parent.block_map
            ids = self.asked.ids if needs else None
            wanted = {g.name: Pattern(1 - Fraction(ratio)) for g in block_map.groups}
            n_all = 0 if ids is None else len(ids) * len({g.layer for g in block_map.groups})
            began = time.perf_counter()
            prune_(model, block_map, METHODS[method], wanted, ids, _counter(note, n_all))
            seconds = self._now() - began
            value = perplexity(model, self.asked.text, self.precision, cut.ready.loss)
            n_tokens = self._n_calibration() if needs else 0
            return self._result(rival, [value], seconds, n_tokens, cut.parent.central.layout.shapes)

        config = self._config(method, rival, setting, ratio, None)
        del config["scale"]  # all blocks stay
        if needs:
            config["calibration"] = self._calibration(None)
        return Cell(rival, method, setting, ratio, None, config, measure)

    def _decodes(self) -> Iterator[Cell]:
        """A ticket's speed depends on its shapes alone; zeros are tried once, where there are most."""
        asked, rival = self.asked, self.rivals[0]
        tickets = asked.n > 0 or any(m.startswith(STRUCTURED) for m in asked.methods)
        for setting in asked.settings if tickets else ():
            for ratio in asked.ratios:
                yield self._decode(rival, setting, ratio, zeros=False)
        if any(not m.startswith(STRUCTURED) for m in asked.methods):
            yield self._decode(
                rival, asked.settings[-1], min(asked.ratios, key=Fraction), zeros=True
            )

    def _decode(self, rival: Rival, setting: Setting, ratio: str, zeros: bool) -> Cell:
        def measure(note: Note) -> dict[str, Any]:
            cut = parents.recut(rival.parent, setting)
            whole = cut.block_map.full()
            kept = whole
            if not zeros:
                widths = widths_of_ratio(cut.block_map, ratio)
                kept = {name: tuple(range(k)) for name, k in widths.items()}  # any: equal shapes
            full, other = (deploy.extract(cut, b).to("cpu") for b in (whole, kept))  # type: ignore[arg-type]
            if zeros:
                _drop_(other, cut, 1 - Fraction(ratio))
            took = speed.measure_all([full, other])
            return {
                "speedup": took[0].decode_ms / took[1].decode_ms,
                "parent": asdict(took[0]),
                "pruned": asdict(took[1]),
            }

        shapes = {name: list(shape) for name, shape in models.shapes(rival.parent.template).items()}
        config = {
            "what": "decode of zeros" if zeros else "decode of a ticket",
            "model": name_of({"type": rival.parent.template.config.model_type, "shapes": shapes}),
            "blocks": self._blocks_of(rival, setting),
            "ratio": str(Fraction(ratio)),
            "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }
        what = "zeros" if zeros else "decode"
        return Cell(rival, what, setting, ratio, None, config, measure)

    # ------------------------------------------------------------ what cells share

    def cut(self, rival: Rival, setting: Setting) -> Cut:
        """The parent in one setting; the one before makes room."""
        key = rival.sha256, setting
        if self._cut is None or self._cut[0] != key:
            self._cut = None
            cut = parents.recut(rival.parent, setting)
            ready = Evaluator(
                cut.template, cut.block_map, cut.central, self.asked.text,
                scale=cut.scale, precision=self.precision,
            )  # fmt: skip
            self._cut = key, Cut(cut, ready)
        return self._cut[1]

    def scores(self, rival: Rival, name: str, note: Note) -> dict[str, Any]:
        """Scores of all blocks: no ratio and no setting changes them, so they are a point of their own."""
        needs = name in importance.NEEDS_TEXT
        blocks = rival.parent.cfg.blocks
        config = {
            "what": f"scores {name}",
            "weights": rival.sha256,
            "blocks": self._blocks_of(rival, blocks.setting),
            "calibration": self._calibration(None) if needs else None,
            "device": self.device.type,
        }

        def measure() -> dict[str, Any]:
            ids = self.asked.ids if needs else None
            began = time.perf_counter()
            tick = _counter(note, 0 if ids is None else len(ids))
            found = importance.score(rival.parent, name, ids, self.asked.seed, tick)
            return {
                "scores": {g: v.tolist() for g, v in found.items()},
                "seconds": self._now() - began,
            }

        return point(self.folder, config, measure)["result"]

    def _ticket(
        self, cut: Cut, blueprint: Blueprint, how: str | None, began: float
    ) -> tuple[float, float]:
        """Perplexity of a ticket, and the seconds from `began` until it was there."""
        text, loss = self.asked.text, cut.ready.loss
        if how is None:
            model = cut.ready.subnet(blueprint).model
        else:
            assert self.asked.ids is not None
            ids = self.asked.ids[:REPAIR_SEQUENCES]
            model = deploy.extract(repairs.repair(cut.parent, blueprint, how, ids), blueprint)
            causal_(model)
        seconds = self._now() - began
        return perplexity(model, text, self.precision, loss), seconds

    def _result(
        self, rival: Rival, values: list[float], seconds: float, n_tokens: int, shapes: Any
    ) -> dict[str, Any]:
        if not all(np.isfinite(values)):
            raise ValueError(f"{rival.parent.source} has no perplexity: its logits are not finite")
        return {
            **Spread("", 0, tuple(values)).summary(),
            "values": values,
            "seconds": seconds,
            "calibration_tokens": n_tokens,
            "bytes": budget.weights_bytes(shapes),
        }

    def _config(
        self, what: str, rival: Rival, setting: Setting, ratio: str, how: str | None
    ) -> dict[str, Any]:
        scale, rho = rival.parent.scale, rival.parent.central.rho
        config: dict[str, Any] = {
            "what": what,
            "weights": rival.sha256,
            "blocks": self._blocks_of(rival, setting),
            "ratio": str(Fraction(ratio)),
            "scale": {scale: rho} if scale == "measured" else scale,
            "text": self._text,
        }
        if how is not None:
            config["repair"] = {how: self._calibration(REPAIR_SEQUENCES)}
        return config

    def _blocks_of(self, rival: Rival, setting: Setting) -> dict[str, Any]:
        blocks = rival.parent.cfg.blocks
        keys = ("attn_by", "n_ffn", "shared_first", "shared_last")
        return {"setting": setting, **{key: getattr(blocks, key) for key in keys}}

    def _calibration(self, n: int | None) -> dict[str, Any]:
        assert self.asked.ids is not None
        ids = self.asked.ids[:n].contiguous()
        return {"sha256": hashlib.sha256(ids.numpy().data).hexdigest(), "shape": list(ids.shape)}

    def _n_calibration(self) -> int:
        return 0 if self.asked.ids is None else self.asked.ids.numel()

    def _n_repair(self, how: str | None) -> int:
        ids = self.asked.ids
        return 0 if how is None or ids is None else ids[:REPAIR_SEQUENCES].numel()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _narrow(parent: Parent, widths: Widths) -> Any:
    return parent.block_map.narrowed(parent.central.layout.shapes, widths)


def _counter(note: Note, n_all: int) -> Callable[[], None]:
    n = 0

    def tick() -> None:
        nonlocal n
        n += 1
        note(f"{n}/{n_all}")

    return tick


@torch.no_grad()
def _drop_(model: PreTrainedModel, parent: Parent, share: Fraction) -> None:
    """Zeros in random places: how many there are could matter to speed, not where."""
    draw = torch.Generator().manual_seed(0)
    for linear in calibrate.linears(model, parent.block_map):
        weight = linear.weight(model)
        weight.masked_fill_(torch.rand(weight.shape, generator=draw) < float(share), 0)
