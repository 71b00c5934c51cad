"""The lab: parents and points of one scale in one folder.

FOLDER/
  parents/SLUG-HASH/     run folders, named by what they follow from
  points.jsonl           a line for each finished point; none is measured twice
"""

import functools
import json
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from twistlm import config
from twistlm.config import Config
from twistlm.lab.bench.train import forget
from twistlm.lab.compare.cells import BLOCKS
from twistlm.lab.compare.sweep import Sweep
from twistlm.lab.points import Points, name_of
from twistlm.system.device import pick_device
from twistlm.system.files import file_sha256
from twistlm.tickets import parent
from twistlm.tickets.parent import Parent
from twistlm.tickets.text import calibrate, text_of
from twistlm.tickets.ticket_scale import choice_text
from twistlm.training import checkpoint, rounds

from .scales import START, Recipe, Scale

Result = dict[str, Any]


class Point(NamedTuple):
    """One measurement: what it follows from, and how it is made."""

    config: dict[str, Any]
    measure: Callable[[], Result]


class Lab:
    """Opens parents, trains those that are missing, and keeps the last one at hand."""

    def __init__(self, out: Path, name: str, scale: Scale, overrides: Sequence[str] = ()):
        if any(o.startswith("model.weights=") for o in overrides):  # instead of the dense start
            scale = replace(scale, start=None)
        self.points = Points(out)
        self.folder, self.name, self.scale = self.points.folder, name, scale
        self.overrides = overrides
        self._built: dict[Hashable, Any] = {}  # of the parent that is open
        self.hash_of = functools.cache(self._hash_of)  # every point asks
        base = config.load(scale.preset, [*scale.changes, *self.overrides])
        self.base = base if scale.start is not None else checkpoint.resolved(base)

    def config(self, recipe: Recipe) -> Config:
        if recipe == START:
            return config.override(self.base, ["train.method=dense", *self.scale.start])
        # another seed: not the start's batches in the same order once more
        mine = [*self.scale.changes_of(recipe), f"run.seed={self.base.run.seed + 1}"]
        if self.scale.start is not None:
            mine.append(f"model.weights={self.out(START)}")
        cfg, usual = config.override(self.base, mine), self.base.train
        n_rounds = usual.rounds * usual.interval // cfg.train.interval  # as many tokens
        return config.override(cfg, [f"train.rounds={n_rounds}"])

    def _hash_of(self, recipe: Recipe) -> str:
        """Names all that a parent follows from: its config and, by hash, its start."""
        if recipe == START and self.scale.start is None:
            given = self.base.model.weights
            file = Path(given) / "model.safetensors"
            return name_of({"weights": file_sha256(file) if file.is_file() else given})
        table = config.to_dict(self.config(recipe))
        table["run"] = {"seed": table["run"]["seed"]}
        has_start = self.scale.start is not None or Path(table["model"]["weights"]).is_dir()
        if recipe != START and has_start:
            table["model"]["weights"] = f"start {self.hash_of(START)}"
        return name_of(table)

    def out(self, recipe: Recipe) -> Path:
        return self.folder / "parents" / f"{recipe.slug}-{self.hash_of(recipe)}"

    def trained(self, recipe: Recipe) -> str:
        """Where a parent lies, trained now as far as it is not."""
        if recipe == START and self.scale.start is None:
            return self.base.model.weights
        out, about = self.out(recipe), self.about_training(recipe)
        if made := self.points.find(about):
            last = out / "checkpoints" / checkpoint.folder_name(made["result"]["rounds"])
            if (last / checkpoint.MANIFEST).is_file():
                return str(last)
        cfg = config.override(self.config(recipe), [f"run.out={out}"])
        if recipe != START and self.scale.start is not None:
            cfg = config.override(cfg, [f"model.weights={self.trained(START)}"])
        last = self.train(cfg)
        self.points.measure(about, lambda: summary(out))
        return last

    def train(self, cfg: Config, first: int = 0) -> str:
        """Train from sequence `first` on, as far as it is not yet: the last checkpoint."""
        self.close()
        last = rounds.train(cfg, resume=True, first=first)
        forget(pick_device(self.base.run.device))
        return str(last)

    def open(self, source: str) -> Parent:
        """A model, cut and measured as this lab's are, whatever its own config says."""
        data, blocks, cuts = self.base.data, self.base.blocks, ["blocks.setting=both"]
        cuts += [f"data.{k}={getattr(data, k)}" for k in ("valid", "train", "seq_len")]
        cuts += [f"blocks.{k}={getattr(blocks, k)}" for k in BLOCKS]
        return parent.open_parent(source, self.base.run.device, cuts)

    def once(self, recipe: Recipe, key: Hashable, build: Callable[[Parent], Any]) -> Any:
        """What `build` makes of a trained parent, kept until another one is opened."""
        source = self.trained(recipe)
        if self._built.get("source") != source:
            self.close()
            self._built = {"source": source, "parent": self.open(source)}
        if key not in self._built:
            self._built[key] = build(self._built["parent"])
        return self._built[key]

    def sweep(self, recipe: Recipe, tokens: int) -> Sweep:
        """Measures a trained parent and its tickets on so many tokens."""
        return self.once(recipe, tokens, lambda p: self.sweep_of(p, tokens, self.base.run.seed))

    def sweep_of(self, parent: Parent, tokens: int, seed: int) -> Sweep:
        """Measures any parent; `seed` draws its tickets and what it is pruned by."""
        text, n = text_of(parent, None, tokens), self.scale.n_calibration
        choice = choice_text(text, parent.cfg.data)
        return Sweep(parent, text, choice, None, lambda: calibrate(parent, None, n, seed).ids, seed)

    def close(self) -> None:
        """Let go of the parent at hand: training needs the memory."""
        if self._built:
            self._built = {}
            forget(pick_device(self.base.run.device))

    def about(self, experiment: str, recipe: Recipe, **more: Any) -> dict[str, Any]:
        """A point's config: the experiment, the scale, the parent and what is asked of it."""
        about = {"experiment": experiment, "scale": self.name, "parent": recipe.label}
        return about | {"slug": recipe.slug, "parent_hash": self.hash_of(recipe), **more}

    def about_training(self, recipe: Recipe) -> dict[str, Any]:
        """The config of a parent's own point, which is written as soon as it is trained."""
        cfg = self.config(recipe)
        t = {key: getattr(cfg.train, key) for key in ("method", "outer", "rounds")}
        return self.about("parents", recipe, setting=cfg.blocks.setting, seed=cfg.run.seed, **t)


def summary(out: Path) -> Result:
    """What a training cost, out of its metrics."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tail = rows[-max(1, len(rows) // 10) :]
    return {
        "rounds": rows[-1]["round"],
        "tokens": sum(row["n_tokens"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "loss": statistics.fmean(row["loss"] for row in tail),  # of the last tenth
        "bytes": sum(row["bytes_down"] + row["bytes_up"] for row in rows),
    }
