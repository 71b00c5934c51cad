"""Points of an experiment: one line of JSON for each, and a finished one is never measured again.

FILE.jsonl is only ever appended to, a whole line at a time: several processes may share it, an
interrupted one loses the point it was at, and `sort -u` merges two such files. Every line ends in
a short hash of the rest, so that damage is found; lines of earlier versions have none.
"""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..system.manifest import parse_json
from ..system.provenance import describe_run
from ..system.terminal import clean

HASH = "sha256"  # the key of a line's own hash
Record = dict[str, Any]


def name_of(record: Mapping[str, Any]) -> str:
    """Sixteen hex digits that follow from a record alone, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


class Points:
    """The finished points of a folder, in its points.jsonl, or of a FILE.jsonl with FILE/ beside.

    A point is {config, result, seconds, run}; `run` is the command, commit, versions and device
    that made it. What other processes append is found as well.
    """

    def __init__(self, path: Path):
        is_file = path.suffix == ".jsonl"
        self.file = path if is_file else path / "points.jsonl"
        self.folder = path.with_suffix("") if is_file else path  # for all that is no line
        self._end = self._n_lines = 0  # bytes and lines of the file that were read
        self._found: dict[str, Record] = {}  # by `name_of` the config

    def find(self, config: Record) -> Record | None:
        """The point of this config, if it is finished."""
        name = name_of(config)
        if name not in self._found:
            self._read_on()
        return self._found.get(name)

    def measure(self, config: Record, measure: Callable[[], Record]) -> Record:
        """The point of this config, measured now if it is not finished yet."""
        if (found := self.find(config)) is None:
            began = time.perf_counter()
            found = {"config": config, "result": measure()}
            found |= {"seconds": time.perf_counter() - began, "run": describe_run()}
            append_line(self.file, found)
        return found

    def all(self) -> list[Record]:
        """Every finished point, in an order that follows from the configs alone."""
        self._read_on(is_all=True)
        return [self._found[name] for name in sorted(self._found)]

    def _read_on(self, is_all: bool = False) -> None:
        """Read what was appended since the last time; of equal configs the first point counts.

        A damaged line is named on stderr, the last one, which may be on its way, if this `is_all`.
        """
        if not self.file.is_file():
            return
        with self.file.open("rb") as lines:
            lines.seek(self._end)
            for line in lines:
                made, is_whole = _parse(line), line.endswith(b"\n")
                if made is not None:
                    self._found.setdefault(name_of(made["config"]), made)
                elif line.strip() and (is_whole or is_all):
                    which = f"line {self._n_lines + 1} is damaged"
                    which = which if is_whole else "the last line is cut short"
                    print(clean(f"{self.file}, {which} and left out"), file=sys.stderr)
                if is_whole:
                    self._end, self._n_lines = self._end + len(line), self._n_lines + 1


def append_line(file: Path, record: Record) -> None:
    """Append a record as one line, behind a lock, so that no other process writes in between."""
    text = json.dumps({**record, HASH: name_of(record)}) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # a size read during another's write is half a line's
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            text = "\n" + text  # the last line was cut short: it must not spoil this one
        if os.write(handle, text.encode()) != len(text):
            raise OSError(f"{file} could not be written: is the disk full?")
    finally:
        os.close(handle)


def _parse(line: bytes) -> Record | None:
    """The record of a line; None where it is damaged."""
    try:
        record = parse_json(line, "a line")
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("config", {}), dict):
        return None
    said = record.pop(HASH, None)
    is_point = set(record) == {"config", "result", "seconds", "run"}
    return record if is_point and said in (None, name_of(record)) else None
