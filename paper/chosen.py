"""Which points of the recipe compare: from one start, each way at its better rate, with the same seeds."""

from __future__ import annotations

import statistics
from typing import Any

from .ways import DENSE_NAME, OURS, WAYS

Points = list[dict[str, Any]]
Found = dict[str, Points]  # way -> its points at the chosen rate, one per seed


def by_start(points: Points) -> list[Points]:
    """Points apart by the weights they set out from and by how their tickets are scaled.

    Most seeds of our way first, then those with chosen scales, then most points.
    """
    starts: dict[tuple[str, str], Points] = {}
    for point in points:
        about = point["config"]
        starts.setdefault((about["start"], about.get("treatment", "")), []).append(point)

    def weight(some: Points) -> tuple[int, bool, int]:
        seeds = {p["config"]["seed"] for p in some if p["config"]["way"] == OURS}
        return len(seeds), "treatment" in some[0]["config"], len(some)

    return sorted(starts.values(), key=weight, reverse=True)


def by_rate(points: Points) -> dict[str, dict[float, Points]]:
    """Points of every way, in the order of the ways, by their rate."""
    ways: dict[str, dict[float, Points]] = {}
    names = [*WAYS, *(point["config"]["way"] for point in points)]
    for point in sorted(points, key=lambda p: names.index(p["config"]["way"])):
        about = point["config"]
        ways.setdefault(about["way"], {}).setdefault(about["rate"], []).append(point)
    return ways


def choice_score(some: Points) -> float:
    """The mean of all sizes on text that is not reported, first seed: what choices between points are made by.

    Data parallel trains the whole model, and this alone chooses its rate: a rate that serves its tickets must not
    make it an easier rival where the whole model counts.
    """
    point = min(some, key=lambda p: p["config"]["seed"])
    tried = point["result"].get("choice") or point["result"]["test"]
    sizes = ["whole"] if point["config"]["way"] == DENSE_NAME else tried
    values = (tried[size] for size in sizes)
    return statistics.geometric_mean(v if isinstance(v, float) else v["mean"] for v in values)


def chosen(points: Points) -> Found:
    """Every way's points at its better rate."""
    return {name: min(rates.values(), key=choice_score) for name, rates in by_rate(points).items()}


def other_rates(points: Points, ways: Found) -> list[tuple[str, Points]]:
    """Ways with their points at rates that were not chosen."""
    found = [(name, some) for name, rates in by_rate(points).items() for some in rates.values()]
    return [(name, some) for name, some in found if some != ways[name]]


def paired(a: Points, b: Points) -> tuple[Points, Points]:
    """The points of both ways with seeds that both have."""
    seeds = {p["config"]["seed"] for p in a} & {p["config"]["seed"] for p in b}
    mine, other = ([p for p in some if p["config"]["seed"] in seeds] for some in (a, b))
    return (mine, other) if seeds else (a, b)
