"""The recipe: random and nested tickets of every way to train, over seeds, each at the better of its rates.

Dozens of trainings that leave no checkpoint: a way is trained, measured and forgotten.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from twistlm import config
from twistlm.config import Config
from twistlm.data.stream import Leases
from twistlm.lab.compare.table import by_size
from twistlm.tickets.ticket_scale import SCALES
from twistlm.training import engines

from .chosen import Found, Points, by_rate, by_start, choice_score, chosen, other_rates, paired
from .lab import Lab, Point
from .page import draw
from .page.section import Claim, Figure, Section, Table, number
from .ranking import TRIED
from .scales import N
from .ways import (
    DENSE_NAME,
    DROPOUT_NAME,
    NESTED_NAME,
    OFTEN_NAME,
    OURS,
    TWIN_NAME,
    WAYS,
    Spent,
    changes,
    dense_changes,
    perplexities,
    saved,
    train,
)


def points(lab: Lab) -> list[Point]:
    """Every way at each of its rates and seeds; the first seed of all ways comes first."""
    scale, found = lab.scale, []
    for seed in scale.seeds:
        for name, way in WAYS.items():
            rates = [rate for i, rate in enumerate(way.rates, 1) if i in scale.rates]
            for rate in rates if name in (scale.ways or WAYS) else ():
                about = {
                    "experiment": "recipe",
                    "scale": lab.name,
                    "way": name,
                    "rate": rate * lab.base.train.lr,
                    "changes": changes(scale, lab.base.train, way, rate),
                    "start": lab.hash_of(None),
                    "seed": seed,
                    "tokens": scale.tokens,
                    "treatment": TRIED,
                }
                if before := dense_changes(scale, lab.base.train, way):
                    about["before"] = before
                found.append(Point(about, partial(measure, lab, about)))
    return found


def measure(lab: Lab, about: Mapping[str, Any]) -> dict[str, Any]:
    """Train a way from the lab's start and measure it on the reported text and on other text."""
    start = lab.trained(None)
    lab.close()
    spent, leases = Spent(), Leases()
    with tempfile.TemporaryDirectory(prefix="twistlm-") as folder:
        if before := about.get("before", []):
            cfg = _config(lab, about, before, start, f"{folder}/before")
            with closing(engines.join(cfg)) as cluster:
                run, progress, spent = train(lab, cfg, cluster, leases, spent)
                start, leases = saved(run, progress), progress.leases
        cfg = _config(lab, about, about["changes"], start, f"{folder}/run")
        with closing(engines.join(cfg)) as cluster:
            run, progress, spent = train(lab, cfg, cluster, leases, spent)
            found = perplexities(lab, cfg, run, progress)
    return {**found, **asdict(spent)}


def _config(lab: Lab, about: Mapping[str, Any], some: list[str], weights: str, out: str) -> Config:
    own = [f"model.weights={weights}", f"run.seed={about['seed']}", f"run.out={out}"]
    return config.override(lab.base, [*some, *own])


# ---------------------------------------------------------------- how it is shown


def section(points: Points) -> Section:
    """One row per way at its better rate, mean ± sd over seeds; the curve of sizes of the main ways.

    Only points from one start compare: the one that most set out from leads, each other one has a table of its own.
    """
    points, *others = by_start(points)
    ways = chosen(points)
    main = {name: some for name, some in ways.items() if not name.startswith("…")}
    sizes = [k for k in next(iter(ways.values()))[0]["result"]["test"] if k != "whole"]
    drawn = next(iter(ways.values()))[0]["result"]["test"][sizes[0]].get("n", "some")
    note = f"perplexity, mean ± sd over seeds of the mean over {drawn} random subnets"
    series = _series(main, sizes)
    figure = Figure(
        "recipe",
        "Perplexity from the whole model down to a quarter of its blocks",
        _reading(ways, sizes),
        series,
        lambda axes: draw.ladder(
            axes, series, ours=OURS, x="attention heads and FFN blocks that stay in a layer"
        ),
        height=3.4,
    )
    what = (
        f"All ways from one start on the same tokens, each at {_rates(points, main)}. Nested tickets keep the first "
        f"blocks of the start's mask-Fisher order. {_treated(points)}"
    )
    tables, claims = _tables(points, sizes, note), _claims(ways, sizes)
    for some in others:
        where = _apart(some, points)
        tables += _tables(some, sizes, f"{where}: these rows compare with each other alone")
        claims += [replace(c, says=f"{c.says} ({where})") for c in _claims(chosen(some), sizes)]
    return Section("recipe", "The recipe", what, tuple(tables), (figure,), tuple(claims), lead=True)


def _rates(points: Points, ways: Found) -> str:
    """At which rates ways stand in the table: the better of some, and which were run at one alone."""
    n_rates = {name: len(rates) for name, rates in by_rate(points).items()}
    if max(n_rates.values()) == 1:
        return "one rate"
    which = (
        f"the better of its rates by text that is not reported ({DENSE_NAME} by its whole model)"
    )
    single = [name for name in ways if n_rates[name] == 1]
    return f"{which}; run at one rate: {'; '.join(single)}" if single else which


def _tables(points: Points, sizes: list[str], note: str) -> list[Table]:
    """The ways at their better rates, what an ingredient is worth, and the rates that were not chosen."""
    ways = chosen(points)
    rows = [_row(name, some, sizes) for name, some in ways.items() if not name.startswith("…")]
    other = [_row(*some, sizes) for some in other_rates(points, ways)]
    main = Table(_head("way", sizes), tuple(rows), note=note)
    rest = Table(
        _head("way", sizes), tuple(other), note="the same ways at rates that text did not choose"
    )
    return [main, *_changed(ways, sizes), *([rest] if other else [])]


def _apart(some: Points, leading: Points) -> str:
    """What keeps points from comparing with the leading ones: their start, how tickets are scaled, or both."""
    mine, theirs = some[0]["config"], leading[0]["config"]
    what = []
    if mine["start"] != theirs["start"]:
        what.append(f"from start {mine['start'][:8]}")
    if mine.get("treatment") != theirs.get("treatment"):
        what.append(f"scales: {mine.get('treatment', 'sqrt(N/K) for all')}")
    return ", ".join(what)


def _treated(points: Points) -> str:
    if all("treatment" in point["config"] for point in points):
        return "Scale: the best of some for each way and size, chosen on other text."
    return (
        "Scale: what TwIST trains with, for every way: data parallel's tickets would gain by another one "
        "(Table 1 gives each parent its best)."
    )


def _values(some: Points, size: str, which: str) -> list[float]:
    tests = [point["result"]["test"][size] for point in some]
    return [test if isinstance(test, float) else test[which] for test in tests]


def _mean(some: Points, size: str, which: str = "mean") -> float:
    return statistics.fmean(_values(some, size, which))


def _curve(some: Points, sizes: list[str], which: str) -> dict[int, float]:
    return {N: _mean(some, "whole")} | {int(k): _mean(some, k, which) for k in sizes}


def _head(first: str, sizes: list[str]) -> tuple[str, ...]:
    nested = (f"nested {k}/{N}" for k in sizes)
    sent = ("GB sent", "scale")
    return first, "rate", "seeds", "whole", *(f"{k}/{N}" for k in sizes), *nested, *sent


def _row(name: str, some: Points, sizes: list[str]) -> tuple[str, ...]:
    def cell(size: str, which: str = "mean") -> str:
        values = _values(some, size, which)
        sd = f" ± {number(statistics.stdev(values))}" if len(values) > 1 else ""
        return number(statistics.fmean(values)) + sd

    return (
        name,
        f"{some[0]['config']['rate']:g}",
        str(len(some)),
        cell("whole"),
        *(cell(k) for k in sizes),
        *(cell(k, "nested") for k in sizes),
        f"{some[0]['result']['bytes'] / 1e9:,.1f}",
        _scales(some, sizes),
    )


def _scales(some: Points, sizes: list[str]) -> str:
    """What tickets are scaled by, of the first seed: random ones, then nested ones where theirs differ."""
    tests = min(some, key=lambda p: p["config"]["seed"])["result"]["test"]
    told = [
        by_size([tests[k].get(key, {}).get("chosen", SCALES["sqrt"]) for k in sizes])
        for key in ("treatment", "nested_treatment")
    ]
    return told[0] if told[0] == told[1] else f"{told[0]}; nested: {told[1]}"


def _changed(ways: Found, sizes: list[str]) -> list[Table]:
    """What each ingredient of our way is worth: ways with one of them changed, in percent against ours."""
    rows = []
    for name in ways if OURS in ways else ():
        if not name.startswith("…"):
            continue
        other, ours = paired(ways[name], ways[OURS])
        cells = [("whole", "mean"), *((k, which) for which in ("mean", "nested") for k in sizes)]
        shares = (_mean(other, *cell) / _mean(ours, *cell) - 1 for cell in cells)
        gb = f"{other[0]['result']['bytes'] / 1e9:,.1f}"
        rate = f"{other[0]['config']['rate']:g}"
        more = (*(f"{100 * s:+.1f}%" for s in shares), gb, _scales(other, sizes))
        rows.append((name, rate, str(len(other)), *more))
    note = f"perplexity against {OURS}'s with the same seeds; above 0 is worse"
    return [Table(_head(f"{OURS} with", sizes), tuple(rows), note=note)] if rows else []


def _series(ways: Found, sizes: list[str]) -> dict[str, dict[int, float]]:
    """The curves of the main ways; of ours its nested tickets, too, and these alone of its best whole model."""
    variants = [n for n in ways if n.startswith((f"{OURS}, ", f"{TWIN_NAME}, "))]
    series = {n: _curve(some, sizes, "mean") for n, some in ways.items() if n not in variants}
    with_order = [n for n in (OURS, _best_whole(ways)) if n in ways]
    return series | {f"{_short(n)}, nested": _curve(ways[n], sizes, "nested") for n in with_order}


def _best_whole(ways: Found) -> str:
    """The variant of our way with the best whole model."""
    variants = [n for n in ways if n.startswith(f"{OURS}, ") and not n.startswith(OFTEN_NAME)]
    return min(variants, key=lambda n: _mean(ways[n], "whole"), default="")


def _short(name: str) -> str:
    """A line's name has little room: without what came before it."""
    return name.partition(" after ")[0]


def _reading(ways: Found, sizes: list[str]) -> str:
    if OURS not in ways or DENSE_NAME not in ways:
        return ""
    small, ours, best = sizes[-1], ways[OURS], _best_whole(ways)
    which = f" “{_short(best)}” is “{best}”." if best != _short(best) else ""
    return (
        f"With {small} of {N} blocks a nested ticket of TwIST has {_mean(ours, small, 'nested'):.1f} and a random one "
        f"{_mean(ours, small):.1f}, where blocks of a data-parallel model leave {_mean(ways[DENSE_NAME], small):.1f}.{which}"
    )


def _claims(ways: Found, sizes: list[str]) -> list[Claim]:
    """What the numbers decide about the recipe, each with the margin it has."""
    claims = []
    for name in (n for n in ways if n in (OURS, NESTED_NAME)):
        ours, small = ways[name], sizes[-1]
        less = 1 - _mean(ours, small, "nested") / _mean(ours, small)
        says = f"nested tickets of {name} are 10% better than random ones at {small}/{N}"
        claims.append(Claim(says, less >= 0.1, f"{100 * less:.1f}%", "ours"))
        if DROPOUT_NAME not in ways:
            continue
        ours, other = paired(ours, ways[DROPOUT_NAME])
        below = {k: 1 - _mean(ours, k) / _mean(other, k) for k in sizes}
        because = ", ".join(f"{100 * share:.1f}% at {k}/{N}" for k, share in below.items())
        says = f"random tickets of {name} are better than those of structured dropout at every size"
        claims.append(Claim(says, min(below.values()) > 0, because, "ours"))
    # what is tried on ours is tried on the twin, too: the better one is the rival
    twin = min(
        (n for n in ways if n.startswith(TWIN_NAME)),
        key=lambda n: choice_score(ways[n]),
        default="",
    )
    for name in ways if twin else ():
        if name == OURS or name.startswith(OFTEN_NAME):
            claims += _independence(name, *paired(ways[name], ways[twin]), sizes)
    if DENSE_NAME in ways and (names := [name for name in ways if name.startswith("TwIST")]):
        pairs = {n: paired(ways[n], ways[DENSE_NAME]) for n in names}
        ratios = {n: _mean(a, "whole") / _mean(b, "whole") for n, (a, b) in pairs.items()}
        best = min(ratios, key=ratios.__getitem__)
        says = "a TwIST parent's whole model is within 5% of data parallel's"
        claims.append(
            Claim(says, ratios[best] <= 1.05, f"{best}: {ratios[best]:.3f} times", "ours")
        )
    return claims


def _independence(name: str, ours: Points, twin: Points, sizes: list[str]) -> Iterator[Claim]:
    """Whether workers that train by themselves are as good as the same gradients shared in every step."""
    result, rival = ours[0]["result"], twin[0]["config"]["way"]
    sent = result.get("links", result["bytes"]) / twin[0]["result"]["bytes"]
    for which, tickets in (("mean", "random"), ("nested", "nested")):
        gaps = {k: _mean(ours, k, which) / _mean(twin, k, which) - 1 for k in ("whole", *sizes)}
        because = ", ".join(f"{100 * gap:+.1f}% at {k}" for k, gap in gaps.items())
        because += f"; {sent:.2f} of the bytes; {len(ours)} seed{'s' * (len(ours) > 1)}"
        because += f"; against “{rival}”" * (rival != TWIN_NAME)
        says = (
            f"{name}: {tickets} tickets of independent workers are within 1% of their synchronous "
            f"twin's at every size, at 0.45 of its bytes"
        )
        yield Claim(says, max(gaps.values()) <= 0.01 and sent <= 0.45, because, "ours")
