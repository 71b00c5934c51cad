"""The lab: parents and points of one scale in one folder, and the time that is left.

FOLDER/
  parents/SLUG-HASH/     run folders, named by what they follow from, trained in pieces
  points.jsonl           a line for each finished point; none is measured twice
  points.metrics.jsonl   a line for each trained parent: its config and its metrics
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from twistlm import config
from twistlm.config import Config, Setting
from twistlm.data.builtin import NAME, place, resolve
from twistlm.data.stream import Batches
from twistlm.data.token_file import open_tokens
from twistlm.lab.points import Points, keep_training, name_of, place_of, read_training
from twistlm.model.masks import Order
from twistlm.system.files import InUse, file_sha256
from twistlm.system.terminal import console
from twistlm.tickets import parent, score
from twistlm.tickets.parent import Parent
from twistlm.tickets.ticket_scale import TicketScales, choice_text
from twistlm.training import checkpoint, rounds

from .scales import Recipe, Scale

WAIT = 1.0  # seconds between two looks at a parent that another process trains
START = "start."  # before an override that is for the dense start alone
WEIGHTS = "model.weights="  # an override that takes the place of the dense start
Built = TypeVar("Built")


class TimeIsUp(Exception):
    """Nothing is lost: what was done is on disk, and the next call goes on from there."""


@dataclass(frozen=True)
class Point:
    """One measurement: what it follows from, and how it is made."""

    config: dict[str, Any]
    measure: Callable[[], dict[str, Any]]


class Lab:
    """Opens parents, trains those that are missing, and keeps the last one at hand."""

    def __init__(
        self,
        out: Path,
        name: str,
        scale: Scale,
        overrides: Sequence[str] = (),
        *,
        seconds: float = math.inf,
        quiet: bool = False,
    ):
        if any(o.startswith(WEIGHTS) for o in overrides):
            scale = replace(scale, start=None)
        self.place = place_of(out)
        self.points = Points(self.place, self._texts)
        self.folder, self.name, self.scale, self.quiet = self.place.folder, name, scale, quiet
        self.start_overrides = [o.removeprefix(START) for o in overrides if o.startswith(START)]
        self.overrides = [o for o in overrides if not o.startswith(START)]
        if scale.start is None and self.start_overrides:
            raise ValueError(
                f"{START}{self.start_overrides[0]}: scale {name} starts from weights that are given"
            )
        self.deadline = time.monotonic() + seconds
        self._open: tuple[Recipe | None, Parent] | None = None
        self._built: dict[Hashable, Any] = {}  # of the open parent
        self._hashes: dict[Recipe | None, str] = {}
        # teacher -> trainers of runs that leave no checkpoint
        self.kept: dict[str, dict[tuple, Any]] = {}
        self.order: Order | None = None  # of the start's blocks, scored once
        self._sha256: dict[str, str] = {}  # of the texts
        base = config.load(scale.preset, [*scale.changes, *self.overrides])
        self.base = base if scale.start is not None else checkpoint.resolved(base)

    def _texts(self) -> dict[str, Any]:
        """Which text a point is of, by hash: the same path may hold another one tomorrow."""
        data = self.base.data
        for part, stem in (("train", data.train), ("valid", data.valid)):
            if part not in self._sha256:
                # latency needs no text, and the built-in one is made on first use
                with suppress(ValueError):
                    found = str(place(part)) if stem == NAME else stem
                    self._sha256[part] = open_tokens(found).sha256
        return {"text": dict(self._sha256)}

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
        cfg, usual = config.override(self.base, mine), self.base.train
        if recipe is None or cfg.train.interval == usual.interval:
            return cfg
        n_rounds = usual.rounds * usual.interval // cfg.train.interval  # as many tokens
        return config.override(cfg, [f"train.rounds={n_rounds}"])

    def hash_of(self, recipe: Recipe | None) -> str:
        """Names all that a parent follows from: its config and, by hash, its start."""
        if recipe not in self._hashes:  # every point asks
            self._hashes[recipe] = self._hash_of(recipe)
        return self._hashes[recipe]

    def _hash_of(self, recipe: Recipe | None) -> str:
        if recipe is None and self.scale.start is None:
            given = self.base.model.weights
            file = Path(given) / "model.safetensors"
            return name_of({"weights": file_sha256(file) if file.is_file() else given})
        table = config.to_dict(self.config(recipe))
        table["run"] = {"seed": table["run"]["seed"]}
        if recipe is not None and (
            self.scale.start is not None or Path(table["model"]["weights"]).is_dir()
        ):
            table["model"]["weights"] = f"start {self.hash_of(None)}"
        return name_of(table)

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
        while not (last / checkpoint.MANIFEST).is_file():
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
            self.points.measure(self.about_training(recipe), lambda: summary(out))
        keep_training(self.place.trainings, read_training(out))
        return str(last)

    def n_rounds(self, cfg: Config) -> int:
        t = cfg.train
        if t.rounds:
            return t.rounds
        data = open_tokens(resolve(cfg.data.train, "train"))
        batches = Batches(data, cfg.data.seq_len, t.n_workers, t.batch, cfg.run.seed)
        return batches.n_rounds(t.epochs, t.interval)

    def scales(
        self, recipe: Recipe | None, setting: Setting, tokens: int | None = None
    ) -> TicketScales:
        """Evaluates a trained parent and its tickets, cut as `setting` says, on `tokens` tokens.

        None: the scale's number of them. Activation scales are tried on the text behind these.
        """
        tokens = self.scale.tokens if tokens is None else tokens

        def build() -> TicketScales:
            mine = parent.recut(self._opened(recipe), setting)
            text = score.text_of(mine, None, tokens)
            return TicketScales(mine, text, choice_text(text, mine.cfg.data))

        return self.once(recipe, (setting, tokens), build)

    def once(self, recipe: Recipe | None, key: Hashable, build: Callable[[], Built]) -> Built:
        """What `build` makes of a trained parent, kept by its key as long as the parent is open."""
        self._opened(recipe)
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]

    def _opened(self, recipe: Recipe | None) -> Parent:
        """The parent that was asked for last stays open; another one takes its place."""
        if self._open is None or self._open[0] != recipe:
            source = self.trained(recipe)
            self.close()
            cuts = self._cuts(recipe)
            self._open = recipe, parent.open_parent(source, self.base.run.device, cuts)
        return self._open[1]

    def _cuts(self, recipe: Recipe | None) -> list[str]:
        """How a parent is opened: a pretrained model has no config of ours and gets this lab's."""
        if recipe is not None or self.scale.start is not None:
            return ["blocks.setting=both"]
        data, blocks = self.base.data, self.base.blocks
        return [
            "blocks.setting=both",
            *(f"data.{key}={getattr(data, key)}" for key in ("valid", "train", "seq_len")),
            *(
                f"blocks.{key}={getattr(blocks, key)}"
                for key in ("n_ffn", "attn_by", "shared_first", "shared_last")
            ),
        ]

    def close(self) -> None:
        """Let go of the parent at hand: training needs the memory."""
        if self._open is not None:
            self._open = None
            self._built.clear()
            _forget()

    def about(self, experiment: str, recipe: Recipe | None = None, **more: Any) -> dict[str, Any]:
        """A point's config: the experiment, the scale, the parent and what is asked of it."""
        label = recipe.label if recipe else "start"
        slug = recipe.slug if recipe else "start"
        blocks = self.base.blocks
        if blocks.common_attn or blocks.common_ffn:  # subnets keep them: older points did not
            more |= {"common": [list(blocks.common_attn), list(blocks.common_ffn)]}
        return {
            "experiment": experiment,
            "scale": self.name,
            "parent": label,
            "slug": slug,
            "parent_hash": self.hash_of(recipe),
            **more,
        }

    def about_training(self, recipe: Recipe | None) -> dict[str, Any]:
        """The config of a parent's own point, which is written as soon as it is trained."""
        cfg = self.config(recipe)
        return self.about(
            "parents",
            recipe,
            setting=cfg.blocks.setting,
            method=cfg.train.method,
            outer=cfg.train.outer,
            rounds=cfg.train.rounds,
            seed=cfg.run.seed,
        )

    def is_done(self, point: Point) -> bool:
        return self.points.find(point.config) is not None

    def measure(self, point: Point) -> dict[str, Any]:
        """The finished point, from disk or measured now."""
        if not self.is_done(point) and self.is_late():
            raise TimeIsUp
        return self.points.measure(point.config, point.measure)


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
    gc.collect()  # trainers and their recorded graphs hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
