"""Every trained model that the other experiments share, and what it cost."""

from __future__ import annotations

from .lab import Lab, Point, summary
from .scales import Recipe, only


def recipes(lab: Lab) -> list[Recipe | None]:
    """The start (where it is trained), the five ways of `both`, and TwIST in the other settings."""
    found: list[Recipe | None] = [None] if lab.scale.start is not None else []
    for setting in lab.scale.settings:
        found += [recipe for recipe in only(setting) if recipe not in found]
    return found


def points(lab: Lab) -> list[Point]:
    return [point(lab, recipe) for recipe in recipes(lab)]


def point(lab: Lab, recipe: Recipe | None) -> Point:
    cfg = lab.config(recipe)
    t = cfg.train
    about = lab.about(
        "parents", recipe, setting=cfg.blocks.setting, method=t.method, outer=t.outer,
        rounds=t.rounds, seed=cfg.run.seed,
    )  # fmt: skip

    def measure() -> dict:
        lab.trained(recipe)
        return summary(lab.out(recipe))

    return Point(about, measure)
