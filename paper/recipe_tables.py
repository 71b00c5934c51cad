"""The recipe's points as tables: every way at its better rate, over seeds, and what decides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from twistlm.lab.compare.table import by_size
from twistlm.tickets.ticket_scale import SCALES

from .scales import N
from .tables import Claim, Figure, Points, Section, Table, number
from .ways import DENSE_NAME, DROPOUT_NAME, NESTED_NAME, OFTEN_NAME, OURS, TWIN_NAME, WAYS

Found = dict[str, Points]  # way -> its points at the chosen rate, one per seed


def recipe(points: Points) -> Section:
    """One row per way, mean ± sd over seeds; points from another start have tables of their own."""
    shown = Section()
    for i, some in enumerate(groups := by_start(points)):
        suffix = f"-{i + 1}" if i else ""
        where = f" ({_apart(some, groups[0])})" if i else ""
        ways = chosen(some)
        sizes = [k for k in some[0]["result"]["test"] if k != "whole"]
        shown.tables += _tables(some, ways, sizes, suffix, where)
        for claim in _claims(ways, sizes):
            shown.claims.append(
                Claim(f"{claim.claim}{where}", claim.numbers, claim.holds, claim.whose)
            )
        if not i:
            main = {n: p for n, p in ways.items() if n in MAIN}
            lines = {n: _curve(p, sizes, "mean") for n, p in main.items()}
            lines |= {f"{n}, nested": _curve(ways[n], sizes, "nested") for n in _ordered(ways)}
            title = "Perplexity from the whole model down to a quarter of its blocks"
            shown.figures.append(Figure("recipe", title, "log-lines", lines, "blocks kept of 12"))
    return shown


MAIN = (DENSE_NAME, DROPOUT_NAME, "TwIST K=6, the paper's masks", OURS, TWIN_NAME)


def by_start(points: Points) -> list[Points]:
    """Points apart by the weights they begin with and by how their tickets are scaled.

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
    """The geometric mean of all sizes on text that is not reported, first seed.

    Data parallel trains the whole model, and this alone chooses its rate: a rate that serves its
    tickets must not make it an easier opponent where the whole model counts.
    """
    point = min(some, key=lambda p: p["config"]["seed"])
    tried = point["result"].get("choice") or point["result"]["test"]
    sizes = ["whole"] if point["config"]["way"] == DENSE_NAME else tried
    values = (tried[size] for size in sizes)
    return statistics.geometric_mean(v if isinstance(v, float) else v["mean"] for v in values)


def chosen(points: Points) -> Found:
    """Every way's points at its better rate."""
    return {name: min(rates.values(), key=choice_score) for name, rates in by_rate(points).items()}


def paired(a: Points, b: Points) -> tuple[Points, Points]:
    """The points of both ways with seeds that both have."""
    seeds = {p["config"]["seed"] for p in a} & {p["config"]["seed"] for p in b}
    mine, other = ([p for p in some if p["config"]["seed"] in seeds] for some in (a, b))
    return (mine, other) if seeds else (a, b)


def _apart(some: Points, leading: Points) -> str:
    """What keeps points from comparing with the leading ones: start, scales of tickets, or both."""
    mine, theirs = some[0]["config"], leading[0]["config"]
    what = []
    if mine["start"] != theirs["start"]:
        what.append(f"from start {mine['start'][:8]}")
    if mine.get("treatment") != theirs.get("treatment"):
        what.append(f"scales: {mine.get('treatment', 'sqrt(N/K) for all')}")
    return ", ".join(what)


def _tables(
    points: Points, ways: Found, sizes: list[str], suffix: str, where: str
) -> Iterator[Table]:
    """The ways at their better rates, what ingredients are worth, and the other rates."""
    nested = (f"nested {k}/{N}" for k in sizes)
    sent = ("GB sent", "scale")
    head = "rate", "seeds", "whole", *(f"{k}/{N}" for k in sizes), *nested, *sent
    n = next(iter(ways.values()))[0]["result"]["test"][sizes[0]].get("n", "some")
    title = f"Recipe: perplexity, mean ± sd over seeds of the mean over {n} random subnets{where}"
    rows = [_row(name, some, sizes) for name, some in ways.items() if not name.startswith("…")]
    yield Table(f"recipe{suffix}", title, ("way", *head), tuple(rows))
    if changed := [_change(n, ways, sizes) for n in ways if n.startswith("…") and OURS in ways]:
        title = f"Recipe: perplexity against {OURS}'s with the same seeds{where}"
        yield Table(f"recipe{suffix}-ablation", title, (f"{OURS} with", *head), tuple(changed))
    every = [(name, some) for name, rates in by_rate(points).items() for some in rates.values()]
    if other := [_row(name, some, sizes) for name, some in every if some != ways[name]]:
        title = f"Recipe: the same ways at rates that were not chosen{where}"
        yield Table(f"recipe{suffix}-rates", title, ("way", *head), tuple(other))


def _values(some: Points, size: str, which: str = "mean") -> list[float]:
    tests = [point["result"]["test"][size] for point in some]
    return [test if isinstance(test, float) else test[which] for test in tests]


def _mean(some: Points, size: str, which: str = "mean") -> float:
    return statistics.fmean(_values(some, size, which))


def _curve(some: Points, sizes: list[str], which: str) -> dict[int, float]:
    return {N: _mean(some, "whole")} | {int(k): _mean(some, k, which) for k in sizes}


def _cells(sizes: list[str]) -> list[tuple[str, str]]:
    """The columns of perplexities: size, and whether it is of random or nested tickets."""
    return [("whole", "mean"), *((k, which) for which in ("mean", "nested") for k in sizes)]


def _row(name: str, some: Points, sizes: list[str]) -> tuple[str, ...]:
    def cell(size: str, which: str) -> str:
        values = _values(some, size, which)
        sd = f" ± {number(statistics.stdev(values))}" if len(values) > 1 else ""
        return number(statistics.fmean(values)) + sd

    return _around(name, some, sizes, [cell(*at) for at in _cells(sizes)])


def _change(name: str, ways: Found, sizes: list[str]) -> tuple[str, ...]:
    """A way with one ingredient of ours changed, in percent against ours."""
    other, ours = paired(ways[name], ways[OURS])
    shares = (_mean(other, *at) / _mean(ours, *at) - 1 for at in _cells(sizes))
    return _around(name, other, sizes, [f"{100 * share:+.1f}%" for share in shares])


def _around(name: str, some: Points, sizes: list[str], cells: list[str]) -> tuple[str, ...]:
    gigabytes = f"{some[0]['result']['bytes'] / 1e9:,.1f}"
    rate = f"{some[0]['config']['rate']:g}"
    return name, rate, str(len(some)), *cells, gigabytes, _scales(some, sizes)


def _scales(some: Points, sizes: list[str]) -> str:
    """The scales of tickets, first seed: random ones, then nested ones where theirs differ."""
    tests: dict[str, Any] = min(some, key=lambda p: p["config"]["seed"])["result"]["test"]
    random, nested = (
        by_size([tests[k].get(key, {}).get("chosen", SCALES["sqrt"]) for k in sizes])
        for key in ("treatment", "nested_treatment")
    )
    return random if random == nested else f"{random}; nested: {nested}"


def _ordered(ways: Found) -> list[str]:
    """Ours, and its variant with the best whole model: their nested tickets are drawn, too."""
    variants = [n for n in ways if n.startswith(f"{OURS}, ") and not n.startswith(OFTEN_NAME)]
    best = min(variants, key=lambda n: _mean(ways[n], "whole"), default="")
    return [name for name in (OURS, best) if name in ways]


def _claims(ways: Found, sizes: list[str]) -> Iterator[Claim]:
    """What the numbers decide about the recipe."""
    for name in (n for n in ways if n in (OURS, NESTED_NAME)):
        ours, small = ways[name], sizes[-1]
        less = 1 - _mean(ours, small, "nested") / _mean(ours, small)
        says = f"nested tickets of {name} are 10% better than random ones at {small}/{N}"
        yield Claim(says, f"{100 * less:.1f}%", less >= 0.1, "ours")
        if DROPOUT_NAME in ways:
            ours, other = paired(ours, ways[DROPOUT_NAME])
            below = {k: 1 - _mean(ours, k) / _mean(other, k) for k in sizes}
            said = ", ".join(f"{100 * share:.1f}% at {k}/{N}" for k, share in below.items())
            says = f"random tickets of {name} beat those of structured dropout at every size"
            yield Claim(says, said, min(below.values()) > 0, "ours")
    # what is tried on ours is tried on the twin, too: ours is held against the better twin
    twins = [name for name in ways if name.startswith(TWIN_NAME)]
    twin = min(twins, key=lambda n: choice_score(ways[n]), default="")
    for name in ways if twin else ():
        if name == OURS or name.startswith(OFTEN_NAME):
            yield from _independence(name, *paired(ways[name], ways[twin]), sizes)
    names = [name for name in ways if name.startswith("TwIST")]
    if DENSE_NAME in ways and names:
        pairs = {n: paired(ways[n], ways[DENSE_NAME]) for n in names}
        ratios = {n: _mean(a, "whole") / _mean(b, "whole") for n, (a, b) in pairs.items()}
        best = min(ratios, key=ratios.__getitem__)
        says = "a TwIST parent's whole model is within 5% of data parallel's"
        yield Claim(says, f"{best}: {ratios[best]:.3f} times", ratios[best] <= 1.05, "ours")


def _independence(name: str, ours: Points, twin: Points, sizes: list[str]) -> Iterator[Claim]:
    """Whether workers by themselves are as good as the same gradients shared in every step."""
    result, other = ours[0]["result"], twin[0]["config"]["way"]
    sent = result.get("links", result["bytes"]) / twin[0]["result"]["bytes"]
    for which, tickets in (("mean", "random"), ("nested", "nested")):
        gaps = {k: _mean(ours, k, which) / _mean(twin, k, which) - 1 for k in ("whole", *sizes)}
        said = ", ".join(f"{100 * gap:+.1f}% at {k}" for k, gap in gaps.items())
        said += f"; {sent:.2f} of the bytes; seeds: {len(ours)}; against {other}"
        says = f"{name}: {tickets} tickets within 1% of the synchronous twin's, 0.45 of its bytes"
        yield Claim(says, said, max(gaps.values()) <= 0.01 and sent <= 0.45, "ours")
