"""Points of an experiment: one JSON file per config; a finished one is never run again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..system.files import whole_file
from ..system.provenance import describe_run


def name_of(config: dict[str, Any]) -> str:
    """Sixteen hex digits that follow from the config alone, whatever the order of its keys."""
    text = json.dumps(config, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def path_of(folder: Path, config: dict[str, Any]) -> Path:
    return folder / f"{name_of(config)}.json"


def point(
    folder: Path, config: dict[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The finished point of this config, measured now if it is not on disk yet.

    A point is {config, result, seconds, run}; `run` is the command, commit, versions and device that
    made it. It appears whole or not at all.
    """
    path = path_of(folder, config)
    if path.is_file():
        return read(path)
    began = time.perf_counter()
    result = measure()
    made = {
        "config": config,
        "result": result,
        "seconds": time.perf_counter() - began,
        "run": describe_run(),
    }
    whole_file(path, json.dumps(made, indent=1) + "\n")
    return made


def read(path: Path) -> dict[str, Any]:
    """A point on disk, refused when it is cut short or was renamed."""
    try:
        made = json.loads(path.read_text())
        right = name_of(made["config"]) == path.stem and "result" in made
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise ValueError(f"{path} is not a finished point: delete it, and it is measured again")
    return made


def all_in(folder: Path) -> list[dict[str, Any]]:
    """Every finished point of a folder, by file name."""
    return [read(path) for path in sorted(folder.glob("*.json"))]
