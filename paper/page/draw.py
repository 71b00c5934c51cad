"""Figures with matplotlib: one look, and SVG whose colours follow the page's light or dark theme."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .section import Figure

WIDTH = 5.0  # inches: a phone shows it at about its own size
INK, MUTED, GRID = "#1b1f24", "#667080", "#d8dde4"
# each colour is a CSS variable of the page; light values here, dark ones in html.py
SERIES = (
    "#5b6573",
    "#c77700",
    "#1f6feb",
    "#0a8f6b",
    "#8a3ffc",
    "#d1345b",
    "#0b7285",
    "#7a5c00",
    "#a8478f",
)
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    colour: f"--c{i}" for i, colour in enumerate(SERIES)
}


LOOK: dict[Any, Any] = {  # matplotlib's settings
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a run may be called $\\frac$
}


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a report needs matplotlib: pip install 'twistlm[plot]'")


def render(figure: Figure) -> Any:
    """The figure as matplotlib's object, light on white."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas  # no pyplot: it looks for a display

    with rc_context({**LOOK, "svg.hashsalt": figure.id}):
        canvas = Canvas(figsize=(WIDTH, figure.height), layout="constrained")
        figure.draw(canvas.add_subplot())
        text = io.StringIO()
        canvas.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        canvas.set_facecolor("white")
    return canvas, text.getvalue()


def inline(svg: str, label: str) -> str:
    """An SVG element for a page: no header, its colours as variables, a name for screen readers."""
    svg = svg[svg.index("<svg") :]
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height|xmlns|xmlns:xlink|version)="[^"]*"', "", head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.S)
    rest = rest.replace("xlink:href", "href").replace("'DejaVu Sans'", "var(--font)")
    rest = re.sub(r"<style.*?</style>", "", rest, flags=re.S)  # the page has one for all
    for colour, name in VARIABLES.items():
        rest = rest.replace(colour, f"var({name})")
    return f'{head} role="img" aria-label="{label}">{rest}'


def save(canvas: Any, stem: Path) -> None:
    """STEM.png and STEM.svg, light on white."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": stem.name}):  # the same figure is the same file
        for suffix, more in ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}})):
            canvas.savefig(stem.with_suffix(suffix), facecolor="white", **more)


KNOWN = {  # parents have one colour on the whole page, by label and by folder
    **{"data parallel": 0, "structured dropout K=6": 1, "TwIST K=6": 2, "start": 8, "init": 7},
    **{"TwIST, fresh masks and teacher": 3, "TwIST, fresh masks and teacher, nested": 4},
    **{"dense": 0, "dropout-6": 1, "twist-6": 2, "twist-fresh": 3},
    **{"best zeros": 5, "best chosen blocks": 7, "sqrt(K/N)": 5},
}


def colour(label: str, labels: Sequence[str]) -> str:
    """A parent's own colour; of other labels by their place among themselves."""
    if label in KNOWN:
        return SERIES[KNOWN[label]]
    others = [other for other in labels if other not in KNOWN]
    return SERIES[(others.index(label) + 5 * (len(others) < len(labels))) % len(SERIES)]


def legend(axes: Any, columns: int = 2) -> None:
    """Below the axes, as beside them a phone has no room; long names in smaller letters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    where = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": columns}
    renderer, room = FigureCanvasAgg(axes.figure).get_renderer(), 0.95 * axes.figure.bbox.width
    for size in (LOOK["legend.fontsize"], 8.5, 7.5):
        shown = axes.legend(**where, handlelength=1.4, columnspacing=1.4, fontsize=size)
        if shown.get_window_extent(renderer).width <= room:
            break


@dataclass(frozen=True, kw_only=True)
class LineStyle:
    """How `lines` draws its series.

    On a logarithmic axis the band goes a factor of 1 + sd / mean both ways: it never reaches zero.
    """

    sd: Mapping[str, Mapping[Any, float]] = field(default_factory=dict)  # a band of ± sd
    log: bool = False
    dashed: Sequence[str] = ()  # labels
    marks: bool = True  # a dot at every value of a solid line


PLAIN = LineStyle()


def lines(
    axes: Any,
    series: Mapping[str, Mapping[Any, float]],
    *,
    x: str,
    y: str,
    style: LineStyle = PLAIN,
) -> None:
    """One line per series over its x values."""
    dashed, log = style.dashed, style.log
    for label, values in series.items():
        xs = sorted(values)
        ys = [values[i] for i in xs]
        peers = list(series)
        # too many for a colour each: dashed and solid ones count apart
        if len(peers) > len(SERIES):
            peers = [other for other in peers if (other in dashed) == (label in dashed)]
        shade = colour(label, peers)
        axes.plot(
            xs,
            ys,
            label=label,
            color=shade,
            linestyle="--" if label in dashed else "-",
            marker="o" if style.marks and label not in dashed else "",
            markersize=3.5,
        )
        if label in style.sd:
            high = [values[i] + style.sd[label].get(i, 0) for i in xs]
            low = [v * v / h if log else 2 * v - h for v, h in zip(ys, high, strict=True)]
            axes.fill_between(xs, low, high, color=shade, alpha=0.18, linewidth=0)
    if log:
        _log(axes)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(axis="y", linewidth=0.6)
    legend(axes)


def ladder(axes: Any, series: Mapping[str, Mapping[int, float]], *, ours: str, x: str) -> None:
    """Perplexity from the whole model (left) to the smallest (right); every line ends in its name and value.

    Series whose name starts with `ours` are in colour, nested ones thicker; the rest is grey.
    """
    sizes = sorted({k for values in series.values() for k in values}, reverse=True)
    ends: list[tuple[float, str, str, str]] = []  # value, text, colour, weight of the name
    for label, values in series.items():
        mine, nested = label.startswith(ours), "nested" in label
        shade, width = SERIES[5 if mine else 0], 2.4 if nested else 1.5
        ys = [values[k] for k in sizes]
        dashes = "--" if mine and not nested else "-"
        axes.plot(ys, dashes, color=shade, linewidth=width, marker="o", markersize=3.5)
        ends.append((ys[-1], f"{label} {ys[-1]:.1f}", shade, "bold" if nested else "normal"))
    _log(axes)
    low, high = map(math.log, axes.get_ylim())
    at, gap = -math.inf, (high - low) / 17  # a line of text
    for value, text, shade, weight in sorted(ends):
        at = max(at + gap, math.log(value))
        where = (len(sizes) - 0.9, math.exp(at))
        axes.text(*where, text, color=shade, weight=weight, va="center", fontsize=9)
    axes.set_xlim(-0.15, len(sizes) + 1.5)  # room for the names
    axes.set_xticks(range(len(sizes)), ["whole", *(f"{k}/{sizes[0]}" for k in sizes[1:])])
    axes.set(ylabel="perplexity")
    axes.set_xlabel(x, loc="left")
    axes.grid(axis="y", linewidth=0.6)


def _log(axes: Any) -> None:
    """A logarithmic y axis that is labelled in plain numbers, over less than a decade and over many."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    n_decades = math.log10(high / low)
    # labels within a decade, by how many decades have to share the axis
    steps: dict[float, tuple[float, ...]] = {
        0.6: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
        1.5: (1, 1.5, 2, 3, 5, 7),
        3: (1, 2, 5),
    }
    subs = next((subs for most, subs in steps.items() if n_decades < most), (1,))
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def violins(axes: Any, groups: Mapping[str, Mapping[str, Sequence[float]]], *, y: str) -> None:
    """group (a size) -> label -> values: violins side by side, with the median marked."""
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    step = 0.8 / max(1, len(labels))
    for i, group in enumerate(groups.values()):
        for label, values in group.items():
            at = i + (labels.index(label) - (len(labels) - 1) / 2) * step
            shade = colour(label, labels)
            if len(values) > 2 and max(values) > min(values):
                parts = axes.violinplot([list(values)], [at], widths=step * 0.95, showextrema=False)
                for body in parts["bodies"]:
                    body.set(facecolor=shade, edgecolor=shade, alpha=0.55, linewidth=0.8)
            middle = sorted(values)[len(values) // 2]
            axes.plot([at - step / 3, at + step / 3], [middle] * 2, color=shade, linewidth=1.6)
    for label in labels:
        axes.plot([], [], color=colour(label, labels), linewidth=5, alpha=0.7, label=label)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(ylabel=y)
    axes.grid(axis="y", linewidth=0.6)
    legend(axes)


def heatmap(
    axes: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    x: str,
    y: str,
) -> None:
    """Numbers on a logarithmic colour scale: bright is low."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    known = [math.log(v) for row in values for v in row if v is not None]
    low, high = min(known), max(known)
    shades = colormaps["viridis_r"]
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is None:
                continue
            share = (math.log(value) - low) / (high - low) if high > low else 0.0
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=shades(share), linewidth=0))
            ink = "#000000" if share < 0.55 else "#ffffff"
            shown = f"{value:.1f}" if value < 1000 else f"{value:.0f}"
            axes.text(j, i, shown, ha="center", va="center", color=ink, fontsize=9.5)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=x, ylabel=y)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def bars(
    axes: Any,
    groups: Mapping[str, Mapping[str, float]],
    *,
    y: str,
    ideal: Mapping[str, Mapping[str, float]] | None = None,
    base: float | None = None,
) -> None:
    """group -> label -> height, side by side; `ideal` is a tick across each bar, `base` a line."""
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    step = 0.8 / max(1, len(labels))
    for i, (name, group) in enumerate(groups.items()):
        for label, value in group.items():
            at = i + (labels.index(label) - (len(labels) - 1) / 2) * step
            axes.bar(at, value, step * 0.9, color=colour(label, labels), alpha=0.85)
            goal = (ideal or {}).get(name, {}).get(label)
            if goal is not None:
                axes.plot([at - step / 2, at + step / 2], [goal] * 2, color=INK, linewidth=1.6)
    if base is not None:
        axes.axhline(base, color=MUTED, linewidth=0.9, linestyle=":")
    for label in labels if len(labels) > 1 else []:
        axes.bar(0, 0, color=colour(label, labels), alpha=0.85, label=label)
    if ideal:
        axes.plot([], [], color=INK, linewidth=1.6, label="ideal by FLOPs")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(ylabel=y)
    axes.grid(axis="y", linewidth=0.6)
    if ideal or len(labels) > 1:
        legend(axes)
