"""Robustness: trained on X blocks, evaluated on Y, a heat-map for each setting."""

from __future__ import annotations

from collections import Counter
from typing import Any

from . import paper
from .lab import Lab, Point
from .page import draw
from .page.section import Claim, Figure, Section, Table, lowest, number
from .ranking import Sample, subnets
from .scales import N, trained_at

KEEPS = 1.05  # a ratio of perplexities up to which a size "keeps" another's
SHARP = 1.5  # and from which it degrades sharply
ENDS = (3, 10)  # a width lies in the middle where there are such lean and such wide ones


def points(lab: Lab) -> list[Point]:
    """A heat-map per setting: every width in training, at every width."""
    scale = lab.scale
    return [
        subnets(
            lab,
            "robustness",
            trained_at(x, setting),
            Sample(setting, y, scale.n_subnets, scale.stability_tokens),
            widths=[x],
        )
        for setting in scale.settings
        for x in scale.trained_on
        for y in scale.evaluated_on
    ]


def section(points: list[dict[str, Any]]) -> Section:
    """The heat-maps, their numbers, and what they say about the paper's three claims."""
    maps: dict[str, dict[int, dict[int, float]]] = {}  # setting -> trained on -> evaluated on
    figures, claims = [], []
    for setting in dict.fromkeys(p["config"]["setting"] for p in points):
        mine = [p for p in points if p["config"]["setting"] == setting]
        shown: dict[int, dict[int, float]] = {}  # trained on -> evaluated on -> perplexity
        for point in sorted(mine, key=lambda p: p["config"]["widths"]):
            (x,) = point["config"]["widths"]
            shown.setdefault(x, {})[point["config"]["k"]] = point["result"]["mean"]
        maps[setting] = shown
        figures.append(_figure(setting, shown))
        claims += _claims(setting, shown)
    theirs = [
        f"{setting}, trained on 10: {known[10, 10]} at 10 and {known[10, 4]} at 4; trained on 4: "
        + " to ".join(map(str, paper.ROBUSTNESS_ON_4[setting]))
        for setting, known in paper.ROBUSTNESS.items()
    ]
    what = (
        "Every parent is trained from the same start with subnets of X blocks; random subnets of Y blocks "
        f"are then evaluated (12: the whole model), each cell with the activation scale that suits it best on other "
        f"text ({_scales(points)}); {points[0]['config']['tokens']:,} tokens behind a perplexity. The paper on its own text: {'; '.join(theirs)}; of attn "
        "it prints no number."
    )
    return Section(
        "robustness",
        "Robustness to the size",
        what,
        (_table(maps),),
        tuple(figures),
        tuple(claims),
    )


def _scales(points: list[dict[str, Any]]) -> str:
    """How many cells took which scale."""
    found = [p["result"].get("treatment", {}).get("chosen") for p in points if p["config"]["k"] < N]
    counts = Counter(scale or "as trained" for scale in found)
    return ", ".join(f"{scale}: {n}" for scale, n in counts.most_common())


def _table(maps: dict[str, dict[int, dict[int, float]]]) -> Table:
    """Every cell of every map; in each setting the lowest perplexity of a size is marked."""
    columns = sorted({k for shown in maps.values() for row in shown.values() for k in row})
    rows: list[tuple[str, ...]] = []
    best: set[tuple[int, int]] = set()
    for setting, shown in maps.items():
        values = [[row.get(k) for k in columns] for row in shown.values()]
        best |= {(len(rows) + i, j + 2) for i, j in lowest(values)}
        rows += [
            (setting, f"{x}/{N}", *map(number, mine)) for x, mine in zip(shown, values, strict=True)
        ]
    head = ("setting", "trained on", *(f"{k}/{N}" for k in columns))
    return Table(head, tuple(rows), frozenset(best), "perplexity", names=2)


def _figure(setting: str, shown: dict[int, dict[int, float]]) -> Figure:
    columns = sorted({k for row in shown.values() for k in row})
    values = [[row.get(k) for k in columns] for row in shown.values()]
    whole = {x: max(row.values()) for x, row in shown.items() if len(row) == len(columns)}
    reading = ""
    if whole:
        best = min(whole, key=whole.__getitem__)
        reading = (
            f"Trained on {best}, the worst size costs {number(whole[best])}: the lowest worst case of "
            f"{len(whole)} widths in training."
        )
    return Figure(
        f"robustness-{setting}",
        f"Trained on X (rows), evaluated on Y (columns), {setting}",
        reading,
        shown,
        lambda axes: draw.heatmap(
            axes,
            [str(x) for x in shown],
            [str(k) for k in columns],
            values,
            x="blocks in the evaluated subnet",
            y="blocks in training",
        ),
        height=0.9 + 0.34 * len(shown),
    )


def _claims(setting: str, plain: dict[int, dict[int, float]]) -> list[Claim]:
    """`plain`: X -> Y -> perplexity, for the paper's mean."""
    claims = []
    wide, lean = 10, 4  # the paper's pair; a smaller map has its own widest and leanest
    if lean not in plain.get(wide, {}) or wide not in plain.get(wide, {}):
        wide = max((x for x in plain if x < N and x in plain[x]), default=0)
        lean = min(plain.get(wide, {0: 0.0}))
    if lean < wide:
        factor = plain[wide][lean] / plain[wide][wide]
        claims.append(
            Claim(
                f"{setting}, downward: trained on wide subnets, lean ones degrade sharply",
                factor >= SHARP,
                f"trained on {wide}, perplexity at {lean}/{N} is {factor:.2f} times that at {wide}/{N} "
                f"({_theirs(setting, wide, lean)}; sharply means {SHARP} times or more)",
            )
        )
    ups = [
        (plain[x][y] / plain[x][x], x, y)
        for x in plain
        for y in plain[x]
        if x in plain[x] and y > x
    ]
    if ups:
        factor, x, y = max(ups)
        claims.append(
            Claim(
                f"{setting}, upward: trained on lean subnets, wider ones keep the perplexity or improve it",
                factor <= KEEPS,
                f"at most {factor:.2f} times the perplexity of the size it was trained on, from {x}/{N} to {y}/{N} "
                f"(keeps: up to {KEEPS})",
            )
        )
    full = [x for x in plain if len(plain[x]) == max(len(r) for r in plain.values())]
    if len(full) > 2 and min(full) <= ENDS[0] and max(full) >= ENDS[1]:
        worst = {x: max(plain[x].values()) for x in full}
        best = min(worst, key=worst.__getitem__)
        claims.append(
            Claim(
                f"{setting}, sweet spot: a mid-level training width has the lowest worst case over all sizes",
                min(full) < best < max(full),
                ", ".join(f"X={x}: {number(worst[x])}" for x in sorted(worst))
                + f"; lowest at X={best}",
            )
        )
    return claims


def _theirs(setting: str, wide: int, lean: int) -> str:
    """The paper's own factor for the same setting and sizes, where it prints one."""
    known = paper.ROBUSTNESS.get(setting, {})
    if (wide, lean) not in known:
        return f"the paper prints no such number for {setting}, {wide} to {lean}"
    return f"the paper's {setting}, {wide} to {lean}: {known[wide, lean] / known[wide, wide]:.2f} times"
