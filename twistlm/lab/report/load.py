"""Read what is on disk: labs, comparisons and run folders, finished or still running."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import points


@dataclass(frozen=True)
class Training:
    """A run folder: its config, what made it, and a row per finished round."""

    name: str
    config: dict[str, Any]
    run: dict[str, Any]  # command, git, versions, device
    rows: list[dict[str, Any]]

    @property
    def n_rounds(self) -> int:
        """Rounds it is to have; 0 where they follow from epochs."""
        return int(self.config.get("train", {}).get("rounds", 0))


@dataclass(frozen=True)
class Source:
    """One folder of the command line."""

    name: str
    points: list[dict[str, Any]] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    comparison: dict[str, Any] | None = None  # compare.json


def load(folders: Sequence[Path]) -> list[Source]:
    """Every lab and comparison as a source of its own, all plain runs together as one more."""
    labs: list[Source] = []
    runs: list[Training] = []
    for folder in folders:
        if (folder / "compare.json").is_file():
            record = json.loads((folder / "compare.json").read_text())
            labs.append(Source(folder.name, comparison=record))
        elif (folder / "points").is_dir() or (folder / "parents").is_dir():
            found = [training(p.parent) for p in sorted((folder / "parents").glob("*/run.json"))]
            labs.append(Source(folder.name, _points(folder / "points"), found))
        elif (folder / "run.json").is_file() or (folder / "metrics.jsonl").is_file():
            runs.append(training(folder))
        elif below := sorted(folder.glob("*/run.json")):  # as `twistlm demo` leaves them
            runs += [training(path.parent) for path in below]
        else:
            raise ValueError(
                f"{folder} holds nothing to report: give folders of `twistlm experiment` (with points/), of "
                "`twistlm compare` (with compare.json) or of `twistlm train` (with run.json, here or one below)"
            )
    return labs + ([Source("runs", [], runs)] if runs else [])


def training(folder: Path) -> Training:
    """A run folder; a last line that is still being written is left out."""
    record: dict[str, Any] = {}
    if (folder / "run.json").is_file():
        record = json.loads((folder / "run.json").read_text())
    rows = []
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return Training(folder.name, record.pop("config", {}), record, rows)


def _points(folder: Path) -> list[dict[str, Any]]:
    """Points of experiments. Of parents with one name the one with most points keeps it."""
    found = [p for p in points.all_in(folder) if "experiment" in p["config"]]
    hashes: dict[str, Counter[str]] = {}
    for point in found:
        config = point["config"]
        if "parent_hash" in config:
            hashes.setdefault(config["slug"], Counter())[config["parent_hash"]] += 1
    for point in found:
        config = point["config"]
        first = hashes.get(config.get("slug", ""), Counter({"": 0})).most_common(1)[0][0]
        if config.get("parent_hash", first) != first:
            config["parent"] += f" [{config['parent_hash'][:4]}]"
    return sorted(found, key=lambda point: _place(point["config"]))


def _place(config: dict[str, Any]) -> tuple:
    """The order of rows and colours on the page, whatever the files are called."""
    settings, methods = ("both", "attn", "ffn"), ("init", "start", "dense", "dropout", "twist")
    method, _, rest = config.get("slug", "").partition("-")
    width = re.match(r"\d+", rest)
    return (
        config["experiment"],
        settings.index(config["setting"]) if "setting" in config else 0,
        methods.index(method) if method in methods else len(methods),
        "outer" in rest,
        int(width[0]) if width else 99,
        rest,
        config.get("nodes", 0),
        config.get("lost", 0),
        -config.get("k", 0),
        config.get("method", ""),
    )
