"""Points and run folders in; Markdown tables, claims and figures out."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twistlm.lab.points import METRICS, Points, Training, kept_trainings, place_of, read_training
from twistlm.system.files import whole_file
from twistlm.system.terminal import markdown_code, markdown_text

from . import figures, tables
from .recipe_tables import recipe
from .scales import SCALES
from .tables import Figure, Section, Table, count, number

CURVE = 150  # points of a curve that are drawn


@dataclass(frozen=True)
class Source:
    """A folder of experiments, or all plain runs together."""

    name: str
    points: list[dict[str, Any]] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)


def load(paths: Sequence[Path]) -> list[Source]:
    """Every folder of experiments by itself, all plain runs together."""
    found: list[Source] = []
    runs: list[Training] = []
    for path in paths:
        if path.name.endswith(METRICS):  # belongs to the points beside it
            continue
        if (source := _experiments(path)) is not None:
            found.append(source)
        elif (path / "run.json").is_file() or (path / "metrics.jsonl").is_file():
            runs.append(read_training(path))
        elif below := sorted(path.glob("*/run.json")):  # as `twistlm demo` leaves them
            runs += [read_training(file.parent) for file in below]
        else:
            raise ValueError(
                f"{path} holds nothing to report: give folders of `python -m paper NAME` (with "
                "points.jsonl) or of `twistlm train` (with run.json, here or one below), or such "
                "a .jsonl file"
            )
    return found + ([Source("runs", [], runs)] if runs else [])


def _experiments(path: Path) -> Source | None:
    place = place_of(path)
    trained = {training.name: training for training in kept_trainings(place.trainings)}
    for file in (place.folder / "parents").glob("*/run.json"):  # running ones too
        trained[file.parent.name] = read_training(file.parent)
    points = [point for point in Points(place).all() if "experiment" in point["config"]]
    if not points and not trained:
        return None
    points = sorted(_named_apart(points), key=lambda point: _order(point["config"]))
    return Source(place.folder.name, points, [trained[name] for name in sorted(trained)])


def _named_apart(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of parents with one name that with most points keeps it; others get their hash."""
    counts = Counter(
        (p["config"]["slug"], p["config"]["parent_hash"])
        for p in points
        if "parent_hash" in p["config"]
    )
    first: dict[str, str] = {}
    for (slug, parent_hash), _ in counts.most_common():
        first.setdefault(slug, parent_hash)

    def named(about: dict[str, Any]) -> dict[str, Any]:
        if "parent_hash" not in about or about["parent_hash"] == first[about["slug"]]:
            return about
        return about | {"parent": f"{about['parent']} [{about['parent_hash'][:4]}]"}

    return [point | {"config": named(point["config"])} for point in points]


def _order(about: dict[str, Any]) -> tuple:
    """The order of rows, whatever the order of the points."""
    settings, methods = ("both", "attn", "ffn"), ("init", "start", "dense", "dropout", "twist")
    method, _, rest = about.get("slug", "").partition("-")
    width = re.match(r"\d+", rest)
    return (
        about["experiment"],
        settings.index(about["setting"]) if "setting" in about else 0,
        methods.index(method) if method in methods else len(methods),
        int(width[0]) if width else 99,
        rest,
        about.get("nodes", 0),
        about.get("lost", 0),
        -about.get("k", 0),
        about.get("method", ""),
    )


# ---------------------------------------------------------------- sections


def sections(source: Source) -> dict[str, Section]:
    """All that a source has points or rounds for, by experiment."""
    found: dict[str, Section] = {}
    for name, show in {"recipe": recipe, **tables.SHOWN}.items():
        wanted = {name, "latency"} if name == "table2" else {name}
        if mine := [p for p in source.points if p["config"]["experiment"] in wanted]:
            found[name] = show(mine)
    found["training"] = training([t for t in source.trainings if t.rows])
    found = {name: section for name, section in found.items() if section.tables}
    if not found:
        raise ValueError(f"{source.name} has no finished point and no finished round yet")
    return found


def training(runs: list[Training]) -> Section:
    """What runs did so far: a run that is still going shows how far it is."""
    rows = []
    losses: dict[str, dict[float, float]] = {}
    scores: dict[str, dict[float, float]] = {}
    for run in runs:
        last, n_planned = run.rows[-1], run.n_rounds
        tokens = sum(row["n_tokens"] for row in run.rows)
        seconds = sum(row["seconds"] for row in run.rows)
        moved = statistics.median(row["bytes_down"] + row["bytes_up"] for row in run.rows) / 1e6
        rows.append(
            (
                run.name,
                f"{last['round']}" + (f" of {n_planned}" if n_planned else ""),
                count(tokens),
                f"{seconds:,.1f}",
                f"{tokens / seconds:,.0f}",
                number(last["loss"], 3),
                number(moved, 1),
            )
        )
        losses[run.name] = _loss_curve(run)
        for row in run.rows:
            for size, found in row.get("eval", {}).items():
                value = found if size == "full" else found["mean"]
                scores.setdefault(f"{run.name} {size}", {})[row["round"]] = value
    if not rows:
        return Section()
    head = "run, rounds, tokens, seconds, tokens/s, last loss, MB per round"
    title = "Training (with a teacher, the loss is mostly the distance to it)"
    shown = Section([Table("training", title, tuple(head.split(", ")), tuple(rows))])
    title = "Training loss"
    shown.figures.append(Figure("training", title, "lines", losses, "million tokens", "loss"))
    if scores:
        title = "Perplexity while training"
        shown.figures.append(Figure("training-eval", title, "log-lines", scores, "round"))
    return shown


def _loss_curve(run: Training) -> dict[float, float]:
    """The mean loss of neighbouring rounds over million tokens."""
    chunk = max(1, len(run.rows) // CURVE)
    tokens, curve = 0, {}
    for first in range(0, len(run.rows), chunk):
        part = run.rows[first : first + chunk]
        tokens += sum(row["n_tokens"] for row in part)
        curve[tokens / 1e6] = statistics.fmean(row["loss"] for row in part)
    return curve


# ---------------------------------------------------------------- the page


def report(paths: Sequence[Path], out: Path | None = None) -> str:
    """The page as Markdown; with `out`, it is OUT/tables.md beside a PNG of every figure."""
    found = [(source, sections(source)) for source in load(paths)]
    page = "\n".join(_chapter(source, shown, bool(out)) for source, shown in found)
    if out:
        figures.need_matplotlib()
        out.mkdir(parents=True, exist_ok=True)
        for source, shown in found:
            for figure in (figure for section in shown.values() for figure in section.figures):
                figures.save(figure, out / _file(source, figure))
        whole_file(out / "tables.md", page)
    return page


def _file(source: Source, figure: Figure) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-") or "runs"
    return f"{plain}-{figure.name}.png"


def _chapter(source: Source, shown: dict[str, Section], has_figures: bool) -> str:
    scales = dict.fromkeys(p["config"]["scale"] for p in source.points)
    titles = "; ".join(SCALES[scale].title for scale in scales)
    parts = [f"# {markdown_text(source.name)}" + (f": {titles}" if titles else ""), ""]
    parts += [*_made_by(source), ""]
    for section in shown.values():
        for each in section.tables:
            parts += [f"## {each.name}", "", markdown_text(each.title), "", each.markdown(), ""]
        for figure in section.figures if has_figures else ():
            parts += [f"![{markdown_text(figure.title)}]({_file(source, figure)})", ""]
    if claims := [claim for section in shown.values() for claim in section.claims]:
        rows = [(c.claim, c.whose, "yes" if c.holds else "**no**", c.numbers) for c in claims]
        head = ("claim", "whose", "holds", "numbers")
        parts += ["## claims", "", Table("claims", "", head, tuple(rows)).markdown(), ""]
    return "\n".join(parts)


def _made_by(source: Source) -> Iterator[str]:
    """The devices, commits and commands behind the numbers."""
    runs = [t.run for t in source.trainings] + [p["run"] for p in source.points]
    for key in ("device", "git", "command"):
        found = sorted({str(run[key]) for run in runs if run.get(key)})
        more = f", and {len(found) - 8} more" if len(found) > 8 else ""
        yield f"- {key}: {', '.join(map(markdown_code, found[:8]))}{more}"
