"""Every trained model that the other experiments share, and what it cost."""

from __future__ import annotations

from typing import Any

from .lab import Lab, Point, summary
from .page.section import Section, Table, count, number
from .scales import Recipe, only, trained_at


def recipes(lab: Lab) -> list[Recipe | None]:
    """The start (where it is trained), the six of `both`, TwIST in the other settings and at every size of Table 1.

    The other ones of the heat-maps are trained, and recorded here, when `robustness` needs them.
    """
    found: list[Recipe | None] = [None] if lab.scale.start is not None else []
    for setting in lab.scale.settings:
        sizes = (trained_at(k, setting) for k in lab.scale.table1)
        found += [recipe for recipe in (*only(setting), *sizes) if recipe not in found]
    return list(dict.fromkeys(found))


def points(lab: Lab) -> list[Point]:
    return [parent_point(lab, recipe) for recipe in recipes(lab)]


def parent_point(lab: Lab, recipe: Recipe | None) -> Point:
    """What a parent's training cost."""

    def measure() -> dict[str, Any]:
        lab.trained(recipe)
        return summary(lab.out(recipe))

    return Point(lab.about_training(recipe), measure)


def section(points: list[dict[str, Any]]) -> Section:
    """What every parent cost."""
    rows = []
    for point in points:
        config, result, run = point["config"], point["result"], point["run"]
        rows.append(
            (
                config["parent"],
                config["setting"],
                count(result["tokens"]),
                f"{result['seconds']:,.0f}",
                f"{result['tokens_per_s']:,.0f}",
                number(result["loss"], 3),
                f"{result['bytes'] / 1e9:,.1f}",
                str(config["seed"]),
                config["parent_hash"][:8],
                run["git"][:12],
            )
        )
    head = (
        "parent",
        "setting",
        "tokens",
        "seconds",
        "tokens/s",
        "loss",
        "GB moved",
        "seed",
        "hash",
        "commit",
    )
    note = (
        "seconds: on the clock, compilation included, and whatever else ran on the device; tokens/s: the median "
        "round's. loss: mean of the last tenth of the rounds, of the subnets that were trained (whole models for "
        "data parallel), and mostly the distance to the teacher where there is one. GB moved: counted bytes "
        "between the central model and workers, or gradients."
    )
    what = "Every parent starts from the same weights and sees the same number of tokens."
    table = Table(head, tuple(rows), note=note, names=2)
    return Section("parents", "What was trained", what, (table,))
