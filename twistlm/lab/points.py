"""Points of an experiment: one line of JSON for each, and a finished one is never measured again.

FILE.jsonl is only ever appended to, a whole line at a time: several processes may share it, an
interrupted one loses the point it was at, and `sort -u` merges two such files.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..system.manifest import parse_json, read_json
from ..system.provenance import describe_run
from ..system.terminal import clean

SUFFIX = ".jsonl"
METRICS = ".metrics.jsonl"
MOST_LOSS = 1e6  # nats per token: more than any model of ours can be wrong


@dataclass(frozen=True)
class Place:
    """Where a lab or a comparison keeps what it measures and trains."""

    folder: Path  # for everything that is not a line of a file
    points: Path

    @property
    def trainings(self) -> Path:
        """A line for every model that was trained here, with its metrics."""
        return self.points.with_suffix(METRICS)

    @property
    def old_points(self) -> tuple[Path, ...]:
        """Folders of one JSON file per point, as earlier versions wrote them: read, never written."""
        return self.folder / "points", self.folder / "compare" / "points"

    def exists(self) -> bool:
        return self.points.is_file() or any(folder.is_dir() for folder in self.old_points)


def place_of(path: Path) -> Place:
    """A folder keeps its points in points.jsonl; FILE.jsonl is the points, with FILE/ for the rest."""
    if path.suffix == SUFFIX:
        return Place(path.with_suffix(""), path)
    return Place(path, path / f"points{SUFFIX}")


def name_of(config: dict[str, Any]) -> str:
    """Sixteen hex digits that follow from the config alone, whatever the order of its keys."""
    text = json.dumps(config, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Points:
    """The finished points of a place, by their configs.

    A point is {config, result, seconds, run}; `run` is the command, commit, versions and device that
    made it, and what `about` says besides. What other processes append meanwhile is found as well.
    """

    def __init__(self, place: Place, about: Callable[[], dict[str, Any]] = dict):
        self.file, self._about = place.points, about
        self._end = 0  # bytes of the file that were read
        self._found: dict[str, dict[str, Any]] = {}  # by `name_of` the config
        for folder in place.old_points:
            for path in sorted(folder.glob("*.json")):
                self._found[path.stem] = _read_old(path)

    def find(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """The point of this config, if it is finished."""
        name = name_of(config)
        if name not in self._found:
            self._read_on()
        return self._found.get(name)

    def measure(
        self, config: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The point of this config, measured now if it is not finished yet."""
        if (found := self.find(config)) is not None:
            return found
        began = time.perf_counter()
        result = measure()
        made = {
            "config": config,
            "result": result,
            "seconds": time.perf_counter() - began,
            "run": describe_run() | self._about(),
        }
        append_line(self.file, made)
        return made

    def all(self) -> list[dict[str, Any]]:
        """Every finished point, in an order that follows from the configs alone."""
        self._read_on()
        return [self._found[name] for name in sorted(self._found)]

    def _read_on(self) -> None:
        """Read what was appended since the last time; of equal configs the first point counts."""
        if not self.file.is_file():
            return
        with self.file.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if (made := parse_line(line)) is not None:
                    if not _is_point(made):
                        shown = line[:60].decode(errors="replace").rstrip()
                        raise _not_finished(f"{self.file}: the line {shown}...")
                    self._found.setdefault(name_of(made["config"]), made)
                if line.endswith(b"\n"):
                    self._end += len(line)


def append_line(file: Path, record: dict[str, Any]) -> None:
    """Append a record as one line, in one write, so that no other process can write in between."""
    text = json.dumps(record) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            text = "\n" + text  # the last line was cut short: it must not spoil this one
        if os.write(handle, text.encode()) != len(text):
            raise OSError(f"{file} could not be written: is the disk full?")
    finally:
        os.close(handle)


def parse_line(line: bytes) -> Any:
    """The record of a line; None where it is empty, cut short or still being written."""
    try:
        return parse_json(line, "a point")
    except ValueError:
        return None


def _read_old(path: Path) -> dict[str, Any]:
    """A point in a file of its own, refused when it is cut short or was renamed."""
    made = parse_line(path.read_bytes())
    if not _is_point(made) or name_of(made["config"]) != path.stem:
        raise _not_finished(str(path))
    return made


def _is_point(made: Any) -> bool:
    return isinstance(made, dict) and isinstance(made.get("config"), dict) and "result" in made


def _not_finished(what: str) -> ValueError:
    return ValueError(f"{what} is not a finished point: delete it, and it is measured again")


@dataclass(frozen=True)
class Training:
    """One trained model, or one that is being trained."""

    name: str
    config: dict[str, Any]
    run: dict[str, Any]  # command, git, versions, device
    rows: list[dict[str, Any]]

    @property
    def n_rounds(self) -> int:
        """Rounds it is to have; 0 where they follow from epochs."""
        return int(self.config.get("train", {}).get("rounds", 0))


def read_training(folder: Path) -> Training:
    """A run folder; a last line that is still being written is left out."""
    record: dict[str, Any] = {}
    if (folder / "run.json").is_file():
        record = read_json(folder / "run.json")
    metrics = folder / "metrics.jsonl"
    rows = _lines(metrics) if metrics.is_file() else []
    for row in rows:
        loss = row.get("loss", 0.0)
        is_loss = isinstance(loss, int | float) and (0 <= loss <= MOST_LOSS or loss != loss)
        if not is_loss:  # NaN is one: it diverged
            raise ValueError(f"{metrics}, round {row.get('round')}: a loss of {loss!r:.20} is none")
        if not isinstance(n := row.get("n_tokens", 0), int):
            raise ValueError(f"{metrics}, round {row.get('round')}: {n!r:.20} tokens are none")
    return Training(clean(folder.name), record.pop("config", {}), record, rows)


def kept_trainings(file: Path) -> list[Training]:
    """The finished trainings that a lab keeps in one file, by name."""
    lines = _lines(file) if file.is_file() else []
    found = {line["name"]: Training(**line) for line in lines}
    return [found[name] for name in sorted(found)]


def keep_training(file: Path, training: Training) -> None:
    """Add a finished training to the file, unless it is there already."""
    if training.name not in {kept.name for kept in kept_trainings(file)}:
        append_line(file, asdict(training))


def _lines(file: Path) -> list[dict[str, Any]]:
    records = map(parse_line, file.read_bytes().splitlines())
    return [record for record in records if isinstance(record, dict)]
