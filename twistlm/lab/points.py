"""Points of an experiment: one line of JSON for each, and a finished one is never measured again.

FILE.jsonl is only ever appended to, a whole line at a time: several processes may share it, an
interrupted one loses the point it was at, and `sort -u` merges two such files. Every line ends in
a short hash of the rest, so that damage is found; lines of earlier versions have none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..system.manifest import parse_json, read_json
from ..system.provenance import describe_run
from ..system.terminal import clean

SUFFIX = ".jsonl"
METRICS = ".metrics.jsonl"
HASH = "sha256"  # the key of a line's own hash
POINT = ("config", "result", "seconds", "run")  # the keys of a point's line
MOST_LOSS = 1e6  # nats per token: more than any model of ours can be wrong


@dataclass(frozen=True)
class Place:
    """Where experiments or a comparison keep what they measure and train."""

    folder: Path  # for everything that is not a line of a file
    points: Path

    @property
    def trainings(self) -> Path:
        """A line for every model that was trained here, with its metrics."""
        return self.points.with_suffix(METRICS)

    def exists(self) -> bool:
        return self.points.is_file()


def place_of(path: Path) -> Place:
    """A folder keeps its points in points.jsonl; FILE.jsonl is the points, with FILE/ beside it."""
    if path.suffix == SUFFIX:
        return Place(path.with_suffix(""), path)
    return Place(path, path / f"points{SUFFIX}")


def name_of(config: dict[str, Any]) -> str:
    """Sixteen hex digits that follow from the config alone, whatever the order of its keys."""
    text = json.dumps(config, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Points:
    """The finished points of a place, by their configs.

    A point is {config, result, seconds, run}; `run` is the command, commit, versions and device
    that made it, and what `about` says besides. What other processes append is found as well.
    """

    def __init__(self, place: Place, about: Callable[[], dict[str, Any]] = dict):
        self.file, self._about = place.points, about
        self._end = 0  # bytes of the file that were read
        self._found: dict[str, dict[str, Any]] = {}  # by `name_of` the config

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
        made = {
            "config": config,
            "result": measure(),
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
        for end, made in read_lines(self.file, self._end, POINT):
            self._end = end
            if made is not None:
                self._found.setdefault(name_of(made["config"]), made)


def line_of(record: dict[str, Any]) -> str:
    """The record as a line, with its hash at the end."""
    return json.dumps({**record, HASH: _hash(record)}) + "\n"


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def append_line(file: Path, record: dict[str, Any]) -> None:
    """Append a record as one line, in one write, so that no other process writes in between."""
    text = line_of(record)
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


def read_lines(
    file: Path, start: int = 0, keys: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The records of a file from byte `start` on, each with the byte behind its line.

    A damaged line, or one with other keys, is named on stderr and is None; of a last line that is
    still being written nothing is said.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        lines.seek(start)
        end = start
        for line in lines:
            end += len(line)
            record, is_whole = _parse(line, keys), line.endswith(b"\n")
            if record is None and is_whole and line.strip():
                number = file.read_bytes()[:end].count(b"\n")
                said = f"{file}, line {number} is damaged and left out"
                print(clean(said), file=sys.stderr)
            if is_whole or record is not None:
                yield end if is_whole else end - len(line), record


def _parse(line: bytes, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """The record of a line; None where it is damaged."""
    try:
        record = parse_json(line, "a line")
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("config", {}), dict):
        return None
    said = record.pop(HASH, None)
    has_keys = not keys or set(record) == set(keys)
    return record if has_keys and said in (None, _hash(record)) else None


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
    file = folder / "run.json"
    record: dict[str, Any] = read_json(file) if file.is_file() else {}
    metrics = folder / "metrics.jsonl"
    rows = [row for _, row in read_lines(metrics) if row is not None]
    for row in rows:
        loss, where = row.get("loss", 0.0), f"{metrics}, round {row.get('round')}"
        # NaN is a loss: the run diverged
        if not isinstance(loss, int | float) or not (0 <= loss <= MOST_LOSS or loss != loss):
            raise ValueError(f"{where}: a loss of {loss!r:.20} is none")
        if not isinstance(n := row.get("n_tokens", 0), int):
            raise ValueError(f"{where}: {n!r:.20} tokens are none")
    return Training(clean(folder.name), record.pop("config", {}), record, rows)


def kept_trainings(file: Path) -> list[Training]:
    """The finished trainings that are kept in one file, by name."""
    lines = read_lines(file, keys=("name", "config", "run", "rows"))
    found = {line["name"]: Training(**line) for _, line in lines if line}
    return [found[name] for name in sorted(found)]


def keep_training(file: Path, training: Training) -> None:
    """Add a finished training to the file, unless it is there already."""
    if training.name not in {kept.name for kept in kept_trainings(file)}:
        append_line(file, asdict(training))
