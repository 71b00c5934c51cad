"""Points in; Markdown tables and figures out."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twistlm.lab.points import Points
from twistlm.system.files import whole_file
from twistlm.system.terminal import markdown_table, markdown_text

from . import NAMES, tables
from .scales import SCALES, N
from .tables import Figure, Shown, Table


def load(paths: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The points of every folder or file, in the order of rows."""
    found, names = {}, Counter(Points(path).folder.name for path in paths)
    for path in paths:
        file = Points(path)
        points = [p for p in file.all() if "experiment" in p["config"]]
        if not points:
            raise ValueError(
                f"{path} holds nothing to report: give folders of `python -m paper NAME` (with "
                "points.jsonl), or such a .jsonl file"
            )
        flat = [{**point["config"], **point["result"]} for point in points]
        hashes = {(p.get("slug"), p.get("parent_hash")) for p in flat}
        for p in flat:  # parents of one name that follow from other things are told apart
            if sum(slug == p.get("slug") for slug, _ in hashes) > 1:
                p["parent"] += f" [{p['parent_hash'][:4]}]"
        name = file.folder.name if names[file.folder.name] == 1 else str(path)
        found[name] = sorted(flat, key=_order)
    return found


def _order(p: dict[str, Any]) -> tuple:
    """The order of rows: by setting, training, its width, lost nodes, size and pruner."""
    setting = p.get("setting", "both")
    training, _, width = p.get("slug", "").removesuffix(f"-{setting}").partition("-")
    return (
        ("both", "attn", "ffn").index(setting),
        ("", "init", "start", "dense", "dropout", "twist").index(training),
        int(width) if width.isdigit() else N + 1,  # fresh masks come last
        *(p.get("nodes", 0), p.get("lost", 0)),
        -p.get("k", 0),
        p.get("method", ""),
    )


def shown(points: list[dict[str, Any]]) -> Shown:
    """All that there are points for: of every experiment by the function of its name."""
    for name in NAMES:
        wanted = {name, "latency"} if name == "table2" else {name}
        if mine := [p for p in points if p["experiment"] in wanted]:
            yield from getattr(tables, name)(mine)


def report(paths: Sequence[Path], out: Path | None = None) -> str:
    """The page as Markdown; with `out`, it is OUT/tables.md beside a PNG of every figure."""
    page = "\n".join(_chapter(name, points, out) for name, points in load(paths).items())
    if out:
        whole_file(out / "tables.md", page)
    return page


def _chapter(name: str, points: list[dict[str, Any]], out: Path | None) -> str:
    titles = "; ".join(SCALES[scale].title for scale in {p["scale"]: 0 for p in points})
    parts = [f"# {markdown_text(name)}: {titles}"]
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    for each in shown(points):
        if isinstance(each, Table):
            parts += [f"## {each.name}", markdown_text(each.title)]
            parts.append(markdown_table([each.head, *each.rows]))
        elif out:
            save(each, out / f"{plain}-{each.name}.png")
            parts.append(f"![{markdown_text(each.title)}]({plain}-{each.name}.png)")
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- figures, with matplotlib

DASHED = ("best zeros", "best chosen blocks")


def save(figure: Figure, path: Path) -> None:
    """Draw one figure as PNG: a line per series."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas  # no pyplot: it looks for a display
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -e '.[plot]'") from None

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"text.parse_math": False}):
        canvas = Canvas(figsize=(7, 4.2), layout="constrained")
        axes = canvas.add_subplot()
        axes.set(title=figure.title, xlabel="blocks kept of 12", ylabel="perplexity")
        for i, (label, values) in enumerate(figure.data.items()):
            xs, style = sorted(values), "--" if label in DASHED else "-"
            # more lines than colours differ by their marks
            mark = {"marker": "os^Dv"[i // 10 % 5], "markersize": 4}
            axes.plot(xs, [values[x] for x in xs], style, label=label, **mark)
        axes.grid(axis="y", which="both", alpha=0.4)
        axes.set_yscale("log")
        for show in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            show("{x:,.10g}")  # not as powers of ten
        canvas.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        canvas.savefig(path, dpi=150, metadata={"Software": None})
