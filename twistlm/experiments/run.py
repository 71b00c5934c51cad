"""Run experiments point by point, in one process, until they are done or the time is up."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .. import points
from ..experiments import NAMES
from ..terminal import console
from .lab import Lab, TimeIsUp
from .scales import SCALES


def module(name: str) -> ModuleType:
    """The file of an experiment."""
    if name not in NAMES:
        raise ValueError(f"experiment {name!r}: use {', '.join(NAMES)}, or all")
    return importlib.import_module(f"{__package__}.{name}")


def run(
    names: Sequence[str],
    scale: str,
    folder: Path,
    overrides: Sequence[str] = (),
    minutes: float = 0,
) -> bool:
    """Measure every point that is not on disk; False when the time was up before the last."""
    if scale not in SCALES:
        raise ValueError(f"--scale {scale!r}: use {', '.join(SCALES)}")
    chosen = list(NAMES) if "all" in names else list(dict.fromkeys(names))
    modules = [module(name) for name in chosen]
    lab = Lab(folder, scale, SCALES[scale], overrides, seconds=60 * minutes or math.inf)
    every = [point for each in modules for point in each.points(lab)]
    todo = list(
        {points.name_of(point.config): point for point in every}.values()
    )  # some share them
    n_done = sum(lab.is_done(point) for point in todo)
    console.print(f"{len(todo)} points in {lab.points_folder}, {n_done} of them finished")
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


def line(made: dict) -> str:
    """A finished point in one line."""
    hidden = {"experiment", "scale", "slug", "parent_hash", "seed"}
    told = {k: v for k, v in made["config"].items() if k not in hidden and not isinstance(v, dict)}
    said = " ".join(str(value) for value in told.values())
    result = made["result"]
    shown = {
        key: f"{value:.4g}"
        for key, value in result.items()
        if isinstance(value, float) and not isinstance(value, bool)
    }
    numbers = " ".join(f"{key} {value}" for key, value in list(shown.items())[:4])
    return f"{made['config']['experiment']}: {said}: {numbers} ({made['seconds']:.1f} s)"
