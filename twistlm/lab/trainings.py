"""What is known of a training: its config, what made it, and a row of metrics per finished round."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .points import append_line, parse_line


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
        record = json.loads((folder / "run.json").read_text())
    metrics = folder / "metrics.jsonl"
    rows = _lines(metrics) if metrics.is_file() else []
    return Training(folder.name, record.pop("config", {}), record, rows)


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
    return [record for record in records if record is not None]
