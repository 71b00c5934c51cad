"""Finished points as tables, figures and claims: one function for each experiment of the paper.

A point comes flat here: the keys of its config and of its result in one dict.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

from twistlm.baselines import COMPARED, STRUCTURED
from twistlm.lab.compare.table import by_size, number

from . import printed, scales
from .scales import DENSE, DROPOUT, DROPOUT_NAME, OFTEN, OURS, SCALES, TWIN_NAME, TWIST, WAYS, N

Points = list[dict[str, Any]]
Sizes = dict[Any, dict[str, Any]]  # K of 12 blocks -> the point there
Means = dict[Any, float]  # K of 12 blocks -> perplexity
Line = tuple[Any, tuple[str, ...], Sizes]  # whom a row competes with (None: nobody), its labels

CHOSEN = {name for name in COMPARED if name.startswith(STRUCTURED)}  # blocks, after training
ZEROS = {*COMPARED} - CHOSEN
RANDOM, NESTED = "random blocks of ", "nested blocks of "  # before a parent's name
AT_SIZE = f"{RANDOM}TwIST trained at that size"  # one parent for each size, as in the paper
PAPER = {  # row of Table 1 -> the paper's column
    **{name: name for name in ("sparsegpt", "wanda", "zpruner")},
    "block:fisher": "block",
    f"{RANDOM}{DENSE.label}": "dense",
    AT_SIZE: "twist",
    f"{RANDOM}{TWIST.label}": "twist-6",
}
CLOSE = 0.05  # relative error of a formula, and growth of a perplexity, that still count as none
SHARP = 1.5  # ratio of perplexities that is a sharp degradation


class Table(NamedTuple):
    name: str
    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Figure(NamedTuple):
    name: str
    title: str
    data: dict[str, Means]  # by line


class Claim(NamedTuple):
    """A statement of the paper or ours, whether the points bear it out, and their numbers."""

    says: str
    holds: bool
    numbers: str


Shown = Iterator[Table | Figure | Claim]


def grouped(points: Points, key: str) -> dict[Any, Points]:
    return {value: [p for p in points if p[key] == value] for value in {p[key]: 0 for p in points}}


def means(sizes: Sizes) -> Means:
    return {k: point["mean"] for k, point in sizes.items()}


def best_of(rows: Iterable[Means]) -> Means:
    """The lowest perplexity at every size."""
    found: Means = {}
    for row in rows:
        found |= {k: min(value, found.get(k, value)) for k, value in row.items()}
    return found


def by_columns(
    name: str, title: str, heads: tuple[str, ...], lines: list[Line], columns: list[Any]
) -> Table:
    """Perplexities and tickets' scales; the lowest of a column, among its like, is bold."""
    rows = []
    for group, labels, found in lines:
        cells, tried = [], []
        for point, k in ((found.get(k, {}), k) for k in columns):
            mean, sd = point.get("mean"), point.get("sd")
            text = number(mean) + (f" ± {number(sd)}" if sd is not None else "")
            rivals = [other[k]["mean"] for like, _, other in lines if like == group and k in other]
            is_best = group is not None and len(rivals) > 1 and mean == min(rivals)
            cells.append(f"**{text}**" if is_best else text)
            tried += [point["treatment"]["chosen"]] if "treatment" in point else []
        rows.append((*labels, *cells, by_size(tried) if tried else ""))
    return Table(name, title, (*heads, *map(head, columns), "scale"), rows)


def sizes_of(points: Points) -> list[int]:
    return sorted({p["k"] for p in points}, reverse=True)


def head(k: Any) -> str:
    """How a column is called: a size, or by its name."""
    return "whole" if k == N else f"{k}/{N}" if isinstance(k, int) else k


def compared(
    says: str, ours: Means, other: Means, sizes: Callable[[Any], bool] = bool
) -> Iterator[Claim]:
    """Whether ours is lower at the sizes where it should be, and at no other below the whole."""
    if shared := [k for k in ours if k in other and k != N]:
        said = (f"{head(k)}: {number(ours[k])} against {number(other[k])}" for k in shared)
        yield Claim(says, all((ours[k] < other[k]) == sizes(k) for k in shared), ", ".join(said))


# ---------------------------------------------------------------- perplexities


def table1(points: Points) -> Shown:
    """Perplexity by size: the pruners, then random and nested blocks of every parent."""
    for setting, mine in grouped(points, "setting").items():
        rows, lines = table1_rows(mine), []
        for name, row in rows.items():
            # zeros and really smaller models do not compete
            lines.append((name in ZEROS, (name,), row))
            if name in PAPER and all(SCALES[p["scale"]].n_attn == N for p in mine):
                known = printed.TABLE1[setting].items()
                theirs = {k: {"mean": their[PAPER[name]]} for k, their in known}
                lines.append((None, ("the paper",), theirs))
        name, title = f"table1-{setting}", f"Table 1, {setting}: perplexity by size"
        yield by_columns(name, title, (setting,), lines, sizes_of(mine))
        found = {name: means(row) for name, row in rows.items()}
        found["best chosen blocks"] = best_of(found[n] for n in CHOSEN & found.keys())
        found["best zeros"] = best_of(found[n] for n in ZEROS & found.keys())
        yield Figure(name, title, {n: r for n, r in found.items() if r and n not in COMPARED})
        yield from table1_claims(f"{setting}: ", found)


def table1_rows(points: Points) -> dict[str, Sizes]:
    rows: dict[str, Sizes] = {name: {} for name in COMPARED}
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


def table1_claims(where: str, found: dict[str, Means]) -> Iterator[Claim]:
    names = [f"{RANDOM}{recipe.label}" for recipe in (DENSE, TWIST, DROPOUT)]
    dense, twist, dropout = (found.get(name, {}) for name in names)
    yield from compared(f"{where}TwIST K=6 beats data parallel", twist, dense)
    if sizes := sorted(k for k in dense if k in twist and k < N):
        low, high = sizes[0], sizes[-1]
        ours, other = (row[low] / row[high] for row in (twist, dense))
        said = f"{head(high)} to {head(low)}: {ours:.2f} times against {other:.2f} times"
        yield Claim(f"{where}TwIST K=6 is flatter than data parallel", ours < other, said)
    for name in (names[1], AT_SIZE):
        says = f"{where}sparsegpt is ahead at 6/12 and above, {name} at 4/12 and below"
        pair = (found.get(each, {}) for each in (name, "sparsegpt"))
        yield from compared(says, *pair, lambda k: k <= 4)
    says = f"{where}TwIST K=6 beats blocks of data parallel that a score chose"
    yield from compared(says, twist, found["best chosen blocks"])
    if N in dense and N in twist:
        said = f"{number(twist[N])} against {number(dense[N])}"
        yield Claim(f"{where}the whole TwIST K=6 is no worse", twist[N] <= dense[N], said)
    ours = best_of(r for n, r in found.items() if n.startswith(f"{RANDOM}TwIST") and n != AT_SIZE)
    yield from compared(f"{where}the best TwIST beats structured dropout", ours, dropout)


def stability(points: Points) -> Shown:
    """Mean and sd of the perplexity of random subnets."""
    lines: list[Line] = []
    for setting, mine in grouped(points, "setting").items():
        found = {name: {p["k"]: p for p in some} for name, some in grouped(mine, "parent").items()}
        lines += [(setting, (setting, parent), sizes) for parent, sizes in found.items()]
        twist, dense = (found.get(recipe.label, {}) for recipe in (TWIST, DENSE))
        if less := [dense[k]["sd"] / twist[k]["sd"] for k in twist if k in dense]:
            said = f"sd {min(less):.1f} to {max(less):.1f} times smaller"
            yield Claim(f"{setting}: TwIST varies less than data parallel", min(less) > 1, said)
    title = f"Stability: perplexity, mean ± sd over {points[0]['n']} random subnets"
    yield by_columns("stability", title, ("setting", "parent"), lines, sizes_of(points))


def robustness(points: Points) -> Shown:
    """Trained on X blocks (rows), evaluated on Y (columns)."""
    lines: list[Line] = []
    for setting, mine in grouped(points, "setting").items():
        maps: dict[int, Sizes] = {}
        for p in sorted(mine, key=lambda p: p["widths"]):
            maps.setdefault(p["widths"][0], {})[p["k"]] = p
        lines += [(setting, (setting, f"{x}/{N}"), sizes) for x, sizes in maps.items()]
        values = {x: means(sizes) for x, sizes in maps.items()}
        yield from robustness_claims(setting, values, len(sizes_of(points)))
    title = "Robustness: perplexity at sizes other than that of training"
    yield by_columns("robustness", title, ("setting", "trained on"), lines, sizes_of(points))


def robustness_claims(setting: str, maps: dict[int, Means], n_sizes: int) -> Iterator[Claim]:
    """The paper's three; `maps` is trained on -> evaluated on -> perplexity."""
    if {4, 10} <= maps.get(10, {}).keys():  # the paper's pair
        factor, known = maps[10][4] / maps[10][10], printed.ROBUSTNESS.get(setting)
        theirs = f" (the paper: {known:.2f})" if known else ""
        says = f"{setting}, downward: trained on 10, 4 blocks are {SHARP} times worse"
        yield Claim(says, factor >= SHARP, f"{factor:.2f} times{theirs}")
    if ups := [(r[y] / r[x], x, y) for x, r in maps.items() for y in r if x in r and y > x]:
        factor, x, y = max(ups)
        says = f"{setting}, upward: trained on few blocks, more are at most {CLOSE:.0%} worse"
        yield Claim(says, factor <= 1 + CLOSE, f"worst, {x} to {y}: {factor:.2f} times")
    worst = {x: max(row.values()) for x, row in maps.items() if len(row) == n_sizes}
    if worst and min(worst) <= 3 and max(worst) >= 10:
        best = min(worst, key=worst.__getitem__)
        said = ", ".join(f"{x}: {number(v)}" for x, v in worst.items())
        says = f"{setting}, sweet spot: a middle width in training has the lowest worst case"
        yield Claim(says, min(worst) < best < max(worst), f"{said}; lowest at {best}")


def nodeloss(points: Points) -> Shown:
    """Perplexity after the worst loss of nodes; how many times the whole model's is a claim."""
    found: dict[str, Sizes] = {}
    for p in points:
        mine = found.setdefault(p["parent"], {"none lost": {"mean": p["full"]}})
        mine[f"{p['lost']} of {p['nodes']} lost"] = p | {"mean": p["worst"]}
    cases = list(dict.fromkeys(case for sizes in found.values() for case in sizes))
    lines: list[Line] = [("", (parent,), sizes) for parent, sizes in found.items()]
    title = "Lost nodes: perplexity after the worst such loss"
    yield by_columns("nodeloss", title, ("parent",), lines, cases)
    twist, dense = (
        {case: p["worst"] / p["full"] for case, p in found.get(r.label, {}).items() if "full" in p}
        for r in (TWIST, DENSE)
    )
    yield from compared("TwIST is fewer times worse than data parallel", twist, dense)


def shift(points: Points) -> Shown:
    """||y'|| / ||y|| of a layer with K of N blocks, against sqrt(K/N) and the exact formula."""
    rows: list[tuple[str, ...]] = []
    for p in points:
        paper, exact = (
            statistics.fmean(abs(r[formula] / r["measured"] - 1) for r in p["rows"])
            for formula in ("paper", "exact")
        )
        rows.append((p["parent"], f"{paper:.1%}", f"{exact:.1%}"))
        says = f"a layer's norm shrinks by sqrt(K/N): {p['parent']}"
        yield Claim(says, paper < CLOSE, f"off by {paper:.1%}")
    head = ("model", "error of sqrt(K/N)", "error of the exact formula")
    title = "Activation shift: mean of |formula / measured - 1| over layers and K"
    yield Table("shift", title, head, rows)


# ---------------------------------------------------------------- what it costs


def table2(points: Points) -> Shown:
    """Memory, bytes and wall clock of a worker: measured, by the formula, and as printed."""
    measured = {(p["setting"], p["k"]): p for p in points if p["experiment"] == "latency"}
    for plan in (p for p in points if p["experiment"] == "table2"):
        rows, errors = [], []
        for row in plan["rows"]:
            setting = "both" if row["setting"] == "full" else row["setting"]
            k = int(row["ratio"].split("/")[0])
            gb, tb, clock = printed.TABLE2[setting].get(k, (None, None, ""))
            ours, carried = (row[f"{kind}_bytes"] / 1e12 for kind in ("paper", "carried"))
            errors += [] if tb is None else [abs(ours - tb)]
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
        says = "Table 2's communication is params x 4 bytes x 2 directions x 4 workers x rounds"
        said = f"{len(errors)} entries, largest difference {max(errors):.4f} TB"
        yield Claim(says, max(errors) < 0.0051, said)


def latency(points: Points) -> Shown:
    """Milliseconds of a worker's local step, beside what FLOPs alone would give."""
    whole, rows, faster = max(points, key=lambda p: p["k"]), [], {}
    for p in sorted(points, key=lambda p: (-p["k"], p["setting"])):
        k, setting, gain = p["k"], p["setting"], whole["ms"] / p["ms"]
        theirs, ideal = "", f"{whole['flops'] / p['flops']:.2f}x"
        if k == 4:
            faster[setting] = gain
            theirs = f"{printed.LATENCY['whole'] / printed.LATENCY[setting]:.2f}x"
        size = ("whole", "") if k == N else (f"{k}/{N}", setting)
        rows.append((*size, f"{p['ms']:.2f}", f"{gain:.2f}x", ideal, theirs))
    head = ("blocks", "setting", "ms per step", "faster", "ideal by FLOPs", "the paper")
    title = "Latency of a local step, batch {batch} of {seq_len} tokens".format(**whole)
    yield Table("latency", title, head, rows)
    if faster:
        order = sorted(faster, key=faster.__getitem__, reverse=True)
        said = ", ".join(f"{name} {faster[name]:.2f}x" for name in order)
        says = "4/12 blocks: both is fastest (1.46x), then attn (1.21x), then ffn (1.15x)"
        yield Claim(says, order == ["both", "attn", "ffn"], said)


def memory(points: Points) -> Shown:
    """What a subnet with half the blocks keeps of GPT-2 small to XL."""
    half = points[-1]["half"]
    kinds = list(next(iter(half.values())))
    rows = [(model, *(f"{shares[kind]:.1%}" for kind in kinds)) for model, shares in half.items()]
    title = "Share of the parameters in a subnet with half the blocks"
    yield Table("memory", title, ("model", *kinds), rows)
    falls = all(a[kind] > b[kind] for a, b in pairwise(half.values()) for kind in kinds)
    says = "the larger the model, the closer half the blocks come to 50% of its memory"
    yield Claim(says, falls, f"{rows[0][1]} to {rows[-1][1]}")


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
    """A row per way and rate; other starts, and tickets scaled otherwise, have their own tables."""
    for i, ways in enumerate(by_start(points)):
        chosen = {way: min(rates.values(), key=choice_score) for way, rates in ways.items()}
        one = next(iter(chosen.values()))[0]
        start, treatment = one["start"][:8], one.get("treatment", "sqrt(N/K) for all")
        where = f" (start {start}, scales: {treatment})" if i else ""
        name, columns = f"recipe-{i + 1}" if i else "recipe", list(over_seeds([one]))
        lines: list[Line] = []
        for way, some in ((way, some) for way, rates in ways.items() for some in rates.values()):
            counts = some == chosen[way]
            rate, sent = f"{some[0]['rate']:g}", f"{some[0]['bytes'] / 1e9:,.1f}"
            labels = (way, f"**{rate}**" if counts else rate, str(len(some)), sent)
            lines.append((True if counts else None, labels, over_seeds(some)))
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
    """Points apart by their start and scales of tickets: chosen ones first, then most points."""
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
    """Column -> mean and sd over seeds, with the scale of the first seed's tickets."""
    tests = [p["test"] for p in sorted(some, key=lambda p: p["seed"])]
    sizes = [k for k in tests[0] if k != "whole"]
    found: Sizes = {"whole": _spread([test["whole"] for test in tests])}
    for word, key, scale in (("", "mean", "treatment"), ("nested ", "nested", "nested_treatment")):
        for k in sizes:
            cell = found[f"{word}{k}/{N}"] = _spread([test[k][key] for test in tests])
            if scale in tests[0][k]:
                cell["treatment"] = tests[0][k][scale]
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
