"""The lab: parents and points of one scale in one folder, and the time that is left.

FOLDER/
  parents/SLUG-HASH/   run folders, named by what they follow from; trained in as many pieces as needed
  points/HASH.json     finished points; none is measured twice
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ... import config
from ...compute.perplexity import Evaluator, Text
from ...config import Config, Setting
from ...data.builtin import resolve
from ...data.stream import Batches
from ...data.token_file import open_tokens
from ...system.lock import InUse
from ...system.terminal import console
from ...tickets import parent, score
from ...tickets.parent import Parent
from ...training import rounds
from ...training.checkpoint import MANIFEST
from .. import points
from .scales import Recipe, Scale

WAIT = 1.0  # seconds between two looks at a parent that another process trains
START = "start."  # before an override that is for the dense start alone


class TimeIsUp(Exception):
    """Nothing is lost: what was done is on disk, and the next call goes on from there."""


@dataclass(frozen=True)
class Point:
    """One measurement: what it follows from, and how it is made."""

    config: dict[str, Any]
    measure: Callable[[], dict[str, Any]]


class Opened:
    """A parent at hand: read from disk once, cut in memory."""

    def __init__(self, recipe: Recipe | None, parent: Parent):
        self.recipe, self.parent = recipe, parent
        self.beside: Any = None
        self._cut: dict[Setting, tuple[Parent, Evaluator]] = {}

    def cut(self, setting: Setting, tokens: int) -> tuple[Parent, Evaluator]:
        if setting not in self._cut:
            mine = parent.recut(self.parent, setting)
            self._cut[setting] = mine, score.evaluator(mine, tokens=tokens)
        return self._cut[setting]


class Lab:
    """Opens parents, trains those that are missing, and keeps the last one at hand."""

    def __init__(
        self,
        folder: Path,
        name: str,
        scale: Scale,
        overrides: Sequence[str] = (),
        *,
        seconds: float = math.inf,
        quiet: bool = False,
    ):
        self.folder, self.name, self.scale, self.quiet = folder, name, scale, quiet
        self.start_overrides = [o.removeprefix(START) for o in overrides if o.startswith(START)]
        self.overrides = [o for o in overrides if not o.startswith(START)]
        if scale.start is None and self.start_overrides:
            raise ValueError(
                f"{START}{self.start_overrides[0]}: scale {name} starts from pretrained weights"
            )
        self.deadline = time.monotonic() + seconds
        self._open: Opened | None = None
        self.base = config.load(scale.preset, [*scale.changes, *self.overrides])

    @property
    def points_folder(self) -> Path:
        return self.folder / "points"

    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def config(self, recipe: Recipe | None) -> Config:
        """The training config of a recipe, or (None) of the dense start."""
        if recipe is None:
            assert self.scale.start is not None, "pretrained weights are not trained"
            mine = ["train.method=dense", *self.scale.start, *self.start_overrides]
        else:  # another seed: not the start's batches in the same order once more
            mine = [*self.scale.changes_of(recipe), f"run.seed={self.base.run.seed + 1}"]
            if self.scale.start is not None:
                mine.append(f"model.weights={self.out(None)}")
        return config.override(self.base, mine)

    def hash_of(self, recipe: Recipe | None) -> str:
        """Names all that a parent follows from: its config and, by hash, its start."""
        if recipe is None and self.scale.start is None:
            return points.name_of({"weights": self.base.model.weights})
        table = config.to_dict(self.config(recipe))
        table["run"] = {"seed": table["run"]["seed"]}
        if recipe is not None and self.scale.start is not None:
            table["model"]["weights"] = f"start {self.hash_of(None)}"
        return points.name_of(table)

    def out(self, recipe: Recipe | None) -> Path:
        slug = "start" if recipe is None else recipe.slug
        return self.folder / "parents" / f"{slug}-{self.hash_of(recipe)}"

    def trained(self, recipe: Recipe | None) -> str:
        """Where a parent lies, trained now as far as it is not and as time allows."""
        if recipe is None and self.scale.start is None:
            return self.base.model.weights
        cfg, out = self.config(recipe), self.out(recipe)
        last = out / "checkpoints" / f"round-{self.n_rounds(cfg):06d}"
        waits = False
        while not (last / MANIFEST).is_file():
            if recipe is not None and self.scale.start is not None:
                start = self.trained(None)
                cfg = config.override(cfg, [f"model.weights={start}"])
            if self.is_late():
                raise TimeIsUp
            self.close()
            if not self.quiet and not waits:
                console.print(f"train {out.name}")
            cfg = config.override(cfg, [f"run.out={out}"])
            try:
                if rounds.train(cfg, resume=True, quiet=self.quiet, is_late=self.is_late) != last:
                    raise TimeIsUp
            except InUse:  # experiments side by side share their parents
                if not self.quiet and not waits:
                    console.print(f"another process trains {out.name}: waiting for it")
                waits = True
                time.sleep(WAIT)
                continue
            _forget()
            points.point(self.points_folder, self.about_training(recipe), lambda: summary(out))
        return str(last)

    def n_rounds(self, cfg: Config) -> int:
        t = cfg.train
        if t.rounds:
            return t.rounds
        data = open_tokens(resolve(cfg.data.train, "train"))
        batches = Batches(data, cfg.data.seq_len, t.n_workers, t.batch, cfg.run.seed)
        return batches.n_rounds(t.epochs, t.interval)

    def open(self, recipe: Recipe | None, setting: Setting) -> tuple[Parent, Evaluator]:
        """A trained parent, cut as `setting` says, with the evaluator of this scale's tokens."""
        if self._open is None or self._open.recipe != recipe:
            source = self.trained(recipe)
            self.close()
            d, b = self.base.data, self.base.blocks
            cut = ["blocks.setting=both"]
            if recipe is None and self.scale.start is None:  # a model brings no config of ours
                cut += [
                    f"data.valid={d.valid}", f"data.train={d.train}", f"data.seq_len={d.seq_len}",
                    f"blocks.n_ffn={b.n_ffn}", f"blocks.attn_by={b.attn_by}",
                    f"blocks.shared_first={b.shared_first}", f"blocks.shared_last={b.shared_last}",
                ]  # fmt: skip
            self._open = Opened(recipe, parent.open_(source, self.base.run.device, cut))
        return self._open.cut(setting, self.scale.tokens)

    def beside(self, recipe: Recipe | None, make: Callable[[Parent, Evaluator], Any]) -> Any:
        """What `make` builds of a parent, whole: kept as long as the parent is at hand."""
        opened = self.open(recipe, "both")
        assert self._open is not None
        if self._open.beside is None:
            self._open.beside = make(*opened)
        return self._open.beside

    def text(self, ready: Evaluator, tokens: int | None = None) -> Text:
        """What this scale's perplexities are measured on, or the first `tokens` of it."""
        return replace(ready.text, max_tokens=self.scale.tokens if tokens is None else tokens)

    def close(self) -> None:
        """Let go of the parent at hand: training needs the memory."""
        self._open = None
        _forget()

    def about(self, experiment: str, recipe: Recipe | None = None, **more: Any) -> dict[str, Any]:
        """A point's config: the experiment, the scale, the parent and what is asked of it."""
        label = recipe.label if recipe else "start"
        slug = recipe.slug if recipe else "start"
        return {
            "experiment": experiment, "scale": self.name, "parent": label, "slug": slug,
            "parent_hash": self.hash_of(recipe), **more,
        }  # fmt: skip

    def about_training(self, recipe: Recipe | None) -> dict[str, Any]:
        """The config of a parent's own point, which is written as soon as it is trained."""
        cfg = self.config(recipe)
        return self.about(
            "parents", recipe, setting=cfg.blocks.setting, method=cfg.train.method, outer=cfg.train.outer,
            rounds=cfg.train.rounds, seed=cfg.run.seed,
        )  # fmt: skip

    def is_done(self, point: Point) -> bool:
        return points.path_of(self.points_folder, point.config).is_file()

    def measure(self, point: Point) -> dict[str, Any]:
        """The finished point, from disk or measured now."""
        if not self.is_done(point) and self.is_late():
            raise TimeIsUp
        return points.point(self.points_folder, point.config, point.measure)


def summary(out: Path) -> dict[str, Any]:
    """What a training cost, out of its metrics."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tail = rows[-max(1, len(rows) // 10) :]
    return {
        "rounds": rows[-1]["round"],
        "tokens": sum(row["n_tokens"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "tokens_per_s": statistics.median(row["n_tokens"] / row["seconds"] for row in rows),
        "loss": statistics.fmean(row["loss"] for row in tail),  # of the last tenth
        "bytes": sum(row["bytes_down"] + row["bytes_up"] for row in rows),
    }


def _forget() -> None:
    gc.collect()  # seats and their recorded graphs hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
