"""Finished points as tables and figures: one function for each experiment of the paper.

A point comes flat here: the keys of its config and of its result in one dict.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from twistlm.baselines import COMPARED, STRUCTURED
from twistlm.lab.compare.table import by_size, number

from . import printed, scales
from .scales import DENSE, DROPOUT_NAME, OFTEN, OURS, SCALES, TWIN_NAME, TWIST, WAYS, N

Points = list[dict[str, Any]]
Sizes = dict[Any, dict[str, Any]]  # K of 12 blocks -> the point there
Means = dict[Any, float]  # K of 12 blocks -> perplexity

RANDOM, NESTED = "random blocks of ", "nested blocks of "  # before a parent's name
AT_SIZE = f"{RANDOM}TwIST trained at that size"  # one parent for each size, as in the paper
PAPER = {  # row of Table 1 -> the paper's column
    **{name: name for name in ("sparsegpt", "wanda", "zpruner")},
    "block:fisher": "block",
    f"{RANDOM}{DENSE.label}": "dense",
    AT_SIZE: "twist",
    f"{RANDOM}{TWIST.label}": "twist-6",
}


class Table(NamedTuple):
    name: str
    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Figure(NamedTuple):
    name: str
    title: str
    data: dict[str, Means]  # by line


class Line(NamedTuple):
    labels: tuple[str, ...]
    found: Sizes
    rivals: Any = None  # rows of one kind compete for bold numbers; None: with nobody


Shown = Iterator[Table | Figure]


def grouped(points: Points, key: str) -> dict[Any, Points]:
    return {value: [p for p in points if p[key] == value] for value in {p[key]: 0 for p in points}}


def means(sizes: Sizes) -> Means:
    return {k: point["mean"] for k, point in sizes.items()}


def best_of(rows: Iterable[Means]) -> Means:
    found: Means = {}
    for row in rows:
        found |= {k: min(value, found.get(k, value)) for k, value in row.items()}
    return found


def by_columns(
    name: str, title: str, heads: tuple[str, ...], lines: list[Line], columns: list[Any]
) -> Table:
    """Perplexities and activation scales; the lowest of a column, among its rivals, is bold."""

    def is_best(line: Line, k: Any) -> bool:
        like = [other for other in lines if other.rivals == line.rivals and k in other.found]
        least = min((other.found[k]["mean"] for other in like), default=None)
        return line.rivals is not None and len(like) > 1 and line.found[k]["mean"] == least

    rows = []
    for line in lines:
        cells = []
        for k in columns:
            point = line.found.get(k, {})
            spread = f" ± {number(point['sd'])}" if point.get("sd") is not None else ""
            text = number(point.get("mean")) + spread
            cells.append(f"**{text}**" if point and is_best(line, k) else text)
        some = [line.found[k] for k in columns if k in line.found]
        tried = [point["treatment"]["chosen"] for point in some if "treatment" in point]
        rows.append((*line.labels, *cells, by_size(tried) if tried else ""))
    return Table(name, title, (*heads, *map(head, columns), "activation scale"), rows)


def sizes_of(points: Points) -> list[int]:
    return sorted({p["k"] for p in points}, reverse=True)


def head(k: Any) -> str:
    """How a column is called: a size, or by its name."""
    return "whole" if k == N else f"{k}/{N}" if isinstance(k, int) else k


# ---------------------------------------------------------------- perplexities


def table1(points: Points) -> Shown:
    """Perplexity by size: the pruners, then random and nested blocks of every parent."""
    for setting, mine in grouped(points, "setting").items():
        rows, lines = table1_rows(mine), []
        methods = {p["method"] for p in mine if "method" in p}
        chosen = {name for name in methods if name.startswith(STRUCTURED)}  # blocks, by score
        for name, row in rows.items():
            # zeros and really smaller models do not compete
            lines.append(Line((name,), row, "zeros" if name in methods - chosen else "smaller"))
            if name in PAPER and all(SCALES[p["scale"]].n_attn == N for p in mine):
                known = printed.TABLE1[setting].items()
                lines.append(Line(("the paper",), {k: {"mean": v[PAPER[name]]} for k, v in known}))
        name, title = f"table1-{setting}", f"Table 1, {setting}: perplexity by size"
        yield by_columns(name, title, (setting,), lines, sizes_of(mine))
        found = {name: means(row) for name, row in rows.items()}
        curves = {name: row for name, row in found.items() if name not in methods}
        curves["best chosen blocks"] = best_of(found[name] for name in chosen)
        curves["best zeros"] = best_of(found[name] for name in methods - chosen)
        yield Figure(name, title, {name: row for name, row in curves.items() if row})


def table1_rows(points: Points) -> dict[str, Sizes]:
    methods = [p["method"] for p in points if "method" in p]  # some are no longer in COMPARED
    rows: dict[str, Sizes] = {name: {} for name in (*COMPARED, *methods)}
    for p in points:
        names = [f"{RANDOM}{p['parent']}"]
        trained = p["slug"].removesuffix(f"-{p['setting']}")
        if "method" in p:
            names = [p["method"]]
        elif p.get("pick") == "nested":
            names = [f"{NESTED}{p['parent']}"]
        elif trained == f"twist-{p['k']}":  # only that of TWIST has a row of its own, too
            names = [AT_SIZE, *(names if trained == TWIST.slug else ())]
        for name in names:
            rows.setdefault(name, {})[p["k"]] = p
    if {*rows.get(AT_SIZE, ())} <= {TWIST.k}:  # nothing that the row of TWIST does not say
        rows[AT_SIZE] = {}
    return {name: row for name, row in rows.items() if row}


def stability(points: Points) -> Shown:
    """Mean and sd of the perplexity of random subnets."""
    title = f"Stability: perplexity, mean ± sd over {points[0]['n']} random subnets"
    yield grid("stability", title, points, "parent")


def robustness(points: Points) -> Shown:
    """Trained on X blocks (rows), evaluated on Y (columns)."""
    points = [
        p | {"trained on": f"{p['widths'][0]}/{N}"}
        for p in sorted(points, key=lambda p: p["widths"])
    ]
    title = "Robustness: perplexity at sizes other than that of training"
    yield grid("robustness", title, points, "trained on")


def grid(name: str, title: str, points: Points, key: str) -> Table:
    """In each setting a row for every value of a key, a column for every size."""
    lines = [
        Line((setting, value), {p["k"]: p for p in some}, setting)
        for setting, mine in grouped(points, "setting").items()
        for value, some in grouped(mine, key).items()
    ]
    return by_columns(name, title, ("setting", key), lines, sizes_of(points))


def nodeloss(points: Points) -> Shown:
    """Perplexity of the whole model, and after the worst loss of nodes."""
    found: dict[str, Sizes] = {}
    for p in points:
        mine = found.setdefault(p["parent"], {"none lost": {"mean": p["full"]}})
        mine[f"{p['lost']} of {p['nodes']} lost"] = p | {"mean": p["worst"]}
    cases = list(dict.fromkeys(case for sizes in found.values() for case in sizes))
    lines = [Line((parent,), sizes, "all") for parent, sizes in found.items()]
    title = "Lost nodes: perplexity after the worst such loss"
    yield by_columns("nodeloss", title, ("parent",), lines, cases)


def shift(points: Points) -> Shown:
    """||y'|| / ||y|| of a layer with K of N blocks, against sqrt(K/N) and the exact formula."""

    def error(p: dict[str, Any], formula: str) -> str:
        return f"{statistics.fmean(abs(r[formula] / r['measured'] - 1) for r in p['rows']):.1%}"

    rows = [(p["parent"], error(p, "paper"), error(p, "exact")) for p in points]
    head = ("model", "error of sqrt(K/N)", "error of the exact formula")
    title = "Activation shift: mean of |formula / measured - 1| over layers and K"
    yield Table("shift", title, head, rows)


# ---------------------------------------------------------------- what it costs


def table2(points: Points) -> Shown:
    """Memory, bytes and wall clock of a worker: measured, by the formula, and as printed."""
    measured = {(p["setting"], p["k"]): p for p in points if p["experiment"] == "latency"}
    for plan in (p for p in points if p["experiment"] == "table2"):
        rows = []
        for row in plan["rows"]:
            setting = "both" if row["setting"] == "full" else row["setting"]
            k = int(row["ratio"].split("/")[0])
            gb, tb, clock = printed.TABLE2[setting].get(k, (None, None, ""))
            ours, carried = (row[f"{kind}_bytes"] / 1e12 for kind in ("paper", "carried"))
            state = hours = ""
            if found := measured.get((setting, k)):
                state = number(found["state_bytes"] / 1e9, 3)
                hours = str(timedelta(seconds=round(found["round_ms"] / 1e3 * plan["true_rounds"])))
            size = ("whole" if k == N else setting, row["ratio"], f"{row['n_params'] / 1e6:.1f}M")
            rows.append((*size, state, *map(number, (gb, ours, tb, carried)), hours, clock))
        head = "setting, blocks, parameters, GB, paper GB, formula TB, paper TB, with moments TB, "
        title = "Table 2: {paper_rounds:,} rounds by the formula, {true_rounds:,} with moments"
        columns = f"{head}wall clock, paper".split(", ")
        yield Table("table2", title.format(**plan), tuple(columns), rows)


def latency(points: Points) -> Shown:
    """Milliseconds of a worker's local step, beside what FLOPs alone would give."""
    whole, rows = max(points, key=lambda p: p["k"]), []
    for p in sorted(points, key=lambda p: (-p["k"], p["setting"])):
        k, setting, gain = p["k"], p["setting"], whole["ms"] / p["ms"]
        theirs, ideal = "", f"{whole['flops'] / p['flops']:.2f}x"
        if k == 4:
            theirs = f"{printed.LATENCY['whole'] / printed.LATENCY[setting]:.2f}x"
        size = ("whole", "") if k == N else (f"{k}/{N}", setting)
        rows.append((*size, f"{p['ms']:.2f}", f"{gain:.2f}x", ideal, theirs))
    head = ("blocks", "setting", "ms per step", "faster", "ideal by FLOPs", "the paper")
    title = "Latency of a local step, batch {batch} of {seq_len} tokens".format(**whole)
    yield Table("latency", title, head, rows)


def parents(points: Points) -> Shown:
    """What every parent's training cost."""
    rows = []
    for p in points:
        numbers = (p["tokens"] / 1e6, p["seconds"], p["loss"], p["bytes"] / 1e9)
        rows.append((p["parent"], p["setting"], *(f"{value:,.2f}" for value in numbers)))
    head = ("parent", "setting", "million tokens", "seconds", "last loss", "GB sent")
    yield Table("parents", "Parents, all from one start", head, rows)


# ---------------------------------------------------------------- the recipe

MAIN = (DENSE.label, DROPOUT_NAME, OURS, TWIN_NAME, *scales.SMALL_WAYS)
Ways = dict[str, dict[float, Points]]  # way -> rate -> a point per seed


def recipe(points: Points) -> Shown:
    """A row per way and rate; other starts, and other activation scales, have their own tables."""
    for i, ways in enumerate(by_start(points)):
        chosen = {way: min(rates.values(), key=choice_score) for way, rates in ways.items()}
        one = next(iter(chosen.values()))[0]
        start, treatment = one["start"][:8], one.get("treatment", "sqrt(N/K) for all")
        where = f" (start {start}, activation scales: {treatment})" if i else ""
        name, columns = f"recipe-{i + 1}" if i else "recipe", list(over_seeds([one]))
        lines: list[Line] = []
        for way, some in ((way, some) for way, rates in ways.items() for some in rates.values()):
            counts = some == chosen[way]
            rate, sent = f"{some[0]['rate']:g}", f"{some[0]['bytes'] / 1e9:,.1f}"
            labels = (way, f"**{rate}**" if counts else rate, str(len(some)), sent)
            lines.append(Line(labels, over_seeds(some), "the rate that counts" if counts else None))
        title = f"Recipe: perplexity, mean ± sd over seeds; bold: the rate that counts{where}"
        yield by_columns(name, title, ("way", "rate", "seeds", "GB sent"), lines, columns)
        changed = [way for way in chosen if way.startswith("…") and OURS in chosen]
        if rows := [(way, *gaps(chosen[way], chosen[OURS])) for way in changed]:
            title = f"Recipe: perplexity against {OURS}'s with the same seeds{where}"
            yield Table(f"{name}-ablation", title, (f"{OURS} with", *columns), rows)
        if not i:
            curves = {way: _curve(some, "") for way, some in chosen.items() if way in MAIN}
            # and nested tickets of ours, of small workers, and of the variant with the best whole
            mine = [n for n in chosen if n.startswith(f"{OURS}, ") and not n.startswith(OFTEN)]
            mine.sort(key=lambda way: over_seeds(chosen[way])["whole"]["mean"])
            for way in {way: 0 for way in (OURS, *mine[:1], *scales.SMALL_WAYS) if way in chosen}:
                curves[f"{way}, nested"] = _curve(chosen[way], "nested ")
            title = "Perplexity from the whole model down to a quarter of its blocks"
            yield Figure("recipe", title, curves)


def by_start(points: Points) -> list[Ways]:
    """Points apart by their start and activation scales: chosen ones first, then most points."""
    starts: dict[tuple[bool, str], Ways] = {}
    names = [*WAYS, *(p["way"] for p in points)]
    for p in sorted(points, key=lambda p: names.index(p["way"])):
        ways = starts.setdefault(("treatment" in p, p["start"]), {})
        ways.setdefault(p["way"], {}).setdefault(p["rate"], []).append(p)
    counts = Counter(("treatment" in p, p["start"]) for p in points)
    return [starts[key] for key in sorted(starts, key=lambda k: (k[0], counts[k]), reverse=True)]


def choice_score(some: Points) -> float:
    """The geometric mean of all sizes on text that is not reported, first seed.

    Data parallel trains the whole model, and this alone chooses its rate: a rate that serves its
    tickets must not make it an easier opponent where the whole model counts.
    """
    point = min(some, key=lambda p: p["seed"])
    tried = point.get("choice") or point["test"]
    sizes = [] if point["way"] == DENSE.label else [k for k in tried if k != "whole"]
    return statistics.geometric_mean([tried["whole"], *(tried[k]["mean"] for k in sizes)])


def over_seeds(some: Points) -> Sizes:
    """Column -> mean and sd over seeds, with the activation scale of the first seed's tickets."""
    tests = [p["test"] for p in sorted(some, key=lambda p: p["seed"])]
    sizes = [k for k in tests[0] if k != "whole"]
    found: Sizes = {"whole": _spread([test["whole"] for test in tests])}
    for word, key, chosen in (("", "mean", "treatment"), ("nested ", "nested", "nested_treatment")):
        for k in sizes:
            cell = found[f"{word}{k}/{N}"] = _spread([test[k][key] for test in tests])
            if chosen in tests[0][k]:
                cell["treatment"] = tests[0][k][chosen]
    return found


def _spread(values: list[float]) -> dict[str, Any]:
    sd = {"sd": statistics.stdev(values)} if len(values) > 1 else {}
    return {"mean": statistics.fmean(values), **sd}


def gaps(ours: Points, other: Points) -> Iterator[str]:
    """How far ours is above the other in every column, over the seeds that both have."""
    seeds = {p["seed"] for p in ours} & {p["seed"] for p in other}
    a, b = (over_seeds([p for p in s if p["seed"] in seeds or not seeds]) for s in (ours, other))
    for column in a:
        yield f"{100 * (a[column]['mean'] / b[column]['mean'] - 1):+.1f}%"


def _curve(some: Points, word: str) -> Means:
    found = means(over_seeds(some))
    sizes = [name for name in found if name[0].isdigit()]
    return {N: found["whole"]} | {int(k.split("/")[0]): found[f"{word}{k}"] for k in sizes}
