"""Run experiments point by point, in one process, until they are done or the time is up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twistlm.lab.points import name_of
from twistlm.system.terminal import console

from . import NAMES
from .experiments import points
from .lab import Lab, Point, TimeIsUp
from .scales import SCALES, Scale
from .ways import WAYS

# of a point's config, in the line that says it is finished
HIDDEN = {"before", "experiment", "scale", "slug", "parent_hash", "changes", "start"}


def run(
    names: Sequence[str],
    scale: str,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    minutes: float = 0,
    only: Sequence[str] = (),
) -> bool:
    """Measure every point that is not on disk; False when the time was up before the last."""
    for name in names:
        if name not in (*NAMES, "all"):
            raise ValueError(f"experiment {name!r}: use {', '.join(NAMES)}, or all")
    lab = Lab(out, scale, _scale(scale, only), overrides, seconds=60 * minutes or math.inf)
    wanted = NAMES if "all" in names else dict.fromkeys(names)
    every = [point for name in wanted for point in points(name, lab)]
    # some experiments share points
    todo = _by_parent(list({name_of(point.config): point for point in every}.values()))
    n_done = sum(lab.is_done(point) for point in todo)
    console.print(f"{len(todo)} points in {lab.points.file}, {n_done} of them finished")
    try:
        for point in todo:
            if not lab.is_done(point):
                made = lab.measure(point)
                n_done += 1
                console.print(f"{n_done}/{len(todo)} {line(made)}", highlight=False)
    except TimeIsUp:
        console.print(f"the time is up: {n_done} of {len(todo)} points are finished; call it again")
        return False
    finally:
        lab.close()
    return True


def _by_parent(todo: list[Point]) -> list[Point]:
    """All points of one parent in a row: to open one takes seconds."""
    parents = [point.config.get("parent_hash") for point in todo]
    return [todo[i] for i in sorted(range(len(todo)), key=lambda i: parents.index(parents[i]))]


def _scale(name: str, only: Sequence[str]) -> Scale:
    """The scale of this name, with the settings, ways, seeds and rates of `only`."""
    if name not in SCALES:
        raise ValueError(f"--scale {name!r}: use {', '.join(SCALES)}")
    scale = SCALES[name]
    ways, seeds = scale.ways or tuple(WAYS), {f"seed {seed}": seed for seed in scale.seeds}
    rates = {f"rate {i}": i for i in scale.rates}
    asked = {word: [word] if word in WAYS else word.split(",") for word in only}
    only = [part for parts in asked.values() for part in parts]
    for word, parts in asked.items():
        if not {*parts} <= {*scale.settings, *seeds, *rates, *ways}:
            words = ", ".join((*scale.settings, *seeds, *rates))
            legal = f"{words}, or ways of the recipe: {'; '.join(ways)}"
            raise ValueError(f"--only {word!r}: scale {name} has {legal}")
    settings = tuple(s for s in scale.settings if s in only) or scale.settings
    return replace(
        scale,
        settings=settings,
        ways=tuple(w for w in ways if w in only) or ways,
        seeds=tuple(seed for word, seed in seeds.items() if word in only) or scale.seeds,
        rates=tuple(i for word, i in rates.items() if word in only) or scale.rates,
    )


def line(made: dict[str, Any]) -> str:
    """A finished point in one line."""
    about = made["config"]
    said = [str(v) for k, v in about.items() if k not in HIDDEN and not isinstance(v, dict)]
    numbers = [f"{k} {v:.4g}" for k, v in made["result"].items() if isinstance(v, float)]
    what = f"{about['experiment']}: {' '.join(said)}"
    return f"{what}: {', '.join(numbers[:4])} ({made['seconds']:.1f} s)"
