"""Node loss: the parent is served by n nodes that hold its blocks, and some of them die."""

from __future__ import annotations

from typing import Any

from twistlm.lab.compare.table import by_size, unless_blank
from twistlm.tickets import lost_nodes

from .lab import Lab, Point
from .page import draw
from .page.section import Claim, Figure, Section, Table, lowest, number
from .ranking import TRIED
from .scales import DENSE, PARENTS, TWIST, Recipe


def points(lab: Lab) -> list[Point]:
    return [_point(lab, recipe, *case) for recipe in PARENTS for case in lab.scale.nodes]


def _point(lab: Lab, recipe: Recipe, n_nodes: int, n_lost: int) -> Point:
    about = lab.about(
        "nodeloss",
        recipe,
        setting="both",
        nodes=n_nodes,
        lost=n_lost,
        tokens=lab.scale.tokens,
        treatment=TRIED,
    )

    def measure() -> dict[str, Any]:
        parent, _ = lab.open(recipe, "both")
        (made,) = lost_nodes.drop(
            {recipe.label: parent}, n_nodes, n_lost, tokens=lab.scale.tokens, quiet=True
        )
        return {
            "full": made.full,
            "mean": made.mean,
            "worst": made.worst,
            "values": list(made.losses.values()),
            "n_tokens": made.n_tokens,
            "treatment": made.treatment,
        }

    return Point(about, measure)


def section(points: list[dict[str, Any]]) -> Section:
    """Perplexity after the worst loss of every kind, absolute and against the whole model."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for point in points:
        config = point["config"]
        case = f"{config['lost']} of {config['nodes']}"
        found.setdefault(config["parent"], {})[case] = point["result"]
    cases = list(dict.fromkeys(case for results in found.values() for case in results))
    rows, values = [], []
    for label, results in found.items():
        whole = next(iter(results.values()))["full"]
        worst = [results[c]["worst"] if c in results else None for c in cases]
        values.append([whole, *worst])
        cells = ["" if w is None else f"{number(w)} ({w / whole:.2f}x)" for w in worst]
        chosen = [r.get("treatment", {}).get("chosen", "") for r in results.values()]
        rows.append((label, number(whole), *cells, by_size(chosen)))
    best = frozenset((i, j + 1) for i, j in lowest(values))
    head = ("parent", "none lost", *(f"{case} lost" for case in cases), "scale")
    head, *rows = unless_blank([head, *rows], "scale")
    table = Table(
        head, tuple(rows), best, "perplexity after the worst such loss (times the whole model)"
    )
    factors = {
        case: {label: r[case]["worst"] / r[case]["full"] for label, r in found.items() if case in r}
        for case in cases
    }
    hardest = max(cases, key=lambda c: max(factors[c].values()))
    at = factors[hardest]
    low, high = min(at, key=at.__getitem__), max(at, key=at.__getitem__)
    reading = f"With {hardest} nodes lost, {low} is {at[low]:.2f} times worse than whole, {high} {at[high]:.2f} times."
    figure = Figure(
        "nodeloss",
        "Perplexity after the worst loss, times that of the whole model",
        reading,
        factors,
        lambda axes: draw.bars(axes, factors, y="times worse than whole", base=1.0),
        height=3.4,
    )
    what = (
        "The model is served by n nodes, each with one contiguous share of every layer's blocks; all "
        "combinations of lost nodes are tried. The paper claims that TwIST handles this and does not test it."
    )
    return Section(
        "nodeloss", "Lost nodes", what, (table,), (figure,), tuple(_claims(found, cases))
    )


def _claims(found: dict[str, dict[str, dict[str, Any]]], cases: list[str]) -> list[Claim]:
    dense, twist = found.get(DENSE.label), found.get(TWIST.label)
    if not dense or not twist:
        return []
    shared = [case for case in cases if case in dense and case in twist]
    pairs = {
        c: (twist[c]["worst"] / twist[c]["full"], dense[c]["worst"] / dense[c]["full"])
        for c in shared
    }
    ahead = [c for c in shared if twist[c]["worst"] < dense[c]["worst"]]
    return [
        Claim(
            "a TwIST parent handles lost nodes more gracefully than a data-parallel one",
            all(t < d for t, d in pairs.values()),
            "; ".join(f"{c} lost: {t:.2f}x against {d:.2f}x" for c, (t, d) in pairs.items())
            + f". In absolute perplexity it is ahead with {', '.join(ahead) or 'none of these'} lost",
        )
    ]
