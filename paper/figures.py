"""Figures with matplotlib: one look, one file for each."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .tables import Figure

DASHED = ("best zeros", "best chosen blocks", "sqrt(K/N)")


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("figures need matplotlib: pip install -e '.[plot]'")


def save(figure: Figure, path: Path) -> None:
    """Draw one figure as PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas  # no pyplot: it looks for a display

    look: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    with rc_context({**look, "legend.frameon": False, "text.parse_math": False}):
        canvas = Canvas(figsize=(7, 4.2), layout="constrained")
        axes = canvas.add_subplot()
        axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
        KINDS[figure.kind](axes, figure.data)
        if axes.get_legend_handles_labels()[0]:
            canvas.legend(loc="outside lower center", ncols=2, fontsize=8)
        canvas.savefig(path, dpi=150, metadata={"Software": None})


def lines(axes: Any, data: dict[str, dict[Any, float]]) -> None:
    """One line per series over its x values; more series than colours differ by their marks."""
    for i, (label, values) in enumerate(data.items()):
        xs = sorted(values)
        style = "--" if label in DASHED else "-"
        mark = "" if len(xs) > 50 else "os^Dv"[i // 10 % 5]
        axes.plot(xs, [values[x] for x in xs], style, marker=mark, markersize=4, label=label)
    axes.grid(axis="y", alpha=0.4)


def log_lines(axes: Any, data: dict[str, dict[Any, float]]) -> None:
    """Lines on a logarithmic axis that is labelled in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    lines(axes, data)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subs = (1, 1.2, 1.5, 2, 3, 4, 5, 7) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def bars(axes: Any, data: dict[str, dict[str, float]]) -> None:
    """Groups of bars, side by side."""
    for i, (label, step, place) in enumerate(_places(data)):
        at = [place + group for group, values in enumerate(data.values()) if label in values]
        heights = [values[label] for values in data.values() if label in values]
        axes.bar(at, heights, step * 0.9, color=f"C{i % 10}", label=label)
    axes.set_xticks(range(len(data)), list(data))


def violins(axes: Any, data: dict[str, dict[str, list[float]]]) -> None:
    """Groups of distributions, side by side, with the median marked."""
    for i, (label, step, place) in enumerate(_places(data)):
        for group, found in enumerate(data.values()):
            if len(values := found.get(label, [])) > 2 and max(values) > min(values):
                parts = axes.violinplot([values], [place + group], widths=step, showmedians=True)
                for body in (*parts.pop("bodies"), *parts.values()):
                    body.set_color(f"C{i % 10}")
        axes.plot([], [], color=f"C{i % 10}", linewidth=5, label=label)
    axes.set_xticks(range(len(data)), list(data))


def _places(data: dict[str, dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Every label of the groups with its width and its place beside a group's middle."""
    labels = list(dict.fromkeys(label for group in data.values() for label in group))
    step = 0.8 / max(1, len(labels))
    return [(label, step, (i - (len(labels) - 1) / 2) * step) for i, label in enumerate(labels)]


def heatmap(axes: Any, data: dict[str, dict[int, float]]) -> None:
    """Numbers on a logarithmic colour scale: bright is low."""
    columns = sorted({k for row in data.values() for k in row})
    values = [
        [math.log(row[k]) if k in row else math.nan for k in columns] for row in data.values()
    ]
    axes.imshow(values, cmap="viridis_r", aspect="auto")
    for i, row in enumerate(data.values()):
        for j, k in enumerate(columns):
            if k in row:
                axes.text(j, i, f"{row[k]:.1f}", ha="center", va="center", color="#d02090")
    axes.set_xticks(range(len(columns)), [str(k) for k in columns])
    axes.set_yticks(range(len(data)), list(data))


KINDS: dict[str, Callable[[Any, Any], None]] = {
    "lines": lines,
    "log-lines": log_lines,
    "bars": bars,
    "violins": violins,
    "heatmap": heatmap,
}
