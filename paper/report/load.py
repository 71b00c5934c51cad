"""Read what is on disk: labs, comparisons and run folders, finished or still running."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twistlm.lab.points import METRICS, Points, Training, kept_trainings, place_of, read_training
from twistlm.system.manifest import read_json


@dataclass(frozen=True)
class Source:
    """One chapter of the page: a lab, a comparison, or all plain runs together."""

    name: str
    points: list[dict[str, Any]] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    comparison: dict[str, Any] | None = None  # compare.json


def load(paths: Sequence[Path]) -> list[Source]:
    """Every lab and comparison as a source of its own, all plain runs together as one more."""
    labs: list[Source] = []
    runs: list[Training] = []
    for path in paths:
        if path.name.endswith(
            METRICS
        ):  # belongs to the points beside it: paper/points/*.jsonl names both
            continue
        if path.suffix == ".json" and path.is_file():
            if not isinstance(record := read_json(path), dict) or "rows" not in record:
                raise ValueError(f"{path} is no table of `twistlm compare` (compare.json)")
            labs.append(Source(path.stem, comparison=record))
        elif found := [*_lab(path), *_comparison(path)]:
            labs += found
        elif (path / "run.json").is_file() or (path / "metrics.jsonl").is_file():
            runs.append(read_training(path))
        elif below := sorted(path.glob("*/run.json")):  # as `twistlm demo` leaves them
            runs += [read_training(file.parent) for file in below]
        else:
            raise ValueError(
                f"{path} holds nothing to report: give folders of `twistlm experiment` (with points.jsonl), "
                "of `twistlm compare` (with compare.json) or of `twistlm train` (with run.json, here or one "
                "below), or such a .jsonl or .json file itself"
            )
    return labs + ([Source("runs", [], runs)] if runs else [])


def _lab(path: Path) -> list[Source]:
    """The points and parents of `twistlm experiment`, where there are any."""
    place = place_of(path)
    trained = {training.name: training for training in kept_trainings(place.trainings)}
    for file in (place.folder / "parents").glob("*/run.json"):  # running ones too
        trained[file.parent.name] = read_training(file.parent)
    found = _named_apart([p for p in Points(place).all() if "experiment" in p["config"]])
    if not found and not trained:
        return []
    points = sorted(found, key=lambda point: _order(point["config"]))
    return [Source(place.folder.name, points, [trained[name] for name in sorted(trained)])]


def _comparison(path: Path) -> list[Source]:
    """The table of `twistlm compare`, where there is one."""
    file = place_of(path).folder / "compare.json"
    if not file.is_file():
        return []
    return [Source(file.parent.name, comparison=read_json(file))]


def _named_apart(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of different parents with one name the one with most points keeps it; others get their hash."""
    hashes: dict[str, Counter[str]] = {}
    for point in points:
        config = point["config"]
        if "parent_hash" in config:
            hashes.setdefault(config["slug"], Counter())[config["parent_hash"]] += 1
    first = {slug: counts.most_common(1)[0][0] for slug, counts in hashes.items()}

    def named(config: dict[str, Any]) -> dict[str, Any]:
        if "parent_hash" not in config or config["parent_hash"] == first[config["slug"]]:
            return config
        return config | {"parent": f"{config['parent']} [{config['parent_hash'][:4]}]"}

    return [point | {"config": named(point["config"])} for point in points]


def _order(config: dict[str, Any]) -> tuple:
    """The order of rows and colours on the page, whatever the order of the points."""
    settings, methods = ("both", "attn", "ffn"), ("init", "start", "dense", "dropout", "twist")
    method, _, rest = config.get("slug", "").partition("-")
    width = re.match(r"\d+", rest)
    return (
        config["experiment"],
        settings.index(config["setting"]) if "setting" in config else 0,
        methods.index(method) if method in methods else len(methods),
        int(width[0]) if width else 99,
        rest,
        config.get("nodes", 0),
        config.get("lost", 0),
        -config.get("k", 0),
        config.get("method", ""),
    )
